// Time that the computing thread spends inside collectives: waiting for peers and moving data.
#pragma once

#include <chrono>
#include <string_view>

#include "common/timeline.h"

namespace zb {

class CommunicationClock {
 public:
  explicit CommunicationClock(Timeline* timeline = nullptr) : timeline_(timeline) {}

  // Adds its lifetime to the clock; nested scopes count once, as the outermost.
  class Scope {
   public:
    Scope(CommunicationClock& clock, std::string_view what, std::string_view unit = {}) : clock_(clock) {
      if (clock_.depth_++ > 0) return;
      clock_.what_ = what;
      clock_.unit_ = unit;
      clock_.run();
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    ~Scope() {
      if (--clock_.depth_ == 0) clock_.halt();
    }

   private:
    CommunicationClock& clock_;
  };

  // Takes its lifetime out of the scope that runs: a wait for something else.
  class Pause {
   public:
    explicit Pause(CommunicationClock& clock) : clock_(clock), paused_(clock.depth_ > 0) {
      if (paused_) clock_.halt();
    }
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;
    ~Pause() {
      if (paused_) clock_.run();
    }

   private:
    CommunicationClock& clock_;
    bool paused_;
  };

  double elapsed_ms() const { return std::chrono::duration<double, std::milli>(elapsed_).count(); }
  void reset() { elapsed_ = {}; }

 private:
  void run() { begin_ = Timeline::now(); }
  void halt() {
    const Timeline::Time end = Timeline::now();
    elapsed_ += end - begin_;
    if (timeline_ != nullptr && timeline_->is_on()) timeline_->add("collectives", what_, unit_, begin_, end);
  }

  Timeline* timeline_;
  int depth_ = 0;
  std::string_view what_;  // of the outermost scope, which outlives it
  std::string_view unit_;
  Timeline::Time begin_;
  std::chrono::steady_clock::duration elapsed_{};
};

}  // namespace zb
