#include "bindings/bound_engine.h"

#include <ATen/ops/empty.h>
#include <pybind11/stl.h>

#include <cstring>

#include "bindings/bindings.h"
#include "comm/or_abort.h"
#include "zero/torch_parameter.h"

namespace py = pybind11;

namespace zb {

BoundEngine::BoundEngine(const EngineOptions& options, std::vector<std::string> unit_names, std::size_t root_unit,
                         const std::vector<ParameterArgument>& parameters, const py::object& gather_communicator,
                         const py::object& reduce_communicator, const std::string& device, DeviceParts parts,
                         const py::object& materialise) {
  auto gather = take_communicator(gather_communicator);
  auto reduce = take_communicator(reduce_communicator);
  EngineModel model;
  unit_num_ = unit_names.size();
  model.unit_names = std::move(unit_names);
  model.root_unit = root_unit;
  std::vector<at::Tensor> tensors;
  std::vector<ParameterBinding*> bindings;
  std::vector<std::size_t> indices;  // of the trainable ones
  for (const ParameterArgument& argument : parameters) {
    if (argument.trainable) indices.push_back(tensors.size());
    tensors.push_back(argument.tensor);
    sizes_.push_back(argument.tensor.sizes().vec());
    model.parameters.push_back({.name = argument.name,
                                .numel = static_cast<std::size_t>(argument.tensor.numel()),
                                .param_dtype = dtype_from_name(argument.param_dtype),
                                .reduce_dtype = dtype_from_name(argument.reduce_dtype),
                                .trainable = argument.trainable,
                                .param_group = argument.param_group,
                                .unit = argument.unit});
    or_abort(*reduce, [&] { model.bindings.push_back(make_torch_parameter(argument.name, argument.tensor, device)); });
  }
  for (const auto& binding : model.bindings) bindings.push_back(binding.get());
  if (!materialise.is_none()) {
    model.materialise = [&](std::size_t unit) {
      const py::gil_scoped_acquire acquire;
      const auto made = materialise(unit).cast<std::map<std::size_t, at::Tensor>>();
      for (const auto& [index, tensor] : made) {
        tensors.at(index) = tensor;
        rebind_torch_parameter(*bindings.at(index), tensor);
      }
    };
  }
  EngineOptions with_memory = options;
  if (at::Device(device).is_cuda()) {
    memory_ = std::make_shared<TorchMemory>(device);
    with_memory.allocate_in_compute = [memory = memory_](std::size_t bytes) { return memory->allocate(bytes); };
  }
  const py::gil_scoped_release release;
  engine_ =
      std::make_shared<Engine>(with_memory, std::move(model), std::move(parts), std::move(gather), std::move(reduce));
  std::vector<at::Tensor> trainable;
  for (const std::size_t index : indices) trainable.push_back(tensors[index]);
  hooks_ = make_gradient_hooks(engine_, memory_, trainable, indices);
}

void BoundEngine::close() {
  std::exception_ptr interrupt;
  try {
    if (engine_) engine_->quiesce();
  } catch (const Interrupted&) {
    interrupt = std::current_exception();
  }
  hooks_.reset();
  engine_.reset();
  if (interrupt) std::rethrow_exception(interrupt);
}

void BoundEngine::set_compute_stream(void* stream) {
  if (memory_) memory_->follow_current_stream();
  get().set_compute_stream(stream);
}

void BoundEngine::begin_forward(bool train) {
  get().begin_forward(train);
  if (!train || !hooks_) return;
  hooks_->begin_forward();
  is_called_.assign(unit_num_, false);
}

void BoundEngine::end_forward() {
  is_called_.clear();
  get().end_forward();
}

void BoundEngine::abandon_forward() {
  is_called_.clear();
  get().abandon_forward();
}

void BoundEngine::pre_forward(std::size_t unit) {
  if (unit < is_called_.size() && !is_called_[unit]) {
    is_called_[unit] = true;
    if (hooks_->is_used(unit)) get().note_earlier_use(unit);
  }
  get().pre_forward(unit);
  if (memory_) memory_->lead_current_stream();
}

void BoundEngine::post_forward(std::size_t unit) {
  if (memory_) memory_->join_current_stream();
  get().post_forward(unit);
}

void BoundEngine::pre_backward(std::size_t unit) {
  get().pre_backward(unit);
  if (memory_) memory_->lead_current_stream();
}

void BoundEngine::inputs_done(std::size_t unit) {
  if (memory_) memory_->join_current_stream();
  get().inputs_done(unit);
}

bool BoundEngine::settle_parameters() {
  const bool are_settled = get().settle_parameters();
  if (memory_) memory_->lead_current_stream();
  return are_settled;
}

void BoundEngine::begin_backward(bool last, const std::vector<AdamHyperparameters>& groups) {
  // A plain loss.backward() may have left an error that nobody asked for.
  if (hooks_) static_cast<void>(hooks_->take_error());
  get().begin_backward(last, groups);
}

void BoundEngine::rethrow_hook_error() {
  if (!hooks_) return;
  if (const std::exception_ptr error = hooks_->take_error()) std::rethrow_exception(error);
}

std::map<std::string, at::Tensor> BoundEngine::full_state(const std::string& kind, bool rank0_only) const {
  static const std::map<std::string, FullState> kKinds{{"parameters", FullState::kParameters},
                                                       {"master", FullState::kMaster},
                                                       {"exp_avg", FullState::kExpAvg},
                                                       {"exp_avg_sq", FullState::kExpAvgSq}};
  const auto found = kKinds.find(kind);
  ZB_EXPECT(found != kKinds.end(), "'" + kind + "' is not a state; use parameters, master, exp_avg or exp_avg_sq");
  std::map<std::string, at::Tensor> result;
  const auto keep = [&](std::size_t index, const float* values) {
    at::Tensor tensor = at::empty(sizes_[index], at::TensorOptions().dtype(c10::ScalarType::Float));
    std::memcpy(tensor.mutable_data_ptr(), values, static_cast<std::size_t>(tensor.numel()) * sizeof(float));
    result.emplace(get().parameter(index).name, std::move(tensor));
  };
  const bool keeps = !rank0_only || get().rank() == 0;
  get().read_full_state(found->second, keeps ? std::function(keep) : nullptr);
  return result;
}

void BoundEngine::load_full_state(const std::map<std::string, std::map<std::string, at::Tensor>>& states, long step,
                                  const std::optional<std::pair<double, long>>& loss_scale) {
  static const std::map<FullState, std::string> kKinds{
      {FullState::kMaster, "parameters"}, {FullState::kExpAvg, "exp_avg"}, {FullState::kExpAvgSq, "exp_avg_sq"}};
  FullStateFacts facts{.steps_applied = step};
  if (loss_scale) facts.loss_scale = {.scale = loss_scale->first, .good_steps = loss_scale->second};
  get().write_full_state(facts, [&](FullState kind, std::size_t index, float* values) {
    const at::Tensor& tensor = states.at(kKinds.at(kind)).at(get().parameter(index).name);
    std::memcpy(values, tensor.const_data_ptr(), static_cast<std::size_t>(tensor.numel()) * sizeof(float));
  });
}

}  // namespace zb
