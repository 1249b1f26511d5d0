// Memory of simulated devices that can be mapped in several places, as the driver's can.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "comm/shm_memory.h"

namespace zb::test {

// Zero-filled, whole pages.
class SimMemory {
 public:
  explicit SimMemory(std::size_t bytes);

  std::byte* data() const noexcept { return mapping_->data(); }
  std::size_t bytes() const noexcept { return mapping_->bytes(); }
  int memfd() const noexcept { return memfd_.get(); }

 private:
  shm::FileDescriptor memfd_;
  std::shared_ptr<shm::Mapping> mapping_;
};

// Addresses at which memories appear, one after the other.
class SimWindow {
 public:
  explicit SimWindow(std::span<const std::shared_ptr<SimMemory>> memories);
  SimWindow(const SimWindow&) = delete;
  SimWindow& operator=(const SimWindow&) = delete;
  ~SimWindow();

  std::byte* data() const noexcept { return data_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace zb::test
