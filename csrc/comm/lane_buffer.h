// A registered buffer over one allocation of a device or its transport, counted in the ledger while it lives.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "comm/communicator.h"
#include "memory/ledger.h"

namespace zb {

class LaneBuffer final : public RegisteredBuffer {
 public:
  LaneBuffer(std::shared_ptr<std::byte> memory, std::size_t bytes, bool is_on_device, Allocation allocation)
      : memory_(std::move(memory)), is_on_device_(is_on_device), allocation_(std::move(allocation)) {
    data_ = memory_.get();
    bytes_ = bytes;
  }

  bool is_on_device() const noexcept override { return is_on_device_; }

 private:
  std::shared_ptr<std::byte> memory_;
  bool is_on_device_;
  Allocation allocation_;
};

}  // namespace zb
