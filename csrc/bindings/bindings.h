// One binder per folder of the core; module.cpp calls them all.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

namespace zb {

class Communicator;

void bind_common(pybind11::module_& m);
void bind_memory(pybind11::module_& m);
void bind_optim(pybind11::module_& m);
void bind_io(pybind11::module_& m);
void bind_comm(pybind11::module_& m);
void bind_stores(pybind11::module_& m);
void bind_zero(pybind11::module_& m);

// Out of the Python object that held it.
std::unique_ptr<Communicator> take_communicator(const pybind11::object& object);

}  // namespace zb
