// One caller at a time. A signal's handler runs in the thread that waits inside a call: what it calls itself is
// refused.
#pragma once

#include <atomic>
#include <mutex>
#include <thread>

#include "common/error.h"

namespace zb {

class Entry {
 public:
  class Scope {
   public:
    explicit Scope(Entry& entry) : entry_(entry) {
      ZB_EXPECT_STATE(entry_.inside_.load(std::memory_order_relaxed) != std::this_thread::get_id(),
                      "a signal's handler called the engine while a call waits for other ranks; set a flag in the "
                      "handler, and call the engine where the training loop finds it");
      entry_.mutex_.lock();
      entry_.inside_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    }
    ~Scope() {
      entry_.inside_.store(std::thread::id(), std::memory_order_relaxed);
      entry_.mutex_.unlock();
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Entry& entry_;
  };

 private:
  std::mutex mutex_;
  std::atomic<std::thread::id> inside_{};
};

}  // namespace zb
