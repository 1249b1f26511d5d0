// Packs gradients into flat buffers as they arrive and reduces each unit as soon as that is legal.
//
// [Note: agreed reductions]
// Every unit is reduced exactly once per reducing backward, in one order on all ranks (rank 0's order of completion in
// an earlier step). A unit whose gradients are there early waits its turn. A unit counts as complete when its module
// was called as often before this backward as before the recorded ones and all gradients arrived that came in each of
// them (an expert's comes in some only); a unit that was not called at all is complete at once; everything else is
// settled when backward ends, and so is all of a backward that other forwards than the recorded ones led to. What did
// not arrive on this rank is zero.
//
// [Note: gradient slots]
// Where full gradients do not persist (stages 2 and 3) they are packed into shared slots, taken in the order of
// reduction: a unit may take a slot only after the unit before it in that slot was reduced. One that is too early packs
// into private spare memory and moves when its turn comes. Waiting for a slot in the middle of a backward is bounded,
// so that a rank whose peers are held up elsewhere never closes a circle of waits.
// Where the device works in lanes there are no spares: gradients are held as they are until their unit is packed in its
// turn, and the compute lane waits for the slot. That too could close a circle, where parameters are gathered: a peer
// may have to use a unit before it brings what holds this rank's slot, and this rank takes part in the gather once its
// compute lane is past the slot. So there the host waits first. It gives up some time after its compute lane ran empty,
// and the unit is tried again with the next one, or when backward ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "kernels/device.h"
#include "memory/ledger.h"
#include "zero/clock.h"
#include "zero/policy.h"
#include "zero/slot_pool.h"
#include "zero/unit.h"

namespace zb {

// What the owner does for a unit.
struct ReduceEvents {
  // Before its reduction: gives it the gradient shards that it lacks. May throw, and is called again then.
  std::function<void(Unit&)> before;
  // Its gradients for the next update are there for what is put into the communicator's lane.
  std::function<void(Unit&)> reduced;
};

class ReduceScheduler {
 public:
  // `gathers_beside`: backwards gather parameters too.
  ReduceScheduler(Device& device, Communicator& communicator, Ledger* ledger, std::vector<Unit>& units,
                  std::vector<Parameter>& parameters, CommunicationClock& clock, GradientPlacement placement,
                  bool gathers_beside, ReduceEvents events);

  // Makes the slots, and staging shards where micro-batches accumulate. Collective.
  void reserve_slots(long accumulation_steps);

  void begin_forward() { ++forwards_; }
  // Forgets the last forward, which failed.
  void abandon_forward();
  void count_use(std::size_t unit) { ++units_[unit].uses; }
  // `last` is the accumulation boundary.
  void begin_backward(bool last);
  // A gradient of the parameter is there, ready for the compute lane. `owner` keeps it where it may be held; else it is
  // packed before the call returns. True when the unit is complete with it.
  bool arrive(std::size_t parameter, const void* gradient, DType dtype, int graph_task,
              std::shared_ptr<const void> owner);
  void end_backward();
  // Completes this backward's collectives with whatever is there and forgets the gradients of the window.
  void abort_backward();
  // The same without collectives: the communicator has failed.
  void drop_backward() noexcept;
  bool in_backward() const noexcept { return in_backward_; }

  // Backwards whose gradients the window holds.
  long window_backwards() const noexcept { return window_backwards_; }
  // After the optimizer step (or to drop the gradients).
  void clear_window();

  // Order of completion in the last backward, and the agreed order.
  const std::vector<std::size_t>& completion_order() const noexcept { return completed_; }
  void adopt_order(const std::vector<std::size_t>& order);
  std::size_t reduced_unit_num() const noexcept { return order_.size(); }

 private:
  bool persistent() const noexcept { return placement_ != GradientPlacement::kShardedEachMicroBatch; }
  bool replicates() const noexcept {
    return placement_ == GradientPlacement::kReplicated && communicator_.world_size() > 1;
  }
  bool reduces_now() const noexcept { return !persistent() || last_; }
  std::byte* gradient_base(const Unit& unit, const FlatBuffer& flat) const;
  void resume_accumulation();
  void begin_unit(std::size_t unit);
  void pack_held(Unit& unit);
  void add_held(Unit& unit);
  void add_missing(const Unit& unit);
  void pack_items();
  bool await_slot(std::size_t unit);
  bool try_take_slot(std::size_t unit, bool block);
  void mark_complete(std::size_t unit);
  void launch_ready();
  void launch(std::size_t unit);
  void start_reduce(Unit& unit);
  void start_replicate(Unit& unit, std::vector<WorkPtr>& works);
  void finish_ready();
  void finish_first();
  void finish(std::size_t unit);
  void replicate();
  void settle();  // launches and finishes everything that is left
  bool is_complete(const Unit& unit, const Parameter& last, int graph_task) const;
  void record_expectations();
  void forget_uses();

  Device& device_;
  Communicator& communicator_;
  Ledger* ledger_;
  std::vector<Unit>& units_;
  std::vector<Parameter>& parameters_;
  CommunicationClock& clock_;
  GradientPlacement placement_;
  bool gathers_beside_;
  ReduceEvents events_;
  SlotPool slots_;
  SlotPool staging_;

  std::vector<std::size_t> order_;             // units with trainable parameters, in order of reduction
  std::vector<std::size_t> slot_index_;        // by unit
  std::vector<std::size_t> slot_predecessor_;  // by unit; SIZE_MAX where none
  std::size_t next_turn_ = 0;
  std::deque<std::size_t> in_flight_;
  WorkPtr last_work_;                           // the collective that this backward started last
  std::vector<WorkPtr> replicating_;            // stage 0: all-gathers of reduced gradients
  std::vector<PackItem> items_;                 // of the next pack
  std::vector<HeldGradient> packed_;            // whose memory the next pack reads
  std::vector<std::vector<SlotLease>> staged_;  // by unit: where a further micro-batch's sum lands first
  std::vector<std::size_t> completed_;
  bool in_backward_ = false;
  bool discards_ = false;  // what is reduced now is for the peers alone
  bool last_ = false;
  bool recorded_ = false;                // expectations come from a backward, not from a guess
  bool regular_ = false;                 // expectations hold for the running backward
  std::uint32_t forwards_ = 0;           // training forwards since the last backward ended
  std::uint32_t expected_forwards_ = 1;  // before the backward that the expectations come from
  long window_backwards_ = 0;
  bool reduced_in_window_ = false;  // a backward of the window was the last one of an accumulation
};

}  // namespace zb
