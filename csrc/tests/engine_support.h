// A toy model for tests of the engine: parameters in plain memory, ranks as threads, and gradients that are exact
// functions of (rank, step, parameter), so that sums do not depend on their order.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/shm_communicator.h"
#include "common/error.h"
#include "kernels/cpu_device.h"
#include "kernels/cpu_kernels.h"
#include "zero/engine.h"

namespace zb::test {

// What a fake parameter's storage is now. Outlives its binding.
struct ToyTensor {
  std::vector<float> initial;  // the "user's" memory until the engine adopts it
  DType dtype = DType::kFloat32;
  std::byte* data = nullptr;
  Region owned;
  std::string message;
  bool intact = true;

  float get(std::size_t index) const {
    float value = 0.0F;
    cpu_kernels().cast(&value, DType::kFloat32, data + index * dtype_bytes(dtype), dtype, 1);
    return value;
  }
  void set(std::size_t index, float value) {
    cpu_kernels().cast(data + index * dtype_bytes(dtype), dtype, &value, DType::kFloat32, 1);
  }
};

class ToyBinding final : public ParameterBinding {
 public:
  explicit ToyBinding(std::shared_ptr<ToyTensor> tensor) : tensor_(std::move(tensor)) {}

  void attach(std::byte* data) override {
    tensor_->data = data;
    tensor_->owned = {};
  }
  void attach_owned(const Region& region) override {
    tensor_->data = region.data();
    tensor_->owned = region;
  }
  void detach(const std::string& message) override {
    tensor_->data = nullptr;
    tensor_->owned = {};
    tensor_->message = message;
  }
  bool intact() const override { return tensor_->intact; }
  void read(float* destination) const override {
    std::copy(tensor_->initial.begin(), tensor_->initial.end(), destination);
  }
  void adopt(DType param_dtype) override {
    tensor_->dtype = param_dtype;
    tensor_->initial.clear();
    tensor_->data = nullptr;
  }

