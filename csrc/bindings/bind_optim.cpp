#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "optim/adam.h"

namespace py = pybind11;

namespace zb {

void bind_optim(py::module_& m) {
  py::class_<AdamHyperparameters>(m, "AdamHyperparameters", "Hyperparameters of one param group.")
      .def(py::init([](double lr, double beta1, double beta2, double eps, double weight_decay, bool decoupled) {
             return AdamHyperparameters{
                 lr, beta1, beta2, eps, weight_decay, decoupled ? WeightDecayKind::kDecoupled : WeightDecayKind::kL2};
           }),
           py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"),
           py::arg("decoupled"));
}

}  // namespace zb
