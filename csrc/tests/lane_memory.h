// Memory of lane devices that can be mapped in several places, as the driver's can.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "comm/shm_memory.h"
#include "common/error.h"
#include "common/page.h"

namespace zb::test {

// Zero-filled, whole pages.
class LaneMemory {
 public:
  explicit LaneMemory(std::size_t bytes)
      : memfd_(shm::create_memfd(round_up_to_page(bytes))),
        mapping_(shm::Mapping::of_file(memfd_, round_up_to_page(bytes))) {}

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
  explicit LaneWindow(std::span<const std::shared_ptr<LaneMemory>> memories) {
    for (const auto& memory : memories) bytes_ += memory->bytes();
    void* const begin = ::mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    ZB_EXPECT(begin != MAP_FAILED, "no addresses are left");
    data_ = static_cast<std::byte*>(begin);
    std::byte* at = data_;
    for (const auto& memory : memories) {
      void* const mapped =
          ::mmap(at, memory->bytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory->memfd(), 0);
      ZB_EXPECT(mapped == at, "memory cannot be mapped twice");
      at += memory->bytes();
    }
  }
  LaneWindow(const LaneWindow&) = delete;
  LaneWindow& operator=(const LaneWindow&) = delete;
  ~LaneWindow() { ::munmap(data_, bytes_); }

  std::byte* data() const noexcept { return data_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace zb::test
