// Turns exceptions of the core into their Python counterparts: the translator of both modules.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>

#include "bindings/signals.h"
#include "common/error.h"

namespace zb {

inline pybind11::object error_type(const char* name) {
  return pybind11::module_::import("zerobench.errors").attr(name);
}

inline void set_error(const char* type, const char* text) { PyErr_SetString(error_type(type).ptr(), text); }

// OSError(errno, text, path) turns into FileNotFoundError, PermissionError, ... by itself.
inline void set_os_error(const IoError& error) {
  namespace py = pybind11;
  py::object arguments = error.path().empty()
                             ? py::object(py::make_tuple(error.code().value(), error.what()))
                             : py::object(py::make_tuple(error.code().value(), error.what(), error.path()));
  PyErr_SetObject(PyExc_OSError, arguments.ptr());
}

inline void set_communication_error(const CommunicationError& error) {
  pybind11::object exception = error_type("CommunicationError")(error.what(), error.rank());
  PyErr_SetObject(error_type("CommunicationError").ptr(), exception.ptr());
}

// For register_local_exception_translator: torch's modules share pybind11's global list of translators.
inline void translate_exception(std::exception_ptr pointer) {
  if (!pointer) return;
  try {
    std::rethrow_exception(pointer);
  } catch (const Interrupted& interrupt) {
    set_interrupt(interrupt);
  } catch (const ArgumentError& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const StateError& error) {
    set_error("StateError", error.what());
  } catch (const CommunicationError& error) {
    set_communication_error(error);
  } catch (const OutOfMemoryError& error) {
    set_error("OutOfMemoryError", error.what());
  } catch (const NonFiniteGradientError& error) {
    set_error("NonFiniteGradientError", error.what());
  } catch (const CudaError& error) {
    set_error("Error", error.what());
  } catch (const NcclError& error) {
    set_error("Error", error.what());
  } catch (const IoError& error) {
    set_os_error(error);
  }
}

}  // namespace zb
