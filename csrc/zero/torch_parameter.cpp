#include "zero/torch_parameter.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/StorageImpl.h>

#include <utility>

#include "comm/c10d_dtype.h"
#include "common/error.h"

namespace zb {
namespace {

// torch before 2.12 can make a storage raise, but has no call that ends it; later ones forget the message with it. The
// flag is private. An explicit instantiation may name a private member; this one hands the pointer to it out.
using AccessFlag = bool c10::StorageImpl::*;
AccessFlag access_flag();
template <AccessFlag flag>
struct ReachAccessFlag {
  friend AccessFlag access_flag() { return flag; }
};
template struct ReachAccessFlag<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

// The storage's data pointer must be set right after, which makes the storage look at the flag again.
template <typename Storage>
void clear_access_error(Storage& storage) {
  if constexpr (requires { storage.clear_data_ptr_access_error_msg_(); }) {
    storage.clear_data_ptr_access_error_msg_();
  } else {
    storage.*access_flag() = false;
  }
}

class TorchParameter final : public ParameterBinding {
 public:
  TorchParameter(std::string name, at::Tensor tensor, c10::Device device)
      : name_(std::move(name)), tensor_(std::move(tensor)), device_(device) {}

  void rebind(const at::Tensor& tensor) { tensor_ = tensor; }

  void read(float* destination) const override {
    if (tensor_.numel() == 0) return;
    ZB_EXPECT(!tensor_.is_meta(), "parameter '" + name_ +
                                      "' is on the meta device and has no values; give zerobench.initialize a function "
                                      "that makes them (materialise=zerobench.models.materialise.materialise)");
    const auto options = at::TensorOptions().dtype(c10::ScalarType::Float).device(device_);
    at::Tensor values =
        at::for_blob(destination, tensor_.sizes()).options(options).target_device(device_).make_tensor();
    values.copy_(tensor_.detach());
  }

  void adopt(DType param_dtype) override {
    const c10::ScalarType type = scalar_type(param_dtype);
    const std::size_t bytes = static_cast<std::size_t>(tensor_.numel()) * dtype_bytes(param_dtype);
    storage_ = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                     at::DataPtr(nullptr, device_), nullptr, false);
    at::Tensor fresh = at::empty({0}, at::TensorOptions().dtype(type).device(device_));
    fresh.set_(c10::Storage(storage_), 0, tensor_.sizes());
    tensor_.set_data(fresh);
    storage_->release_data_and_set_meta_custom_data_ptr_error_msg_(
        "parameter '" + name_ + "' lost its data: an engine could not be built over it; build the model again");
  }

  void attach(std::byte* data) override { place(at::DataPtr(data, device_)); }

  void attach_owned(const Region& region) override {
    auto owner = std::make_unique<std::shared_ptr<RegisteredBuffer>>(region.buffer);
    at::DataPtr pointer(
        region.data(), owner.get(),
        [](void* context) { delete static_cast<std::shared_ptr<RegisteredBuffer>*>(context); }, device_);
    static_cast<void>(owner.release());
    place(std::move(pointer));
  }

  void detach(const std::string& message) override {
    placed_ = nullptr;
    storage_->set_data_ptr_noswap(at::DataPtr(nullptr, device_));
    storage_->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
  }

  void guard(const std::string& message) override {
    if (!std::exchange(has_update_message_, true)) {
      storage_->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
    } else {
      set_access_error(true);
    }
  }

  void unguard() override { set_access_error(false); }

  // torch moves a storage's memory too, where a tensor is to be shared with other processes.
  bool intact() const override {
    return tensor_.storage().unsafeGetStorageImpl() == storage_.get() && tensor_.storage_offset() == 0 &&
           storage_->_mutable_data_ptr_no_checks().get() == placed_;
  }

 private:
  // Keeps data and message. The storage looks at the flag when its data pointer is set.
  void set_access_error(bool raises) {
    storage_.get()->*access_flag() = raises;
    at::DataPtr data = std::move(storage_->_mutable_data_ptr_no_checks());
    storage_->set_data_ptr_noswap(std::move(data));
  }

  void place(at::DataPtr&& pointer) {
    has_update_message_ = false;
    clear_access_error(*storage_);
    placed_ = pointer.get();
    storage_->set_data_ptr_noswap(std::move(pointer));
  }

  std::string name_;
  at::Tensor tensor_;
  c10::Device device_;
  c10::intrusive_ptr<c10::StorageImpl> storage_;
  const void* placed_ = nullptr;  // where the storage's data are
  bool has_update_message_ = false;
};

}  // namespace

std::unique_ptr<ParameterBinding> make_torch_parameter(const std::string& name, const at::Tensor& tensor,
                                                       const std::string& device) {
  const c10::ScalarType type = tensor.scalar_type();
  const c10::Device wanted(device);
  ZB_EXPECT(tensor.device().is_cpu() || tensor.is_meta() || tensor.device() == wanted,
            "parameter '" + name + "' is on " + tensor.device().str() + " and the engine on " + wanted.str() +
                "; move the model there with model.to('" + wanted.str() + "')");
  ZB_EXPECT(type == c10::ScalarType::Float || type == c10::ScalarType::BFloat16 || type == c10::ScalarType::Half,
            "parameter '" + name + "' is " + c10::toString(type) +
                "; float32, bfloat16 and float16 can be trained, convert it first (model.float())");
  ZB_EXPECT(tensor.layout() == c10::kStrided,
            "parameter '" + name + "' is sparse; only dense parameters can be trained");
  return std::make_unique<TorchParameter>(name, tensor, wanted);
}

void rebind_torch_parameter(ParameterBinding& binding, const at::Tensor& tensor) {
  static_cast<TorchParameter&>(binding).rebind(tensor);
}

}  // namespace zb
