// zerobench._core: the translator of exceptions and the list of binders.
#include <cstring>

#include "bindings/bindings.h"
#include "common/error.h"

namespace py = pybind11;

namespace {

py::object error_type(const char* name) { return py::module_::import("zerobench.errors").attr(name); }

void set_error(const char* type, const char* text) { PyErr_SetString(error_type(type).ptr(), text); }

// OSError(errno, text, path) turns into FileNotFoundError, PermissionError, ... by itself.
void set_os_error(const zb::IoError& error) {
  py::object arguments = error.path().empty()
                             ? py::object(py::make_tuple(error.code().value(), error.what()))
                             : py::object(py::make_tuple(error.code().value(), error.what(), error.path()));
  PyErr_SetObject(PyExc_OSError, arguments.ptr());
}

void set_communication_error(const zb::CommunicationError& error) {
  py::object exception = error_type("CommunicationError")(error.what(), error.rank());
  PyErr_SetObject(error_type("CommunicationError").ptr(), exception.ptr());
}

void translate(std::exception_ptr pointer) {
  if (!pointer) return;
  try {
    std::rethrow_exception(pointer);
  } catch (const zb::ArgumentError& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const zb::StateError& error) {
    set_error("StateError", error.what());
  } catch (const zb::CommunicationError& error) {
    set_communication_error(error);
  } catch (const zb::OutOfMemoryError& error) {
    set_error("OutOfMemoryError", error.what());
  } catch (const zb::NonFiniteGradientError& error) {
    set_error("NonFiniteGradientError", error.what());
  } catch (const zb::IoError& error) {
    set_os_error(error);
  }
}

}  // namespace

namespace zb {

DType dtype_from_name(const std::string& name) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    if (name == dtype_name(dtype)) return dtype;
  }
  throw ArgumentError("'" + name + "' is not a dtype of the engine; use float32, bfloat16 or float16");
}

}  // namespace zb

PYBIND11_MODULE(_core, m) {
  m.doc() = "The C++ core of zerobench. Use it through zerobench.initialize().";
  py::register_local_exception_translator(translate);
  zb::bind_common(m);
  zb::bind_memory(m);
  zb::bind_optim(m);
  zb::bind_comm(m);
  zb::bind_zero(m);
}
