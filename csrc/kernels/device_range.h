// Ranges of profilers that end with their scope, or when their owner says so.
#pragma once

#include <utility>

#include "kernels/device.h"

namespace zb {

// Within one function of one thread. The name outlives it.
class RangeScope {
 public:
  RangeScope(Device& device, const char* name) : device_(device) { device_.push_range(name); }
  RangeScope(const RangeScope&) = delete;
  RangeScope& operator=(const RangeScope&) = delete;
  ~RangeScope() { device_.pop_range(); }

 private:
  Device& device_;
};

// From one call to another, which may come from another thread, or not at all: then it ends with its owner.
class OpenRange {
 public:
  OpenRange() = default;
  OpenRange(OpenRange&& other) noexcept : device_(std::exchange(other.device_, nullptr)), id_(other.id_) {}
  OpenRange& operator=(OpenRange&& other) noexcept {
    end();
    device_ = std::exchange(other.device_, nullptr);
    id_ = other.id_;
    return *this;
  }
  ~OpenRange() { end(); }

  bool is_open() const noexcept { return device_ != nullptr; }
  // One that is open ends first. The device outlives it.
  void start(Device& device, const char* name) {
    end();
    id_ = device.start_range(name);
    device_ = &device;
  }
  void end() noexcept {
    if (device_ != nullptr) std::exchange(device_, nullptr)->end_range(id_);
  }

 private:
  Device* device_ = nullptr;  // null: not open
  RangeId id_ = 0;
};

}  // namespace zb
