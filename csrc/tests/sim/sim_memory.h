// Memory of lane devices that can be mapped in several places, as the driver's can.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "comm/shm_memory.h"

namespace zb::test {

// Zero-filled, whole pages.
class LaneMemory {
 public:
  explicit LaneMemory(std::size_t bytes);

  std::byte* data() const noexcept { return mapping_->data(); }
  std::size_t bytes() const noexcept { return mapping_->bytes(); }
  int memfd() const noexcept { return memfd_.get(); }

 private:
  shm::FileDescriptor memfd_;
  std::shared_ptr<shm::Mapping> mapping_;
};

// Addresses at which memories appear, one after the other.
class LaneWindow {
 public:
  explicit LaneWindow(std::span<const std::shared_ptr<LaneMemory>> memories);
  LaneWindow(const LaneWindow&) = delete;
  LaneWindow& operator=(const LaneWindow&) = delete;
  ~LaneWindow();

  std::byte* data() const noexcept { return data_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace zb::test
