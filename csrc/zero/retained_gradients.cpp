#include "zero/retained_gradients.h"

#include <chrono>
#include <exception>
#include <thread>
#include <utility>

namespace zb {
namespace {

constexpr auto kCounterPollInterval = std::chrono::microseconds(20);  // the timer adds to it
// With an empty compute lane. Polls are counted, not time, so a host that is not running loses nothing.
constexpr int kMostIdlePolls = 16;

}  // namespace

bool RetainedGradients::retain(std::vector<ArrivedGradient> gradients, Lane lane) {
  if (lane == Lane::kCompute || gradients.empty()) return false;  // later work in the compute lane runs after the reads
  units_.push_back({std::move(gradients), device_.mark(lane)});
  return true;
}

void RetainedGradients::make_room() {
  while (!units_.empty() && device_.has_passed(units_.front().read)) units_.pop_front();
  while (units_.size() >= kUnitNum) {
    if (gathers_meet_()) {
      if (!await(units_.front().read)) return;
    } else {
      device_.wait(Lane::kCompute, units_.front().read);
    }
    units_.pop_front();
  }
}

bool RetainedGradients::await(const MarkPtr& read) {
  if (device_.has_passed(read)) return true;
  const MarkPtr computed = device_.mark(Lane::kCompute);
  for (int idle_polls = 0; !device_.has_passed(read); ++idle_polls) {
    if (!device_.has_passed(computed) && !is_compute_waiting_()) idle_polls = 0;
    if (idle_polls >= kMostIdlePolls) return false;
    std::this_thread::sleep_for(kCounterPollInterval);
  }
  return true;
}

void RetainedGradients::drop() noexcept {
  try {
    release();
  } catch (const std::exception&) {
    units_.clear();  // the device has failed; its next call raises
  }
}

void RetainedGradients::release() {
  if (!units_.empty()) device_.wait(Lane::kCompute, units_.back().read);
  units_.clear();
}

}  // namespace zb
