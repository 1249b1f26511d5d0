#include "toy_rank.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <thread>
#include <utility>

#include "comm/shm_communicator.h"
#include "kernels/cpu_device.h"
#include "kernels/cpu_kernels.h"

namespace zb::test {

ToyRank::ToyRank(const ToyOptions& options, int rank, const ToyPlace& place) : options_(options), place_(place) {
  make_parts(rank);
  EngineModel model;
  model.unit_names = toy_units();
  model.root_unit = kRoot;
  for (std::size_t index = 0; index < toy_parameters().size(); ++index) {
    const ToyParameter& parameter = toy_parameters()[index];
    const bool is_other = options.mixes_reduce_dtypes && index % 2 == 1;
    model.parameters.push_back({.name = parameter.name,
                                .numel = parameter.numel,
                                .param_dtype = options.param_dtype,
                                .reduce_dtype = is_other ? DType::kBFloat16 : options.reduce_dtype,
                                .accumulate_dtype = options.accumulate_dtype,
                                .trainable = parameter.trainable,
                                .param_group = parameter.param_group,
                                .unit = parameter.unit});
    auto tensor = std::make_shared<ToyTensor>();
    tensor->device = parts_.device;
    for (std::size_t i = 0; i < parameter.numel; ++i) {
      // Only rank 0's values count.
      tensor->initial.push_back(initial_value(index, i) + static_cast<float>(rank));
    }
    tensors_.push_back(tensor);
    model.bindings.push_back(std::make_unique<ToyBinding>(tensor));
  }
  EngineOptions engine_options{.stage = options.stage,
                               .accumulation_steps = options.accumulation_steps,
                               .clip = options.clip,
                               .prefetch_bytes = options.prefetch_bytes == SIZE_MAX ? 0 : options.prefetch_bytes,
                               .default_prefetch = options.prefetch_bytes == SIZE_MAX,
                               .reshard_after_forward = options.reshard_after_forward,
                               .keep_parameter_shards = options.keep_parameter_shards,
                               .store_param_remainders = options.store_param_remainders,
                               .publish_bytes = options.publish_bytes,
                               .loss_scale = options.loss_scale,
                               .keep_root_bytes = options.keep_root_bytes,
                               .push_gradient_bytes = place.sim ? place.sim->push_gradient_bytes() : 0,
                               .own_part_beside_bytes = place.sim ? place.sim->own_part_beside_bytes() : 0,
                               .splice_bytes = place.sim ? place.sim->splice_bytes() : SIZE_MAX,
                               .optimizer_in_backward = options.optimizer_in_backward,
                               .allocate_in_compute = nullptr,
                               .make_store = options.make_store};
  if (sim_device_ || options.before_allocation) {
    engine_options.allocate_in_compute = [this](std::size_t bytes) {
      if (options_.before_allocation) options_.before_allocation();
      return sim_device_ ? sim_device_->allocate_in_compute(bytes, "a gradient shard")
                         : parts_.device->allocate(bytes, "a gradient shard");
    };
  }
  engine_ = std::make_unique<Engine>(engine_options, std::move(model), parts_, std::move(gather_), std::move(reduce_));
}

ToyRank::~ToyRank() {
  engine_.reset();
  if (!place_.expected_reads || std::uncaught_exceptions() > 0) return;
  EXPECT_EQ(read_num_, place_.expected_reads->size());
}

void ToyRank::forward(const std::vector<std::size_t>& units, bool train, const std::function<void()>& before_end) {
  engine_->begin_forward(train);
  enter(kRoot);
  for (const std::size_t unit : units) {
    enter(unit);
    if (unit != hidden_) engine_->post_forward(unit);
  }
  engine_->post_forward(kRoot);
  before_end();
  engine_->end_forward();
}

void ToyRank::failing_forward(const std::vector<std::size_t>& units) {
  engine_->begin_forward(true);
  enter(kRoot);
  for (const std::size_t unit : units) enter(unit);
  engine_->abandon_forward();
}

void ToyRank::backward(const std::vector<std::size_t>& units, bool last) {
  begin_backward(last);
  for (const std::size_t unit : units) unit_backward(unit);
  for (const std::size_t parameter : parameters_of(kRoot)) give_gradient(parameter);
  end_backward();
}

void ToyRank::end_backward() {
  engine_->end_backward();
  if (options_.world_size > 1) expect_no_gradients();
  ++micro_step_;
}

void ToyRank::begin_backward(bool last) {
  engine_->begin_backward(last,
                          options_.optimizer_in_backward && last ? toy_groups() : std::vector<AdamHyperparameters>());
}

void ToyRank::unit_backward(std::size_t unit) {
  if (unit != hidden_) engine_->pre_backward(unit);
  expect_readable(unit);
  for (const std::size_t parameter : parameters_of(unit)) give_gradient(parameter);
}

void ToyRank::give_gradient(std::size_t parameter) {
  const double scale = engine_->loss_scale();
  std::vector<float> values(toy_parameters()[parameter].numel);
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = spoiled_ == parameter && i == values.size() / 2
                    ? std::numeric_limits<float>::infinity()
                    : gradient_value(rank(), micro_step_, parameter, i) * static_cast<float>(scale);
  }
  const DType dtype = options_.param_dtype;
  const std::size_t bytes = values.size() * dtype_bytes(dtype);
  std::shared_ptr<std::byte> gradient = sim_device_ ? sim_device_->allocate_in_compute(bytes, "a gradient")
                                                    : parts_.device->allocate(bytes, "a gradient");
  std::byte* const data = gradient.get();
  compute(*parts_.device, "backward", {SimDevice::written(data, dtype, values.size())},
          [data, dtype, values] { cpu_kernels().cast(data, dtype, values.data(), DType::kFloat32, values.size()); });
  // Where nothing may be held the engine must be done with it when the call returns.
  engine_->gradient_arrived(parameter, data, dtype, 1, sim_device_ ? std::move(gradient) : nullptr);
}

