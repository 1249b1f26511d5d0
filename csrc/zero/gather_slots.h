// The slots that units of stage 3 are gathered into: how many there are, who takes which, and where in it.
//
// Explicit gathers do without spliced slots ([Note: spliced slots] in spliced_slot.h): what is changed in them is lost,
// so it must not be the shard that is changed.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "comm/communicator.h"
#include "memory/ledger.h"
#include "zero/slot_pool.h"
#include "zero/unit.h"

namespace zb {

class GatherSlots {
 public:
  GatherSlots(Device& device, Communicator& communicator, Ledger* ledger, const std::vector<Unit>& units);

  void reserve(std::size_t prefetch_bytes, bool reshard);
  // A spliced slot, if so, is one for a unit that is. `beside` is a further lane that writes to it first.
  SlotLease take(std::size_t unit, bool spliced, std::optional<Lane> beside);
  // Of the unit's flats.
  std::vector<Region> destinations(const SlotLease& slot, std::size_t unit) const;
  // Frees what was taken beyond what is reserved and nobody holds.
  void drop_spares() noexcept;

 private:
  void reserve(SlotPool& pool, bool spliced, std::size_t prefetch_bytes, bool reshard);

  const std::vector<Unit>& units_;
  SlotPool plain_;
  SlotPool spliced_;
  std::vector<std::size_t> slot_bytes_;      // by unit: of the slots that it takes
  std::vector<std::size_t> preferred_slot_;  // by unit
};

}  // namespace zb