 private:
  std::shared_ptr<ToyTensor> tensor_;
};

struct ToyParameter {
  std::string name;
  std::size_t numel;
  std::size_t unit;
  int param_group = 0;
  bool trainable = true;
};

inline constexpr std::size_t kRoot = 0;

// A root, four blocks of different sizes (odd, scalar, fewer elements than ranks), one of them with a frozen parameter.
inline const std::vector<ToyParameter>& toy_parameters() {
  static const std::vector<ToyParameter> parameters{
      {"norm", 5, 0},         {"tied", 33, 0, 1},  {"a.weight", 70, 1},  {"a.bias", 1, 1, 1},
      {"b.weight", 70, 2},    {"b.bias", 1, 2, 1}, {"c.weight", 300, 3}, {"c.frozen", 17, 3, 0, false},
      {"d.weight", 128, 4, 1}};
  return parameters;
}
inline const std::vector<std::string>& toy_units() {
  static const std::vector<std::string> names{"root", "a", "b", "c", "d"};
  return names;
}
inline std::vector<std::size_t> parameters_of(std::size_t unit) {
  std::vector<std::size_t> found;
  for (std::size_t index = 0; index < toy_parameters().size(); ++index) {
    if (toy_parameters()[index].unit == unit && toy_parameters()[index].trainable) found.push_back(index);
  }
  return found;
}

// Sixteenths: exact in every dtype.
inline float initial_value(std::size_t parameter, std::size_t index) {
  return static_cast<float>(static_cast<int>((parameter * 31 + index * 7) % 41) - 20) / 16.0F;
}
// Quarters of small integers: exact in fp16 and bf16, and so are their sums over some ranks and micro-batches.
inline float gradient_value(int rank, long micro_step, std::size_t parameter, std::size_t index) {
  const auto mixed = static_cast<std::size_t>(rank) * 5 + static_cast<std::size_t>(micro_step) * 3 + parameter * 7;
  return static_cast<float>(static_cast<int>((mixed + index) % 17) - 8) / 4.0F;
}

inline std::vector<AdamHyperparameters> toy_groups() {
  return {{.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1},
          {.lr = 3e-3, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.0}};
}

struct ToyOptions {
  ZeroStage stage = ZeroStage::kZero0;
  int world_size = 1;
  long accumulation_steps = 1;
  double clip = 0.0;
  DType param_dtype = DType::kFloat32;
  DType reduce_dtype = DType::kFloat32;
  std::size_t prefetch_bytes = SIZE_MAX;  // SIZE_MAX is the default budget
  LossScaleOptions loss_scale;
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
};

using Values = std::vector<std::vector<float>>;  // by parameter

// One rank: its engine, its tensors, and a training loop that calls the engine as the hooks of a real model do.
class ToyRank {
 public:
  ToyRank(const ToyOptions& options, int rank, const std::string& rendezvous) : options_(options) {
    const auto connect = [&](const char* name) {
      return make_shm_communicator({.rank = rank,
                                    .world_size = options.world_size,
                                    .rendezvous = rendezvous + name,
                                    .timeout = options.timeout});
    };
    auto gather = connect("gather");
    auto reduce = connect("reduce");
    EngineModel model;
    model.unit_names = toy_units();
    model.root_unit = kRoot;
    for (std::size_t index = 0; index < toy_parameters().size(); ++index) {
      const ToyParameter& parameter = toy_parameters()[index];
      model.parameters.push_back({parameter.name, parameter.numel, options.param_dtype, options.reduce_dtype,
                                  parameter.trainable, parameter.param_group, parameter.unit});
      auto tensor = std::make_shared<ToyTensor>();
      for (std::size_t i = 0; i < parameter.numel; ++i) {
        // Only rank 0's values count.
        tensor->initial.push_back(initial_value(index, i) + static_cast<float>(rank));
      }
      tensors_.push_back(tensor);
      model.bindings.push_back(std::make_unique<ToyBinding>(tensor));
    }
    const EngineOptions engine_options{
        .stage = options.stage,
        .accumulation_steps = options.accumulation_steps,
        .clip = options.clip,
        .prefetch_bytes = options.prefetch_bytes == SIZE_MAX ? 0 : options.prefetch_bytes,
        .default_prefetch = options.prefetch_bytes == SIZE_MAX,
        .loss_scale = options.loss_scale};
    engine_ =
        std::make_unique<Engine>(engine_options, std::move(model), DeviceParts{make_cpu_device(), make_cpu_adam(1, {})},
                                 std::move(gather), std::move(reduce));
  }

  Engine& engine() { return *engine_; }
  int rank() const { return engine_->rank(); }
  ToyTensor& tensor(std::size_t parameter) { return *tensors_[parameter]; }
  void close() { engine_.reset(); }
  bool sharded() const { return options_.stage == ZeroStage::kZero3 && options_.world_size > 1; }

  // Uses the units in this order, the root around them.
  void forward(const std::vector<std::size_t>& units, bool train = true) {
    engine_->begin_forward(train);
    enter(kRoot);
    for (const std::size_t unit : units) {
      enter(unit);
      engine_->post_forward(unit);
    }
    engine_->post_forward(kRoot);
    engine_->end_forward();
  }

  // A forward that an exception ends after these units.
  void failing_forward(const std::vector<std::size_t>& units) {
    engine_->begin_forward(true);
    enter(kRoot);
    for (const std::size_t unit : units) enter(unit);
    engine_->abandon_forward();
  }

  // Every unit's parameters get a gradient, in this order of units; then the root's.
  void backward(const std::vector<std::size_t>& units, bool last = true) {
    engine_->begin_backward(last);
    for (const std::size_t unit : units) unit_backward(unit);
    for (const std::size_t parameter : parameters_of(kRoot)) give_gradient(parameter);
    engine_->end_backward();
    ++micro_step_;
  }

