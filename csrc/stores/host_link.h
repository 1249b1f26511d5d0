// Copies between a device and pinned host memory, counted.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "kernels/device.h"
#include "stores/store.h"

namespace zb {

// Thread-safe as far as the device is.
class HostLink {
 public:
  explicit HostLink(std::shared_ptr<Device> device) : device_(std::move(device)) {}

  void to_host(Lane lane, std::byte* destination, const void* source, std::size_t bytes) {
    device_->copy_to_pinned(lane, destination, source, bytes);
    to_host_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  }
  void to_device(Lane lane, void* destination, const std::byte* source, std::size_t bytes) {
    device_->copy_from_pinned(lane, destination, source, bytes);
    to_device_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  }
  StoreTraffic traffic() const {
    return {.to_host_bytes = to_host_bytes_.load(std::memory_order_relaxed),
            .to_device_bytes = to_device_bytes_.load(std::memory_order_relaxed)};
  }

 private:
  std::shared_ptr<Device> device_;
  std::atomic<std::uint64_t> to_host_bytes_{0};
  std::atomic<std::uint64_t> to_device_bytes_{0};
};

}  // namespace zb
