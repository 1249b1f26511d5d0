// Memory for gradients that do not persist in full (stages 2 and 3): slots that units pack them into and reduce them
// from, and staging shards where a further micro-batch's sum lands before it is added.
//
// [Note: gradient slots]
// Slots are shared and taken in the order of reduction: a unit may take a slot only after the unit before it in that
// slot was reduced. One that is too early packs into private spare memory and moves when its turn comes. Waiting for a
// slot in the middle of a backward is bounded, so that a rank whose peers are held up elsewhere never closes a circle
// of waits.
// Where the device works in lanes there are no spares: gradients stay as they are until their unit is packed in its
// turn, in the lane of reductions, where one slot is enough for all units: the one before has left it
// ([Note: retained gradients]).
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "comm/communicator.h"
#include "kernels/device.h"
#include "memory/ledger.h"
#include "zero/clock.h"
#include "zero/slot_pool.h"
#include "zero/unit.h"

namespace zb {

class GradientSlots {
 public:
  GradientSlots(Device& device, Communicator& communicator, Ledger* ledger, std::vector<Unit>& units,
                CommunicationClock& clock);

  // Makes the slots, and staging shards where micro-batches accumulate or a sum has another dtype. Collective.
  void reserve(const std::vector<std::size_t>& order, long accumulation_steps);
  // Deals the slots out to the units in their order of reduction.
  void assign(const std::vector<std::size_t>& order);

  // Takes the unit's slot if the unit before it there is through.
  bool try_take(std::size_t unit);
  // The same, or a spare after a bounded wait. `finish_ready` ends reductions that are over.
  void take_or_spare(std::size_t unit, const std::function<void()>& finish_ready);

  // A staging shard of the unit; lives until the unit's are dropped.
  Region stage(std::size_t unit, std::size_t bytes);
  const std::vector<SlotLease>& staged(std::size_t unit) const { return staged_[unit]; }
  void drop_staged(std::size_t unit) noexcept { staged_[unit].clear(); }

 private:
  // In lanes all units share one slot, of the largest one's size.
  std::size_t slot_bytes(std::size_t unit) const {
    return device_.is_async() ? largest_bytes_ : units_[unit].gradient_bytes;
  }
  bool may_take(std::size_t unit) const;
  SlotLease acquire(std::size_t unit);
  SlotLease await_release(std::size_t unit, const std::function<void()>& finish_ready);

  Device& device_;
  Communicator& communicator_;
  Ledger* ledger_;
  std::vector<Unit>& units_;
  CommunicationClock& clock_;
  std::size_t slot_num_;  // of a size class, at most
  SlotPool slots_;
  SlotPool staging_;
  std::size_t largest_bytes_ = 0;               // of the units' gradients
  std::vector<std::size_t> slot_index_;         // by unit
  std::vector<std::size_t> predecessor_;        // by unit: who has its slot before it; SIZE_MAX where none
  std::vector<std::vector<SlotLease>> staged_;  // by unit
};

}  // namespace zb
