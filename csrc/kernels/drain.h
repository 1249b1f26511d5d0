// Ends a scope with an idle device, so that memory declared before it outlives the work that uses it.
#pragma once

#include <exception>

#include "kernels/device.h"

namespace zb {

class Drain {
 public:
  explicit Drain(Device& device) : device_(device) {}
  Drain(const Drain&) = delete;
  Drain& operator=(const Drain&) = delete;
  ~Drain() {
    try {
      device_.synchronize();
    } catch (const std::exception&) {
      // The device has failed: nothing runs there any more, and its next call says so.
    }
  }

 private:
  Device& device_;
};

}  // namespace zb
