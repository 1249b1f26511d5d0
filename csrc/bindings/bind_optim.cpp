#include <ATen/core/Tensor.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "comm/c10d_dtype.h"
#include "common/cpu_features.h"
#include "common/thread_pool.h"
#include "optim/adam.h"
#include "optim/stream.h"

namespace py = pybind11;

namespace zb {
namespace {

DType tensor_dtype(const char* name, const at::Tensor& tensor) {
  const std::optional<DType> dtype = dtype_of(tensor.scalar_type());
  ZB_EXPECT(dtype.has_value(), std::string(name) + " must be a tensor of float32, bfloat16 or float16");
  return *dtype;
}

void expect_flat(const char* name, const at::Tensor& tensor, std::int64_t numel) {
  ZB_EXPECT(tensor.is_cpu() && tensor.is_contiguous(), std::string(name) + " must be a contiguous CPU tensor");
  ZB_EXPECT(tensor.numel() == numel, std::string(name) + " must have " + std::to_string(numel) + " elements, got " +
                                         std::to_string(tensor.numel()));
}

float* float_data(const char* name, const at::Tensor& tensor, std::int64_t numel) {
  expect_flat(name, tensor, numel);
  ZB_EXPECT(tensor_dtype(name, tensor) == DType::kFloat32, std::string(name) + " must be a float32 tensor");
  return static_cast<float*>(tensor.data_ptr());
}

AdamSpan make_span(const at::Tensor& master, const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq,
                   const at::Tensor& gradient, const std::optional<at::Tensor>& low_precision) {
  const std::int64_t numel = master.numel();
  expect_flat("gradient", gradient, numel);
  if (low_precision) expect_flat("low_precision", *low_precision, numel);
  return {.master = float_data("master", master, numel),
          .exp_avg = float_data("exp_avg", exp_avg, numel),
          .exp_avg_sq = float_data("exp_avg_sq", exp_avg_sq, numel),
          .gradient = gradient.data_ptr(),
          .gradient_dtype = tensor_dtype("gradient", gradient),
          .low_precision = low_precision ? low_precision->data_ptr() : nullptr,
          .low_precision_dtype = low_precision ? tensor_dtype("low_precision", *low_precision) : DType::kFloat32,
          .numel = static_cast<std::size_t>(numel)};
}

Isa isa_from_name(const std::string& name) {
  std::string known;
  for (const Isa isa : available_isas()) {
    if (isa_name(isa) == name) return isa;
    known.append(known.empty() ? "" : ", ").append(isa_name(isa));
  }
  throw ArgumentError("the instruction set '" + name + "' is not available here; choose one of " + known);
}

// The tensors of one span and what to do with them: bound once, called often.
class AdamRunner {
 public:
  AdamRunner(at::Tensor master, at::Tensor exp_avg, at::Tensor exp_avg_sq, at::Tensor gradient,
             std::optional<at::Tensor> low_precision, const AdamHyperparameters& hyperparameters)
      : tensors_{std::move(master), std::move(exp_avg), std::move(exp_avg_sq), std::move(gradient)},
        low_precision_(std::move(low_precision)),
        span_(make_span(tensors_[0], tensors_[1], tensors_[2], tensors_[3], low_precision_)),
        hyperparameters_(hyperparameters) {
    static_cast<void>(make_adam_scalars(hyperparameters_, 1, 1.0F));  // refuses what no step can use
  }

  void step(ThreadPool& pool, long step, float grad_factor) const {
    adam_step(span_, make_adam_scalars(hyperparameters_, step, grad_factor), pool);
  }
  void step_as(const std::string& isa, long step, float grad_factor) const {
    adam_function(isa_from_name(isa))(span_, make_adam_scalars(hyperparameters_, step, grad_factor));
  }
  void stream_mix(ThreadPool& pool) const { stream_adam_mix(span_, pool); }
  std::size_t bytes_per_step() const noexcept { return adam_mix_bytes(span_); }

 private:
  at::Tensor tensors_[4];
  std::optional<at::Tensor> low_precision_;
  AdamSpan span_;
  AdamHyperparameters hyperparameters_;
};

void bind_adam_runner(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<AdamRunner>(m, "AdamRunner", "Adam, and the stream of the same traffic, over flat CPU tensors.")
      .def(py::init<at::Tensor, at::Tensor, at::Tensor, at::Tensor, std::optional<at::Tensor>,
                    const AdamHyperparameters&>(),
           py::kw_only(), py::arg("master"), py::arg("exp_avg"), py::arg("exp_avg_sq"), py::arg("gradient"),
           py::arg("low_precision"), py::arg("hyperparameters"))
      .def("step", &AdamRunner::step, py::arg("pool"), py::kw_only(), py::arg("step"), py::arg("grad_factor") = 1.0F,
           Release(), "adam_step over the pool; step counts from 1.")
      .def("step_as", &AdamRunner::step_as, py::arg("isa"), py::kw_only(), py::arg("step"),
           py::arg("grad_factor") = 1.0F, Release(), "The form for one instruction set, in this thread.")
      .def("stream_mix", &AdamRunner::stream_mix, py::arg("pool"), Release(),
           "The same traffic with additions for arithmetic; overwrites what a step overwrites.")
      .def_property_readonly("bytes_per_step", &AdamRunner::bytes_per_step,
                             "What a step and stream_mix read and write.");
}

void triad(const at::Tensor& destination, const at::Tensor& a, const at::Tensor& b, float factor, ThreadPool& pool) {
  const std::int64_t numel = destination.numel();
  float* to = float_data("destination", destination, numel);
  const float* from_a = float_data("a", a, numel);
  const float* from_b = float_data("b", b, numel);
  const py::gil_scoped_release release;
  stream_triad(to, from_a, from_b, factor, static_cast<std::size_t>(numel), pool);
}

void copy_each(const std::vector<at::Tensor>& destinations, const std::vector<at::Tensor>& sources, std::size_t calls) {
  ZB_EXPECT(destinations.size() == sources.size(), "there must be as many sources as destinations");
  for (std::size_t i = 0; i < sources.size(); ++i) {
    expect_flat("source", sources[i], destinations[i].numel());
    expect_flat("destination", destinations[i], sources[i].numel());
    ZB_EXPECT(destinations[i].dtype() == sources[i].dtype(), "source and destination must have the same dtype");
  }
  const py::gil_scoped_release release;
  for (std::size_t call = 0; call < calls; ++call) {
    for (std::size_t i = 0; i < sources.size(); ++i) {
      std::memcpy(destinations[i].data_ptr(), sources[i].data_ptr(), sources[i].nbytes());
    }
  }
}

}  // namespace

void bind_optim(py::module_& m) {
  py::class_<AdamHyperparameters>(m, "AdamHyperparameters", "Hyperparameters of one param group.")
      .def(py::init([](double lr, double beta1, double beta2, double eps, double weight_decay, bool decoupled) {
             return AdamHyperparameters{
                 lr, beta1, beta2, eps, weight_decay, decoupled ? WeightDecayKind::kDecoupled : WeightDecayKind::kL2};
           }),
           py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"),
           py::arg("decoupled"));
  bind_adam_runner(m);
  m.def("stream_triad", &triad, py::arg("destination"), py::arg("a"), py::arg("b"), py::kw_only(), py::arg("factor"),
        py::arg("pool"), "destination = a + factor * b past the caches: 12 bytes per element.");
  m.def("memcpy_each", &copy_each, py::arg("destinations"), py::arg("sources"), py::arg("calls") = 1,
        "The C library's memcpy from each flat tensor to its destination, in this thread, `calls` times.");
}

}  // namespace zb
