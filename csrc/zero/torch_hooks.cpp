#include "zero/torch_hooks.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "comm/c10d_dtype.h"
#include "common/error.h"

namespace zb {
namespace {

using torch::autograd::variable_list;

// shared_ptr up to torch 2.11, intrusive_ptr later.
using GradAccumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

DType gradient_dtype(const at::Tensor& gradient, const std::string& name) {
  const std::optional<DType> dtype = dtype_of(gradient.scalar_type());
  ZB_EXPECT(dtype.has_value(), "the gradient of '" + name + "' is " + c10::toString(gradient.scalar_type()) +
                                   "; only float32, bfloat16 and float16 gradients can be reduced");
  return *dtype;
}

// Of a gradient in memory that followed streams use; where there are none, of the gradient alone.
struct UsedGradient {
  UsedGradient(at::Tensor used, std::shared_ptr<const TorchMemory> user)
      : gradient(std::move(used)), use(std::move(user), gradient.storage().data_ptr()) {}

  at::Tensor gradient;
  TorchMemory::Use use;
};

std::shared_ptr<const void> owner_of(at::Tensor gradient, const std::shared_ptr<const TorchMemory>& memory) {
  if (memory) return std::make_shared<UsedGradient>(std::move(gradient), memory);
  return std::make_shared<at::Tensor>(std::move(gradient));
}

// The first that nobody has taken. Autograd has a thread for each device.
std::mutex hook_error_mutex;
std::exception_ptr hook_error;

void keep_hook_error(std::exception_ptr error) noexcept {
  const std::lock_guard lock(hook_error_mutex);
  if (!hook_error) hook_error = std::move(error);
}

// Before autograd accumulates into a parameter's `.grad`: leaves it undefined ([Note: gradient guards] in
// torch_gradient_guards.h).
class TakeGuard final : public torch::autograd::FunctionPreHook {
 public:
  TakeGuard(std::shared_ptr<GradientGuards> guards, std::size_t index) : guards_(std::move(guards)), index_(index) {}
  variable_list operator()(const variable_list& gradients) override {
    guards_->take_one(index_);
    // What autograd's engine gives is its own list, which it replaces by the one that is returned.
    return std::move(const_cast<variable_list&>(gradients));
  }

 private:
  std::shared_ptr<GradientGuards> guards_;
  std::size_t index_;
};

class TorchGradientHooks final : public GradientHooks {
 public:
  TorchGradientHooks(std::shared_ptr<Engine> engine, std::shared_ptr<const TorchMemory> memory,
                     const std::shared_ptr<GradientGuards>& guards, const std::vector<at::Tensor>& tensors,
                     const std::vector<std::size_t>& indices)
      : shared_(std::make_shared<Shared>()) {
    shared_->engine = std::move(engine);
    shared_->memory = std::move(memory);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      GradAccumulator accumulator = torch::autograd::impl::grad_accumulator(tensors[i]);
      const std::uintptr_t key = accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
          [shared = shared_, tensor = tensors[i], index = indices[i]](const variable_list& outputs,
                                                                      const variable_list&) {
            shared->arrived(tensor, index);
            return outputs;
          }));
      auto before = std::make_unique<TakeGuard>(guards, i);
      const torch::autograd::FunctionPreHook* const before_key = before.get();
      accumulator->add_pre_hook(std::move(before));
      const std::size_t unit = shared_->engine->parameter(indices[i]).unit;
      if (unit >= hooks_.size()) hooks_.resize(unit + 1);
      hooks_[unit].push_back({.key = key, .before_key = before_key, .accumulator = std::move(accumulator)});
    }
  }

  ~TorchGradientHooks() override { remove(); }

  void remove() noexcept override {
    for (const std::vector<Hook>& of_unit : hooks_) {
      for (const Hook& hook : of_unit) {
        hook.accumulator->del_post_hook(hook.key);
        auto& before = hook.accumulator->pre_hooks();
        std::erase_if(before, [&](const auto& each) { return each.get() == hook.before_key; });
      }
    }
    hooks_.clear();
  }

  void begin_forward() override {
    for (std::vector<Hook>& of_unit : hooks_) {
      for (Hook& hook : of_unit) hook.use_num = use_num(hook);
    }
  }
  bool is_used(std::size_t unit) const override {
    return unit < hooks_.size() &&
           std::any_of(
               hooks_[unit].begin(), hooks_[unit].end(), [](const Hook& hook) { return use_num(hook) > hook.use_num; });
  }

 private:
  struct Shared {
    std::shared_ptr<Engine> engine;
    std::shared_ptr<const TorchMemory> memory;

    void arrived(const at::Tensor& parameter, std::size_t index) {
      at::Tensor& held = parameter.mutable_grad();
      if (!held.defined()) return;
      const at::Tensor gradient = std::exchange(held, at::Tensor());
      try {
        const std::string& name = engine->parameter(index).name;
        ZB_EXPECT(
            gradient.layout() == c10::kStrided,
            "the gradient of '" + name + "' is sparse; make the module produce dense ones (Embedding(sparse=False))");
        at::Tensor dense = gradient.contiguous();
        const void* data = dense.const_data_ptr();
        const DType dtype = gradient_dtype(dense, name);
        if (memory) memory->take_over(dense.storage().data_ptr());
        engine->gradient_arrived(index, data, dtype, torch::autograd::get_current_graph_task_id(),
                                 owner_of(std::move(dense), memory));
      } catch (...) {
        keep_hook_error(std::current_exception());
        throw;
      }
    }
  };

  struct Hook {
    std::uintptr_t key;
    const torch::autograd::FunctionPreHook* before_key;
    GradAccumulator accumulator;
    std::size_t use_num = 0;  // when the forward began
  };

  // Nodes of graphs hold the accumulators of the leaves that they use.
  static std::size_t use_num(const Hook& hook) { return static_cast<std::size_t>(hook.accumulator.use_count()); }

  std::shared_ptr<Shared> shared_;
  std::vector<std::vector<Hook>> hooks_;  // by unit
};

}  // namespace

std::exception_ptr take_hook_error() noexcept {
  const std::lock_guard lock(hook_error_mutex);
  return std::exchange(hook_error, nullptr);
}

std::unique_ptr<GradientHooks> make_gradient_hooks(std::shared_ptr<Engine> engine,
                                                   std::shared_ptr<const TorchMemory> memory,
                                                   std::shared_ptr<GradientGuards> guards,
                                                   const std::vector<at::Tensor>& tensors,
                                                   const std::vector<std::size_t>& indices) {
  return std::make_unique<TorchGradientHooks>(std::move(engine), std::move(memory), guards, tensors, indices);
}

}  // namespace zb
