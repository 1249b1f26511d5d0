// Gradients that were packed in the lane of reductions, until nothing reads them there any more.
//
// [Note: held gradients]
// Where the device works in lanes, gradients are packed in the lane of reductions: the compute lane neither packs nor
// waits for a slot. Their memory is the compute lane's, which may give it away as soon as it is let go of. So it is
// kept until the packing has passed, or the reduction that reads a pushed unit's where they are, or until the compute
// lane stands behind that. Of kUnitNum units it is kept without a thought; before it is kept of more, the compute lane
// waits for the oldest. That could close a circle where gathers beside a backward meet the peers: a peer may have to
// use a unit before it brings what the lane waits for, and this rank takes part in the gather once its compute lane has
// left the slot. There the host waits instead, which costs a host that is the limit its lead. It gives up some time
// after its compute lane ran empty, or came to wait for an own part of a settled gather, which stands in the lane of
// reductions too; then more is kept. Where all shards are settled (gather_scheduler.h) nothing in the lanes of gathers
// waits for a peer any more, and the compute lane waits.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <utility>
#include <vector>

#include "kernels/device.h"
#include "zero/unit.h"

namespace zb {

class PackedGradients {
 public:
  // `gathers_meet`: gathers beside this backward may meet the peers. `is_held_up`: the compute lane waits for the lane
  // of reductions.
  PackedGradients(Device& device, std::function<bool()> gathers_meet, std::function<bool()> is_held_up)
      : device_(device), gathers_meet_(std::move(gathers_meet)), is_held_up_(std::move(is_held_up)) {}

  // They are read in the lane, by what was put in so far. False where nothing needs to be kept.
  bool hold(std::vector<HeldGradient> gradients, Lane lane);
  // And those held last also by what was put in since.
  void hold_on(Lane lane) { units_.back().read = device_.mark(lane); }
  // Makes room for one more unit's.
  void make_room();
  // With the compute lane behind all that reads them, so nothing that this rank's backward brings may be missing.
  void let_go();
  // The same where what reads them may have failed.
  void drop() noexcept;

 private:
  static constexpr std::size_t kUnitNum = 2;

  struct OfUnit {
    std::vector<HeldGradient> gradients;
    MarkPtr read;
  };

  bool await(const MarkPtr& read);

  Device& device_;
  std::function<bool()> gathers_meet_;
  std::function<bool()> is_held_up_;
  std::deque<OfUnit> units_;
};

}  // namespace zb
