// Owner of zero-filled device memory that counts in a ledger.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "kernels/device.h"
#include "memory/ledger.h"

namespace zb {

class DeviceBuffer {
 public:
  DeviceBuffer() = default;  // empty
  // `ledger` may be null. Throws OutOfMemoryError.
  DeviceBuffer(Device& device, std::size_t bytes, Ledger* ledger, Category category)
      : memory_(bytes == 0 ? nullptr : device.allocate(bytes, category_name(category))),
        bytes_(bytes),
        allocation_(ledger, Tier::kDevice, category, bytes) {}
  // A part of memory that others made, which it keeps alive.
  DeviceBuffer(std::shared_ptr<std::byte> memory, std::size_t bytes, Ledger* ledger, Category category)
      : memory_(std::move(memory)), bytes_(bytes), allocation_(ledger, Tier::kDevice, category, bytes) {}

  std::byte* data() const noexcept { return memory_.get(); }  // null when empty
  std::size_t bytes() const noexcept { return bytes_; }
  template <class T>
  T* as() const noexcept {
    return reinterpret_cast<T*>(memory_.get());
  }

 private:
  std::shared_ptr<std::byte> memory_;
  std::size_t bytes_ = 0;
  Allocation allocation_;
};

}  // namespace zb