  void unit_backward(std::size_t unit) {
    engine_->pre_backward(unit);
    expect_readable(unit);
    for (const std::size_t parameter : parameters_of(unit)) give_gradient(parameter);
  }

  void give_gradient(std::size_t parameter) {
    std::vector<float> values(toy_parameters()[parameter].numel);
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = spoiled_ == parameter && i == values.size() / 2
                      ? std::numeric_limits<float>::infinity()
                      : gradient_value(rank(), micro_step_, parameter, i) * static_cast<float>(engine_->loss_scale());
    }
    std::vector<std::byte> bytes(values.size() * dtype_bytes(options_.param_dtype));
    cpu_kernels().cast(bytes.data(), options_.param_dtype, values.data(), DType::kFloat32, values.size());
    engine_->gradient_arrived(parameter, bytes.data(), options_.param_dtype, 1);
  }

  StepOutcome step() {
    engine_->step(toy_groups());
    return engine_->outcome();
  }

  // A step as most models do it.
  StepOutcome train_step(std::vector<std::size_t> units = {1, 2, 3, 4}) {
    forward(units);
    std::reverse(units.begin(), units.end());
    backward(units);
    return step();
  }

  Values state(FullState kind) {
    Values values(toy_parameters().size());
    engine_->read_full_state(kind, [&](std::size_t parameter, const float* data) {
      values[parameter].assign(data, data + toy_parameters()[parameter].numel);
    });
    return values;
  }

  long micro_step() const { return micro_step_; }
  void set_micro_step(long value) { micro_step_ = value; }
  // From now on this parameter's gradient holds an infinity; SIZE_MAX for none.
  void spoil(std::size_t parameter) { spoiled_ = parameter; }

  void expect_readable(std::size_t unit) {
    for (std::size_t index = 0; index < toy_parameters().size(); ++index) {
      if (toy_parameters()[index].unit != unit) continue;
      ASSERT_NE(tensors_[index]->data, nullptr) << toy_parameters()[index].name;
      // Reads every byte, so that sanitizers see memory that is not the unit's, and races with whoever writes it.
      for (std::size_t i = 0; i < toy_parameters()[index].numel; ++i) {
        ASSERT_TRUE(std::isfinite(tensors_[index]->get(i))) << toy_parameters()[index].name << " " << i;
      }
    }
  }

 private:
  void enter(std::size_t unit) {
    engine_->pre_forward(unit);
    expect_readable(unit);
  }

  ToyOptions options_;
  std::vector<std::shared_ptr<ToyTensor>> tensors_;
  std::unique_ptr<Engine> engine_;
  long micro_step_ = 0;
  std::size_t spoiled_ = SIZE_MAX;
};

using ToyBody = std::function<void(ToyRank&)>;

