// Runs Python's signal handlers where a thread waits in the core: set by both modules.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <exception>
#include <string>

#include "common/interrupts.h"

namespace zb {

// Python runs handlers in its main thread, which is the process's first one, also behind a fork.
inline void run_python_signal_handlers() {
  namespace py = pybind11;
  if (::gettid() != ::getpid() || Py_IsInitialized() == 0) return;
  const py::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() == 0) return;
  const py::error_already_set error;
  throw Interrupted(py::str(error.type().attr("__name__")), std::make_exception_ptr(error));
}

// What the handler raised is raised in Python.
inline void set_interrupt(const Interrupted& interrupt) {
  try {
    std::rethrow_exception(interrupt.cause());
  } catch (pybind11::error_already_set& error) {
    error.restore();
  }
}

}  // namespace zb
