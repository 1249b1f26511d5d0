#include "comm/paced_link.h"

#include <algorithm>
#include <cmath>

namespace zb {

std::chrono::nanoseconds LinkSpeed::transfer(std::uint64_t bytes) const noexcept {
  return std::chrono::nanoseconds(static_cast<std::int64_t>(1e9 * static_cast<double>(bytes) / bytes_per_s));
}

LinkSpeed link_speed(double bytes_per_s, double latency_s) {
  ZB_EXPECT(bytes_per_s > 0 && std::isfinite(bytes_per_s),
            "a link's speed must be a positive number of bytes a second");
  ZB_EXPECT(latency_s >= 0 && std::isfinite(latency_s), "a link's latency must be a number of seconds, 0 or more");
  return {bytes_per_s, std::chrono::nanoseconds(static_cast<std::int64_t>(1e9 * latency_s))};
}

PacedLink::Time PacedLink::arrival(WireCost cost, Time now) {
  const std::lock_guard lock(mutex_);
  free_ = std::max(free_, now) + speed_.transfer(cost.bytes);
  last_arrival_ = std::max(last_arrival_, free_ + cost.rounds * speed_.latency);
  return last_arrival_;
}

}  // namespace zb
