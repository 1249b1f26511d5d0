// A network link of limited speed that ranks pretend to have.
//
// [Note: paced link]
// Each rank has a link of its own to the others, which sends and receives at full speed at once. What a rank sends
// waits for what it sent before. So an operation that is started at t, needs `bytes` and makes `rounds` of messages has
// come at max(t, link free) + bytes / speed + rounds x latency, or when it really has, if that is later. The ranks do
// not tell each other when they started: one that starts early may go on early, and waits for the others in its next
// operation.
#pragma once

#include <chrono>
#include <mutex>

#include "comm/wire_cost.h"

namespace zb {

struct LinkSpeed {
  double bytes_per_s = 0.0;  // of data, without the headers of frames
  std::chrono::nanoseconds latency{0};

  std::chrono::nanoseconds transfer(std::uint64_t bytes) const noexcept;
};

// Shared by the communicators of a rank. From any thread.
class PacedLink {
 public:
  using Time = std::chrono::steady_clock::time_point;

  explicit PacedLink(LinkSpeed speed) noexcept : speed_(speed) {}

  // When an operation that is started `now` has come. Never earlier than one that was started before.
  Time arrival(WireCost cost, Time now);

 private:
  LinkSpeed speed_;
  std::mutex mutex_;
  Time free_;          // of what was sent so far
  Time last_arrival_;  // so far
};

// Throws ArgumentError unless the speed is above zero and both are finite, and the latency not negative.
LinkSpeed link_speed(double bytes_per_s, double latency_s);

}  // namespace zb
