#include "zero/torch_gradient_guards.h"

#include <ATen/ops/empty.h>

#include <utility>

namespace zb {

GradientGuards::GradientGuards(std::vector<at::Tensor> parameters, std::vector<std::string> names)
    : parameters_(std::move(parameters)), names_(std::move(names)) {}

GradientGuards::~GradientGuards() {
  if (!are_placed_) return;
  for (std::size_t index = 0; index < guards_.size(); ++index) take_one(index);
}

GradientGuards::Guard GradientGuards::make_guard(std::size_t index) const {
  const at::Tensor& parameter = parameters_[index];
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), parameter.nbytes(),
                                                       at::DataPtr(nullptr, parameter.device()), nullptr, false);
  at::Tensor tensor = at::empty({0}, parameter.options().requires_grad(false));
  tensor.set_(c10::Storage(storage), 0, parameter.sizes());
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(
      "the gradient of '" + names_[index] +
      "' is kept by the engine until its step, in flat buffers and shards: read or change it inside `with "
      "engine.gradients() as gradients:`, clip it with engine.clip_grad_norm_(max_norm), drop it with "
      "engine.zero_grad()");
  const c10::TensorImpl* const pointer = tensor.unsafeGetTensorImpl();
  return {.tensor = std::move(tensor), .pointer = pointer, .storage = std::move(storage)};
}

void GradientGuards::place() {
  if (guards_.empty()) {
    guards_.reserve(parameters_.size());
    for (std::size_t index = 0; index < parameters_.size(); ++index) guards_.push_back(make_guard(index));
  }
  for (std::size_t index = 0; index < guards_.size(); ++index) {
    guards_[index].is_taken = false;
    parameters_[index].mutable_grad() = std::move(guards_[index].tensor);
  }
  are_placed_ = true;
}

// `gradient.data = other` leaves the tensor and changes its storage; and another tensor may lie where a guard was
// freed.
bool GradientGuards::take_back(std::size_t index, at::Tensor& gradient) noexcept {
  Guard& guard = guards_[index];
  if (gradient.unsafeGetTensorImpl() != guard.pointer ||
      gradient.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() != guard.storage.get()) {
    return false;
  }
  guard.tensor = std::move(gradient);
  return true;
}

GradientGuards::Found GradientGuards::take() {
  are_placed_ = false;
  std::size_t none_num = 0;
  std::size_t taken_num = 0;
  std::size_t replaced_num = 0;
  for (std::size_t index = 0; index < guards_.size(); ++index) {
    if (guards_[index].is_taken) {
      ++taken_num;
      continue;
    }
    at::Tensor& gradient = parameters_[index].mutable_grad();
    if (gradient.defined() && take_back(index, gradient)) continue;
    const bool is_none = !gradient.defined();
    if ((is_none ? none_num + replaced_num : replaced_num) == 0) replaced_ = index;
    ++(is_none ? none_num : replaced_num);
    gradient.reset();
    guards_[index] = make_guard(index);
  }
  replaced_is_none_ = replaced_num == 0;
  if (replaced_num > 0) return Found::kReplaced;
  if (none_num == 0) return Found::kIntact;
  return none_num + taken_num == guards_.size() ? Found::kNone : Found::kReplaced;
}

void GradientGuards::take_one(std::size_t index) noexcept {
  if (!are_placed_ || guards_[index].is_taken) return;
  at::Tensor& gradient = parameters_[index].mutable_grad();
  guards_[index].is_taken = gradient.defined() && take_back(index, gradient);
}

}  // namespace zb
