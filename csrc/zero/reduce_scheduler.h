// Packs gradients into flat buffers as they arrive and reduces each unit as soon as that is legal.
//
// [Note: agreed reductions]
// Every unit is reduced exactly once per reducing backward, in one order on all ranks (rank 0's order of completion in
// an earlier step). A unit whose gradients are there early ([Note: complete units]) waits its turn. Everything else is
// reduced when backward ends. Gradients that did not arrive on this rank count as zero.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "kernels/device.h"
#include "memory/ledger.h"
#include "zero/clock.h"
#include "zero/gradient_expectations.h"
#include "zero/gradient_packer.h"
#include "zero/gradient_slots.h"
#include "zero/in_place_gradients.h"
#include "zero/policy.h"
#include "zero/retained_gradients.h"
#include "zero/unit.h"

namespace zb {

// What the owner does for a unit.
struct ReduceEvents {
  // Called before its reduction: makes the gradient shards that it lacks. If it throws, it is called again.
  std::function<void(Unit&)> before;
  // Called when its gradients for the next update are ready for work put into lane().
  std::function<void(Unit&)> reduced;
  // Returns whether gathers of this backward may meet the peers.
  std::function<bool()> gathers_meet;
  // Returns whether the compute lane waits for work in the communicator's lane.
  std::function<bool()> is_compute_waiting;
};

struct ReduceOptions {
  GradientPlacement placement = GradientPlacement::kReplicated;
  // Units that consist mostly of gradients of this size or more push theirs, where the communicator takes that.
  std::size_t push_bytes = 0;
  bool in_place = false;  // [Note: gradients in place] (in_place_gradients.h)
  // Squares are summed after a backward, all in one piece of work, instead of unit by unit.
  bool sums_together = false;
};

// The error of a backward that reaches `place` of an engine whose own backward does not run.
std::string foreign_backward_text(const std::string& place);

class ReduceScheduler {
 public:
  ReduceScheduler(Device& device, Communicator& communicator, Ledger* ledger, std::vector<Unit>& units,
                  std::vector<Parameter>& parameters, CommunicationClock& clock, const ReduceOptions& options,
                  ReduceEvents events);

  // Makes the slots, and staging shards where micro-batches accumulate. Collective.
  void reserve_slots(long accumulation_steps);

  void begin_forward() { expectations_.begin_forward(); }
  void abandon_forward() { expectations_.abandon_forward(); }
  void count_use(std::size_t unit) { expectations_.count_use(unit); }
  // `last` is the accumulation boundary.
  void begin_backward(bool last);
  // A gradient of the parameter is there, ready for the compute lane. `owner` keeps it alive while it is pending; else
  // it is packed before the call returns. True when the unit is complete with it.
  bool arrive(std::size_t parameter, const void* gradient, DType dtype, int graph_task,
              std::shared_ptr<const void> owner);
  void end_backward();
  // Finishes this backward's collectives with the gradients that arrived, and forgets the gradients of the window.
  void abort_backward();
  // As abort_backward(), without collectives: the communicator has failed.
  void drop_backward() noexcept;
  bool in_backward() const noexcept { return in_backward_; }

  // Backwards whose gradients the window holds.
  long window_backwards() const noexcept { return window_backwards_; }
  // Whether its latest backward was the last one of an accumulation, so that an update can read their sum.
  bool is_window_reduced() const noexcept { return reduced_in_window_; }
  // Reduces the gradients of the window without a further backward. Collective.
  void reduce_window();
  // Sums the squares of the window's reduced gradients, which are there for lane().
  void sum_squares();
  // Forgets the gradients of the window, which peers may still be reading.
  void drop_window();
  // Called after the optimizer step, or to drop the gradients.
  void clear_window() noexcept;

  // Order of completion in the last backward, and the agreed order.
  const std::vector<std::size_t>& completion_order() const noexcept { return completed_; }
  const std::vector<std::size_t>& order() const noexcept { return order_; }
  void adopt_order(const std::vector<std::size_t>& order);
  std::size_t reduced_unit_num() const noexcept { return order_.size(); }

  // The lane in which gradients are packed and reduced.
  Lane lane() const noexcept { return options_.in_place ? Lane::kCompute : communicator_.lane(); }

 private:
  struct Sum {
    const FlatBuffer* flat = nullptr;
    std::size_t first_piece = 0;
    std::size_t piece_num = 0;
  };

  bool persistent() const noexcept { return options_.placement != GradientPlacement::kShardedEachMicroBatch; }
  bool replicates() const noexcept {
    return options_.placement == GradientPlacement::kReplicated && communicator_.world_size() > 1;
  }
  // What a stage gathers again is read in full by all, also while peers may push again.
  bool takes_pushes() const noexcept {
    return options_.placement != GradientPlacement::kReplicated && device_.is_async() && communicator_.takes_pushes();
  }
  bool pushes(const Unit& unit) const;
  bool is_mostly_large(const Unit& unit) const;
  bool reduces_now() const noexcept { return !persistent() || last_; }
  void resume_accumulation();
  void begin_unit(std::size_t unit);
  void mark_complete(std::size_t unit);
  void launch_ready();
  void prepare(Unit& unit);
  void launch(std::size_t unit);
  // Whether a reduction lands beside the shard that holds the sum, and is added to it from there.
  bool is_staged(const FlatBuffer& flat) const {
    return !persistent() && flat.shard_gradients && (window_backwards_ > 0 || flat.accumulates_in_another_dtype());
  }
  void accumulate(const FlatBuffer& flat, const SlotLease& staged);
  void start_reduce(Unit& unit, bool is_pushed);
  void start_replicate(Unit& unit, std::vector<WorkPtr>& works);
  void finish_ready();
  void finish_first();
  void finish(std::size_t unit);
  void add_sum(const FlatBuffer& flat);
  void put_in_sums();
  void replicate();
  void finish_all();  // launches and finishes everything that is left

  Device& device_;
  Communicator& communicator_;
  std::vector<Unit>& units_;
  std::vector<Parameter>& parameters_;
  CommunicationClock& clock_;
  ReduceOptions options_;
  bool accumulates_ = false;  // a step takes several backwards
  ReduceEvents events_;
  GradientSlots slots_;
  GradientPacker packer_;
  RetainedGradients retained_;
  InPlaceGradients in_place_;
  GradientExpectations expectations_;

  std::vector<std::size_t> order_;  // units with trainable parameters, in order of reduction
  std::size_t next_turn_ = 0;
  std::deque<std::size_t> in_flight_;
  WorkPtr last_work_;                 // the collective that this backward started last
  std::vector<WorkPtr> replicating_;  // stage 0: all-gathers of reduced gradients
  std::vector<std::size_t> completed_;
  std::vector<Sum> sums_;          // of squares, to be put in
  std::vector<FlatPiece> pieces_;  // of theirs
  bool in_backward_ = false;
  bool discards_ = false;  // what is reduced now is for the peers alone
  bool last_ = false;
  long window_backwards_ = 0;
  bool reduced_in_window_ = false;  // the latest backward of the window was the last one of an accumulation
};

}  // namespace zb
