// The operations of a lane that may not have ended yet, for who looks after them on another thread.
//
// The caller's thread adds, the watchdog's thread removes what has passed. An operation is there before it is put into
// the lane, because putting it in can block where a peer is gone.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "comm/collective_history.h"
#include "kernels/device.h"

namespace zb {

class OperationLog {
 public:
  using Clock = std::chrono::steady_clock;

  // `number` counts the operations that wait for peers, from 1; none for one that waits for nobody.
  void start(const OperationName& name, std::optional<std::uint64_t> number);
  // All that were started before this are in the lane now, before `mark`.
  void put_in(const MarkPtr& mark);

  struct Unfinished {
    OperationName name;
    std::optional<std::uint64_t> number;
    Clock::time_point since;  // when it was started or the one before it ended, whichever was later
  };
  // The oldest operation that has not passed.
  std::optional<Unfinished> oldest(Device& device);

 private:
  struct Entry {
    OperationName name;
    std::optional<std::uint64_t> number;
    Clock::time_point since;
    MarkPtr mark;
    bool is_put_in = false;
  };

  std::mutex mutex_;
  std::deque<Entry> entries_;
};

}  // namespace zb
