#include "bindings/bound_engine.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/where.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>

#include "bindings/bindings.h"
#include "comm/c10d_dtype.h"
#include "comm/or_abort.h"
#include "zero/torch_parameter.h"

namespace py = pybind11;

namespace zb {

BoundEngine::BoundEngine(const EngineOptions& options, std::vector<std::string> unit_names, std::size_t root_unit,
                         const std::vector<ParameterArgument>& parameters, const py::object& gather_communicator,
                         const py::object& reduce_communicator, const std::string& device, DeviceParts parts,
                         const py::object& materialise, std::vector<std::string> unit_cures)
    : device_(device) {
  auto gather = take_communicator(gather_communicator);
  auto reduce = take_communicator(reduce_communicator);
  EngineModel model;
  unit_num_ = unit_names.size();
  model.unit_names = std::move(unit_names);
  model.root_unit = root_unit;
  model.unit_cures = std::move(unit_cures);
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
                                .accumulate_dtype = dtype_from_name(argument.accumulate_dtype),
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
  std::vector<std::string> names;
  for (const std::size_t index : indices) {
    trainable.push_back(tensors[index]);
    names.push_back(engine_->parameter(index).name);
  }
  guards_ = std::make_shared<GradientGuards>(trainable, std::move(names));
  hooks_ = make_gradient_hooks(engine_, memory_, guards_, trainable, indices);
}

void BoundEngine::take_guards() {
  if (!guards_ || !guards_->are_placed()) return;
  switch (guards_->take()) {
    case GradientGuards::Found::kIntact:
      return;
    case GradientGuards::Found::kNone:
      get().drop_gradients();
      return;
    case GradientGuards::Found::kReplaced:
      place_guards();
      throw StateError("the .grad of '" + guards_->replaced_name() + "' was " +
                       (guards_->replaced_is_none() ? "set to None" : "replaced by another tensor") +
                       ", and the engine keeps gradients itself: inside `with engine.gradients() as gradients:` " +
                       (guards_->replaced_is_none() ? "set gradients[name] = None to leave a parameter out of the step"
                                                    : "change gradients[name], or assign a tensor to it"));
  }
}

void BoundEngine::place_guards() {
  if (guards_ && engine_ && engine_->window_backwards() > 0) guards_->place();
}

void BoundEngine::close() {
  std::exception_ptr interrupt;
  try {
    if (engine_) engine_->quiesce();
  } catch (const Interrupted&) {
    interrupt = std::current_exception();
  }
  hooks_.reset();
  guards_.reset();
  engine_.reset();
  if (interrupt) std::rethrow_exception(interrupt);
}

void BoundEngine::stop(const std::string& why, bool for_good) noexcept {
  if (engine_) engine_->stop(why, for_good);
}

void BoundEngine::set_compute_stream(void* stream) {
  if (memory_) memory_->follow_current_stream();
  get().set_compute_stream(stream);
}

void BoundEngine::begin_forward(bool train) {
  take_guards();
  try {
    get().begin_forward(train);
  } catch (...) {
    place_guards();
    throw;
  }
  if (!train || !hooks_) return;
  hooks_->begin_forward();
  is_called_.assign(unit_num_, false);
}

void BoundEngine::end_forward() {
  is_called_.clear();
  const ScopeExit back([this] { place_guards(); });
  get().end_forward();
}

void BoundEngine::abandon_forward() {
  is_called_.clear();
  const ScopeExit back([this] { place_guards(); });
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

void BoundEngine::pre_forward_with_root(std::size_t unit) {
  get().pre_forward_with_root(unit);
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

bool BoundEngine::try_wait_updates() {
  const bool is_done = get().try_wait_updates();
  if (memory_) memory_->lead_current_stream();
  return is_done;
}

void BoundEngine::begin_backward(bool last, const std::vector<AdamHyperparameters>& groups) {
  // A plain loss.backward() may have left an error that nobody asked for.
  static_cast<void>(take_hook_error());
  take_guards();
  try {
    get().begin_backward(last, groups);
  } catch (...) {
    place_guards();
    throw;
  }
}

void BoundEngine::end_backward() {
  const ScopeExit back([this] { place_guards(); });
  get().end_backward();
}

void BoundEngine::abort_backward() {
  const ScopeExit back([this] { place_guards(); });
  get().abort_backward();
}

void BoundEngine::begin_input_backward() {
  get().begin_input_backward();
  if (memory_) memory_->lead_current_stream();
}

void BoundEngine::step(const std::vector<AdamHyperparameters>& groups) {
  on_gradients([&](Engine& engine) { engine.step(groups); });
}

void BoundEngine::end_window() {
  on_gradients([](Engine& engine) { engine.end_window(); });
}

double BoundEngine::gradient_norm() {
  return on_gradients([](Engine& engine) { return engine.gradient_norm(); });
}

double BoundEngine::clip_gradients(double max_norm) {
  return on_gradients([=](Engine& engine) { return engine.clip_gradients(max_norm); });
}

void BoundEngine::drop_gradients() {
  on_gradients([](Engine& engine) { engine.drop_gradients(); });
}

void BoundEngine::check_gradients() {
  on_gradients([](Engine&) {});
}

std::map<std::string, at::Tensor> BoundEngine::read_gradients(const std::string& device) {
  return on_gradients([&](Engine& engine) {
    std::map<std::string, at::Tensor> found;
    engine.read_gradients([&](std::size_t index, float* sums) {
      const at::Tensor values = floats_at(sums, sizes_[index]);
      found.emplace(engine.parameter(index).name, values.mul(engine.gradient_factor()).to(at::Device(device)));
    });
    return found;
  });
}

void BoundEngine::write_gradients(const std::map<std::string, at::Tensor>& gradients,
                                  const std::vector<std::string>& held, int source_rank) {
  on_gradients([&](Engine& engine) {
    GradientChange change{.source_rank = source_rank};
    for (std::size_t index = 0; index < sizes_.size(); ++index) {
      const std::string& name = engine.parameter(index).name;
      if (std::find(held.begin(), held.end(), name) != held.end()) change.held.push_back(index);
    }
    change.fill = [&](std::size_t index, float* values) {
      const auto found = gradients.find(engine.parameter(index).name);
      if (found == gradients.end()) return;  // held: zero
      floats_at(values, sizes_[index]).copy_(found->second);
    };
    const float factor = engine.gradient_factor();
    change.merge = [&](const float* values, void* sums, DType dtype, std::size_t numel) {
      const std::vector<std::int64_t> sizes{static_cast<std::int64_t>(numel)};
      const at::Tensor wanted = floats_at(const_cast<float*>(values), sizes);
      const auto options = at::TensorOptions().dtype(scalar_type(dtype)).device(device_);
      at::Tensor there = at::for_blob(sums, sizes).options(options).target_device(device_).make_tensor();
      // What was not changed keeps its bits.
      const at::Tensor changed = wanted.div(factor).to(options);
      there.copy_(at::where(there.to(c10::ScalarType::Float).mul(factor).eq(wanted), there, changed));
    };
    engine.write_gradients(change);
  });
}

at::Tensor BoundEngine::floats_at(float* values, at::IntArrayRef sizes) const {
  const auto options = at::TensorOptions().dtype(c10::ScalarType::Float).device(device_);
  return at::for_blob(values, sizes).options(options).target_device(device_).make_tensor();
}

void BoundEngine::rethrow_hook_error() {
  if (const std::exception_ptr error = take_hook_error()) std::rethrow_exception(error);
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
                                  const std::optional<std::pair<double, long>>& loss_scale,
                                  const std::map<std::string, long>& held_steps) {
  static const std::map<FullState, std::string> kKinds{
      {FullState::kMaster, "parameters"}, {FullState::kExpAvg, "exp_avg"}, {FullState::kExpAvgSq, "exp_avg_sq"}};
  FullStateFacts facts{.steps_applied = step};
  if (loss_scale) facts.loss_scale = {.scale = loss_scale->first, .good_steps = loss_scale->second};
  std::vector<std::int64_t> held(sizes_.size(), 0);
  for (std::size_t index = 0; index < held.size(); ++index) {
    const auto found = held_steps.find(get().parameter(index).name);
    if (found != held_steps.end()) held[index] = found->second;
  }
  get().write_full_state(facts, std::move(held), [&](FullState kind, std::size_t index, float* values) {
    const at::Tensor& tensor = states.at(kKinds.at(kind)).at(get().parameter(index).name);
    std::memcpy(values, tensor.const_data_ptr(), static_cast<std::size_t>(tensor.numel()) * sizeof(float));
  });
}

std::map<std::string, long> BoundEngine::held_steps() const {
  std::map<std::string, long> found;
  const std::vector<std::int64_t> held = get().held_steps();
  for (std::size_t index = 0; index < held.size(); ++index) {
    if (held[index] > 0) found.emplace(get().parameter(index).name, held[index]);
  }
  return found;
}

}  // namespace zb