StepOutcome ToyRank::step() {
  start_step();
  return engine_->outcome();
}

void ToyRank::start_step() {
  if (engine_->awaits_share()) engine_->place_state(options_.fitting_share + 0.01 * rank());
  engine_->step(toy_groups());
  expect_no_gradients();
}

void ToyRank::train(std::vector<std::size_t> units) {
  forward(units);
  std::reverse(units.begin(), units.end());
  backward(units);
  start_step();
}

StepOutcome ToyRank::train_step(const std::vector<std::size_t>& units) {
  train(units);
  return engine_->outcome();
}

Values ToyRank::state(FullState kind) {
  Values values(toy_parameters().size());
  engine_->read_full_state(kind, [&](std::size_t parameter, const float* data) {
    values[parameter].assign(data, data + toy_parameters()[parameter].numel);
  });
  return values;
}

void ToyRank::expect_readable(std::size_t unit) {
  std::vector<Touched> touched;
  for (std::size_t index = 0; index < toy_parameters().size(); ++index) {
    if (toy_parameters()[index].unit != unit) continue;
    ASSERT_NE(tensors_[index]->data, nullptr) << toy_parameters()[index].name;
    touched.push_back(SimDevice::read(tensors_[index]->data, options_.param_dtype, toy_parameters()[index].numel));
  }
  compute(*parts_.device, "forward or backward", touched,
          [this, unit, touched, number = read_num_++] { check_reads(unit, touched, number); });
}

void ToyRank::linger(std::chrono::microseconds time) {
  if (sim_device_) {
    sim_device_->pause();
  } else {
    std::this_thread::sleep_for(time);
  }
}

void ToyRank::expect_no_gradients() {
  EXPECT_EQ(sim_device_ ? sim_device_->block_num("a gradient") : 0U, 0U)
      << "gradients are held that nothing reads any more";
}

void ToyRank::enter(std::size_t unit) {
  if (unit != hidden_) engine_->pre_forward(unit);
  expect_readable(unit);
}

void ToyRank::make_parts(int rank) {
  if (place_.sim) {
    sim_device_ = place_.sim->make_device(rank);
    parts_ = {sim_device_, std::make_shared<SimAdam>(sim_device_)};
    gather_ = place_.sim->make_communicator(sim_device_, rank, Lane::kGather, options_.timeout);
    reduce_ = place_.sim->make_communicator(sim_device_, rank, Lane::kReduce, options_.timeout);
    return;
  }
  const auto connect = [&](const char* name) {
    return make_shm_communicator({.rank = rank,
                                  .world_size = options_.world_size,
                                  .rendezvous = place_.rendezvous + name,
                                  .timeout = options_.timeout});
  };
  parts_ = {make_cpu_device(), make_cpu_adam(1, {})};
  gather_ = connect("gather");
  reduce_ = connect("reduce");
}

void ToyRank::check_reads(std::size_t unit, const std::vector<Touched>& touched, std::size_t number) {
  if (sim_device_ && !place_.expected_reads) return;  // where ranks fail, what an aborted gather leaves is still read
  std::vector<std::byte> bytes;
  for (const Touched& parameter : touched) {
    const auto* data = static_cast<const std::byte*>(parameter.data);
    bytes.insert(bytes.end(), data, data + parameter.bytes);
  }
  std::vector<float> values(bytes.size() / dtype_bytes(options_.param_dtype));
  cpu_kernels().cast(values.data(), DType::kFloat32, bytes.data(), options_.param_dtype, values.size());
  EXPECT_TRUE(std::all_of(values.begin(), values.end(), [](float value) { return std::isfinite(value); }))
      << "unit " << toy_units()[unit] << " read values that are not finite, in use " << number;
  if (place_.expected_reads) {
    EXPECT_TRUE(number < place_.expected_reads->size() && (*place_.expected_reads)[number] == bytes)
        << "unit " << toy_units()[unit] << " read other values than on the CPU, in use " << number;
  }
  if (place_.reads) place_.reads->push_back(std::move(bytes));
}

}  // namespace zb::test
