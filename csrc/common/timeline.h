// What the parts of an engine were busy with and when, recorded while somebody asks; else a span costs one branch.
//
// Times are nanoseconds of the steady clock, which is Python's time.perf_counter_ns. Thread-safe.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace zb {

struct TimelineSpan {
  std::string place;  // what works or waits: "update thread", "disk", ...
  std::string what;   // "adam", "read", ...
  std::string unit;
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
};

class Timeline {
 public:
  using Time = std::chrono::steady_clock::time_point;

  static Time now() { return std::chrono::steady_clock::now(); }
  bool is_on() const noexcept { return is_on_.load(std::memory_order_relaxed); }

  void start() {
    const std::lock_guard lock(mutex_);
    spans_.clear();
    is_on_.store(true, std::memory_order_relaxed);
  }
  std::vector<TimelineSpan> stop() {
    const std::lock_guard lock(mutex_);
    is_on_.store(false, std::memory_order_relaxed);
    return std::exchange(spans_, {});
  }
  void add(std::string_view place, std::string_view what, std::string_view unit, Time begin, Time end) {
    const std::lock_guard lock(mutex_);
    if (!is_on()) return;
    spans_.push_back({std::string(place), std::string(what), std::string(unit), in_ns(begin), in_ns(end)});
  }

 private:
  static std::int64_t in_ns(Time time) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
  }

  std::mutex mutex_;
  std::atomic<bool> is_on_{false};
  std::vector<TimelineSpan> spans_;
};

// Adds its lifetime; what it names outlives it. A null timeline records nothing.
class TimelineScope {
 public:
  TimelineScope(Timeline* timeline, std::string_view place, std::string_view what, std::string_view unit)
      : timeline_(timeline != nullptr && timeline->is_on() ? timeline : nullptr),
        place_(place),
        what_(what),
        unit_(unit) {
    if (timeline_ != nullptr) begin_ = Timeline::now();
  }
  TimelineScope(const TimelineScope&) = delete;
  TimelineScope& operator=(const TimelineScope&) = delete;
  ~TimelineScope() {
    if (timeline_ != nullptr) timeline_->add(place_, what_, unit_, begin_, Timeline::now());
  }

 private:
  Timeline* timeline_;
  std::string_view place_;
  std::string_view what_;
  std::string_view unit_;
  Timeline::Time begin_;
};

}  // namespace zb
