#include "comm/operation_log.h"

#include <algorithm>

namespace zb {

void OperationLog::start(const OperationName& name, std::optional<std::uint64_t> number) {
  const std::lock_guard lock(mutex_);
  entries_.push_back({name, number, Clock::now(), nullptr, false});
}

void OperationLog::put_in(const MarkPtr& mark) {
  const std::lock_guard lock(mutex_);
  for (auto entry = entries_.rbegin(); entry != entries_.rend() && !entry->is_put_in; ++entry) {
    entry->mark = mark;
    entry->is_put_in = true;
  }
}

std::optional<OperationLog::Unfinished> OperationLog::oldest(Device& device) {
  for (;;) {
    Entry front;
    {
      const std::lock_guard lock(mutex_);
      if (entries_.empty()) return std::nullopt;
      front = entries_.front();
    }
    // Outside of the lock: the caller's thread must not wait for the device behind this one.
    if (!front.is_put_in || !device.has_passed(front.mark)) return Unfinished{front.name, front.number, front.since};
    const std::lock_guard lock(mutex_);
    entries_.pop_front();
    if (!entries_.empty()) entries_.front().since = std::max(entries_.front().since, Clock::now());
  }
}

}  // namespace zb
