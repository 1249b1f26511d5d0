// The original cause of a communicator's failure: set once, by any thread, and raised by every later call.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>
#include <string>

#include "common/error.h"

namespace zb {

class Cause {
 public:
  // `rank` is the rank at fault, -1 where it is not known. False where an earlier cause stays.
  bool set(const std::string& reason, int rank) {
    const std::lock_guard lock(mutex_);
    if (error_) return false;
    error_.emplace(reason, rank);
    is_set_.store(true, std::memory_order_release);
    return true;
  }
  bool is_set() const noexcept { return is_set_.load(std::memory_order_acquire); }
  void check() const {
    if (is_set()) [[unlikely]]
      throw CommunicationError(*error_);
  }
  std::optional<CommunicationError> get() const noexcept {
    return is_set() ? error_ : std::optional<CommunicationError>();
  }

 private:
  std::mutex mutex_;
  std::atomic<bool> is_set_{false};
  std::optional<CommunicationError> error_;  // never changes again once is_set_
};

}  // namespace zb
