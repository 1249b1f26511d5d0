// Time that the computing thread spends inside collectives: waiting for peers and moving data.
#pragma once

#include <chrono>

namespace zb {

class CommunicationClock {
 public:
  // Adds its lifetime to the clock; nested scopes count once.
  class Scope {
   public:
    explicit Scope(CommunicationClock& clock) : clock_(clock) {
      if (clock_.depth_++ == 0) clock_.begin_ = std::chrono::steady_clock::now();
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    ~Scope() {
      if (--clock_.depth_ == 0) clock_.elapsed_ += std::chrono::steady_clock::now() - clock_.begin_;
    }

   private:
    CommunicationClock& clock_;
  };

  double elapsed_ms() const { return std::chrono::duration<double, std::milli>(elapsed_).count(); }
  void reset() { elapsed_ = {}; }

 private:
  int depth_ = 0;
  std::chrono::steady_clock::time_point begin_;
  std::chrono::steady_clock::duration elapsed_{};
};

}  // namespace zb
