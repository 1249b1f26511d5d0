#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "common/cpu_features.h"
#include "common/thread_pool.h"

namespace py = pybind11;

namespace zb {

void bind_common(py::module_& m) {
  m.def(
      "available_isas",
      [] {
        std::vector<std::string> names;
        for (const Isa isa : available_isas()) names.emplace_back(isa_name(isa));
        return names;
      },
      "Vector instruction sets that this machine and build have, worst first.");
  m.def("best_isa", [] { return std::string(isa_name(best_isa())); }, "The instruction set that kernels use.");
  m.def("allowed_cpus", &allowed_cpus, "CPUs that this process may run on.");
  py::class_<ThreadPool>(m, "ThreadPool", "Pinned threads for loops over memory; the caller counts as one.")
      .def(py::init<std::size_t, std::vector<int>>(), py::arg("thread_num"), py::arg("cpus") = std::vector<int>{})
      .def_property_readonly("thread_num", &ThreadPool::thread_num);
}

}  // namespace zb
