// zerobench._core: the list of binders.
#include "bindings/bindings.h"
#include "bindings/signals.h"
#include "bindings/translate.h"

namespace py = pybind11;

PYBIND11_MODULE(_core, m) {
  m.doc() = "The C++ core of zerobench. Use it through zerobench.initialize().";
  py::register_local_exception_translator(zb::translate_exception);
  zb::set_signal_handlers(zb::run_python_signal_handlers);
  zb::bind_common(m);
  zb::bind_memory(m);
  zb::bind_optim(m);
  zb::bind_io(m);
  zb::bind_comm(m);
  zb::bind_stores(m);
  zb::bind_zero(m);
}
