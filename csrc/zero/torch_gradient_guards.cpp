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
  c10::StorageImpl* const pointer = storage.get();
  return {.tensor = std::move(tensor), .storage = pointer};
}

void GradientGuards::place() {
  if (guards_.empty()) {
    guards_.reserve(parameters_.size());
    for (std::size_t index = 0; index < parameters_.size(); ++index) guards_.push_back(make_guard(index));
  }
  for (std::size_t index = 0; index < guards_.size(); ++index) {
    guards_[index].is_taken = false;
    parameters_[index].mutable_grad() = guards_[index].tensor;
  }
  are_placed_ = true;
}

// `gradient.data = other` leaves the tensor and changes its storage.
bool GradientGuards::is_guarded(std::size_t index, const at::Tensor& gradient) const noexcept {
  const Guard& guard = guards_[index];
  return gradient.unsafeGetTensorImpl() == guard.tensor.unsafeGetTensorImpl() &&
         gradient.storage().unsafeGetStorageImpl() == guard.storage;
}

GradientGuards::Found GradientGuards::take() {
  are_placed_ = false;
  std::size_t none_num = 0;
  std::size_t taken_num = 0;
  std::size_t replaced_num = 0;
  for (std::size_t index = 0; index < guards_.size(); ++index) {
    at::Tensor& gradient = parameters_[index].mutable_grad();
    if (!gradient.defined()) {
      if (guards_[index].is_taken) {
        ++taken_num;
        continue;
      }
      if (none_num++ + replaced_num == 0) replaced_ = index;
      continue;
    }
    if (!is_guarded(index, gradient)) {
      if (replaced_num++ == 0) {
        replaced_ = index;
        replaced_is_none_ = false;
      }
      if (gradient.unsafeGetTensorImpl() == guards_[index].tensor.unsafeGetTensorImpl()) {
        guards_[index] = make_guard(index);
      }
    }
    gradient.reset();
  }
  if (replaced_num > 0) return Found::kReplaced;
  if (none_num == 0) return Found::kIntact;
  replaced_is_none_ = true;
  return none_num + taken_num == guards_.size() ? Found::kNone : Found::kReplaced;
}

void GradientGuards::take_one(std::size_t index) noexcept {
  if (!are_placed_ || index >= guards_.size()) return;
  at::Tensor& gradient = parameters_[index].mutable_grad();
  if (!gradient.defined() || !is_guarded(index, gradient)) return;
  gradient.reset();
  guards_[index].is_taken = true;
}

}  // namespace zb
