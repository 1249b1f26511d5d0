#include "zero/packed_gradients.h"

#include <chrono>
#include <exception>
#include <thread>
#include <utility>

namespace zb {
namespace {

constexpr auto kCounterPollInterval = std::chrono::microseconds(20);  // and what the timer adds
constexpr int kMostIdlePolls = 16;  // of a host whose compute lane is empty; a host that does not run loses nothing

}  // namespace

bool PackedGradients::hold(std::vector<HeldGradient> gradients, Lane lane) {
  if (lane == Lane::kCompute || gradients.empty()) return false;  // what the lane does next comes behind
  units_.push_back({std::move(gradients), device_.mark(lane)});
  return true;
}

void PackedGradients::make_room() {
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

bool PackedGradients::await(const MarkPtr& read) {
  if (device_.has_passed(read)) return true;
  const MarkPtr computed = device_.mark(Lane::kCompute);
  for (int idle_polls = 0; !device_.has_passed(read); ++idle_polls) {
    if (!device_.has_passed(computed) && !is_held_up_()) idle_polls = 0;
    if (idle_polls >= kMostIdlePolls) return false;
    std::this_thread::sleep_for(kCounterPollInterval);
  }
  return true;
}

void PackedGradients::drop() noexcept {
  try {
    let_go();
  } catch (const std::exception&) {
    units_.clear();  // the device has failed, and says so in its next call
  }
}

void PackedGradients::let_go() {
  if (!units_.empty()) device_.wait(Lane::kCompute, units_.back().read);
  units_.clear();
}

}  // namespace zb