// Runs the body on threads as ranks; what each threw.
inline std::vector<std::exception_ptr> try_ranks(const ToyOptions& options, const ToyBody& body) {
  static std::atomic<int> number{0};
  const std::string rendezvous = "engine-" + std::to_string(::getpid()) + "-" + std::to_string(number++);
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(options.world_size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < options.world_size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        ToyRank toy(options, rank, rendezvous);
        try {
          body(toy);
        } catch (const std::exception& error) {
          toy.engine().abort(error.what());
          throw;
        }
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

inline void run_ranks(const ToyOptions& options, const ToyBody& body) {
  for (const std::exception_ptr& error : try_ranks(options, body)) {
    if (error) std::rethrow_exception(error);
  }
}

// Every rank's result, which must be the same bits on all.
inline Values same_on_all(const ToyOptions& options, const std::function<Values(ToyRank&)>& body) {
  std::vector<Values> results(static_cast<std::size_t>(options.world_size));
  run_ranks(options, [&](ToyRank& toy) { results[static_cast<std::size_t>(toy.rank())] = body(toy); });
  for (const Values& result : results) EXPECT_EQ(result, results.front());
  return results.front();
}

// Training on one thread with no engine: every rank's gradients summed, then the scalar Adam.
class Reference {
 public:
  explicit Reference(int world_size, DType param_dtype = DType::kFloat32)
      : world_size_(world_size), param_dtype_(param_dtype) {
    for (std::size_t index = 0; index < toy_parameters().size(); ++index) {
      const std::size_t numel = toy_parameters()[index].numel;
      master.emplace_back(numel);
      for (std::size_t i = 0; i < numel; ++i) master.back()[i] = initial_value(index, i);
      exp_avg.emplace_back(numel, 0.0F);
      exp_avg_sq.emplace_back(numel, 0.0F);
      sums_.emplace_back(numel, 0.0F);
    }
  }

  // Adds a micro-batch; `has` tells which rank brings a gradient of which unit.
  void backward(long micro_step, const std::function<float(int rank, std::size_t unit)>& count = {}) {
    for (std::size_t index = 0; index < sums_.size(); ++index) {
      for (int rank = 0; rank < world_size_; ++rank) {
        const float times = count ? count(rank, toy_parameters()[index].unit) : 1.0F;
        for (std::size_t i = 0; i < sums_[index].size(); ++i) {
          sums_[index][i] += times * gradient_value(rank, micro_step, index, i);
        }
      }
    }
    ++backwards_;
  }

  double norm() const {
    double total = 0.0;
    for (std::size_t index = 0; index < sums_.size(); ++index) {
      if (!toy_parameters()[index].trainable) continue;
      for (const float value : sums_[index]) total += static_cast<double>(value) * static_cast<double>(value);
    }
    return std::sqrt(total) / (world_size_ * static_cast<double>(backwards_));
  }

  void step(double clip = 0.0) {
    double factor = 1.0 / (static_cast<double>(world_size_) * static_cast<double>(backwards_));
    if (clip > 0.0) factor *= std::min(1.0, clip / (norm() + 1e-6));
    ++steps_;
    for (std::size_t index = 0; index < master.size(); ++index) {
      if (toy_parameters()[index].trainable) {
        const auto group = static_cast<std::size_t>(toy_parameters()[index].param_group);
        adam_function(Isa::kScalar)({.master = master[index].data(),
                                     .exp_avg = exp_avg[index].data(),
                                     .exp_avg_sq = exp_avg_sq[index].data(),
                                     .gradient = sums_[index].data(),
                                     .gradient_dtype = DType::kFloat32,
                                     .low_precision = nullptr,
                                     .low_precision_dtype = DType::kFloat32,
                                     .numel = master[index].size()},
                                    make_adam_scalars(toy_groups()[group], steps_, static_cast<float>(factor)));
      }
    }
    drop();
  }
  void drop() {
    for (std::vector<float>& sum : sums_) std::fill(sum.begin(), sum.end(), 0.0F);
    backwards_ = 0;
  }

  // The parameters as the model sees them.
  Values parameters() const {
    Values values = master;
    for (std::vector<float>& of_one : values) {
      std::vector<std::byte> rounded(of_one.size() * dtype_bytes(param_dtype_));
      cpu_kernels().cast(rounded.data(), param_dtype_, of_one.data(), DType::kFloat32, of_one.size());
      cpu_kernels().cast(of_one.data(), DType::kFloat32, rounded.data(), param_dtype_, of_one.size());
    }
    return values;
  }

  Values master, exp_avg, exp_avg_sq;

 private:
  int world_size_;
  DType param_dtype_;
  Values sums_;
  long steps_ = 0;
  long backwards_ = 0;
};

// The moments that only trainable parameters have.
inline Values without_frozen(Values values) {
  for (std::size_t index = 0; index < values.size(); ++index) {
    if (!toy_parameters()[index].trainable) values[index].clear();
  }
  return values;
}

inline std::string message_of(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const std::exception& caught) {
    return caught.what();
  }
  return "nothing was thrown";
}

}  // namespace zb::test
