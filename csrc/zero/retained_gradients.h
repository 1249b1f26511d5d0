// Retains gradients until the lane of reductions has read them.
//
// [Note: retained gradients]
// Where the device works in lanes, gradients are packed in the lane of reductions. The compute lane then neither packs
// nor waits for a slot. The gradients' memory belongs to the compute lane, which may reuse it as soon as it is freed.
// So this class keeps it alive until one of these has happened:
// - The lane of reductions has packed the gradients.
// - The reduction of a pushed unit has read them where they lie.
// - The compute lane waits for that lane, so that later work in the compute lane runs after the reads.
//
// The gradients of kUnitNum units are retained at no cost. Before more are retained, the compute lane waits for the
// oldest. While gathers of this backward may meet the peers, that wait could close a circle of waits: a peer may have
// to use a unit before it brings what the lane waits for, and this rank takes part in that gather only after its
// compute lane has left the slot. There the host waits instead of the lane. A host that limits the speed loses its lead
// by this.
//
// The host gives up, and more is retained, some time after one of these:
// - The compute lane ran empty.
// - The compute lane came to wait for an own part of a gather of final shards, which the lane of reductions copies too.
//
// Where all shards are final (gather_scheduler.h), nothing in the lanes of gathers waits for a peer any more, so the
// compute lane waits.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <utility>
#include <vector>

#include "kernels/device.h"
#include "zero/unit.h"

namespace zb {

class RetainedGradients {
 public:
  // `gathers_meet` tells whether gathers of this backward may meet the peers, `is_compute_waiting` whether the compute
  // lane waits for the lane of reductions.
  RetainedGradients(Device& device, std::function<bool()> gathers_meet, std::function<bool()> is_compute_waiting)
      : device_(device), gathers_meet_(std::move(gathers_meet)), is_compute_waiting_(std::move(is_compute_waiting)) {}

  // Retains gradients that the work put into `lane` so far reads. Returns false where nothing needs to be retained.
  bool retain(std::vector<ArrivedGradient> gradients, Lane lane);
  // Retains the last ones also for the work put into `lane` since.
  void extend(Lane lane) { units_.back().read = device_.mark(lane); }
  // Waits until the gradients of one more unit may be retained.
  void make_room();
  // Frees everything, after making the compute lane wait for all reads. Nothing that this rank's backward brings to
  // those reads may be missing.
  void release();
  // As release(), where the reads may have failed.
  void drop() noexcept;

 private:
  static constexpr std::size_t kUnitNum = 2;

  struct OfUnit {
    std::vector<ArrivedGradient> gradients;
    MarkPtr read;
  };

  bool await(const MarkPtr& read);

  Device& device_;
  std::function<bool()> gathers_meet_;
  std::function<bool()> is_compute_waiting_;
  std::deque<OfUnit> units_;
};

}  // namespace zb
