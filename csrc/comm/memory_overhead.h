// What the shared buffers of a communicator take of the device beyond what was asked for, where memory that peers may
// map comes in pieces of a size of its own. It stands in the buffers' ledger, under Category::kCommunicators.
//
// Whoever makes such memory says what it takes, the communicator what it hands out of it. Thread-safe; made by
// make_shared, since buffers may outlive their communicator.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>

#include "memory/ledger.h"

namespace zb {

class MemoryOverhead : public std::enable_shared_from_this<MemoryOverhead> {
 public:
  // Counted once it is handed out: until then it is no overhead, and would be a peak of the category.
  void take(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    taken_bytes_ += bytes;
  }
  void give_back(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    taken_bytes_ -= bytes;
    count();
  }

  // The same memory, for a buffer that counts `bytes` of it in `ledger`, which is that of all buffers that have one.
  std::shared_ptr<std::byte> hand_out(std::shared_ptr<std::byte> memory, std::size_t bytes, Ledger* ledger) {
    if (ledger == nullptr) return memory;
    {
      const std::lock_guard lock(mutex_);
      if (!is_in_ledger_) overhead_ = Allocation(ledger, Tier::kDevice, Category::kCommunicators, 0);
      is_in_ledger_ = true;
      handed_out_bytes_ += bytes;
      count();
    }
    std::byte* const data = memory.get();
    return {data, [self = shared_from_this(), memory = std::move(memory), bytes](std::byte*) mutable {
              memory.reset();
              self->take_back(bytes);
            }};
  }

 private:
  void take_back(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    handed_out_bytes_ -= bytes;
    count();
  }
  void count() { overhead_.resize(taken_bytes_ - std::min(taken_bytes_, handed_out_bytes_)); }

  std::mutex mutex_;
  std::size_t taken_bytes_ = 0;
  std::size_t handed_out_bytes_ = 0;
  bool is_in_ledger_ = false;
  Allocation overhead_;
};

}  // namespace zb
