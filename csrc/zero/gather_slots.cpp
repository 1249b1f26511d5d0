#include "zero/gather_slots.h"

#include <algorithm>
#include <functional>
#include <map>

namespace zb {

GatherSlots::GatherSlots(Device& device, Communicator& communicator, Ledger* ledger, const std::vector<Unit>& units)
    : units_(units),
      plain_(device, communicator, ledger, BufferRole::kPrivate, Category::kGatherSlots,
             {.first = communicator.lane(), .last = Lane::kCompute}),
      spliced_(device, communicator, ledger, BufferRole::kPrivate, Category::kGatherSlots,
               {.first = communicator.lane(), .last = Lane::kCompute}, SlotKind::kSpliced),
      slot_bytes_(units.size(), 0),
      preferred_slot_(units.size(), 0) {}

void GatherSlots::reserve(std::size_t prefetch_bytes, bool reshard) {
  reserve(plain_, false, prefetch_bytes, reshard);
  reserve(spliced_, true, prefetch_bytes, reshard);
  // Spliced slots get their memory when they are first used for a unit.
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    if (units_[unit].is_spliced()) destinations(take(unit, true, std::nullopt), unit);
  }
}

// One unit at work and as many ahead as the budget admits (docs/explain/memory.md). Units of other sizes take slots of
// a larger size class where that has as many as can be live at once. Not the root, which stays gathered beside the
// others.
void GatherSlots::reserve(SlotPool& pool, bool spliced, std::size_t prefetch_bytes, bool reshard) {
  struct SizeClass {
    std::size_t unit_num = 0;
    bool has_root = false;
    std::size_t slot_bytes = 0;
  };
  std::map<std::size_t, SizeClass, std::greater<>> classes;  // the largest first
  for (const Unit& unit : units_) {
    if (unit.gather_bytes == 0 || unit.is_spliced() != spliced) continue;
    SizeClass& found = classes[unit.gather_bytes];
    ++found.unit_num;
    found.has_root = found.has_root || unit.is_root;
  }
  std::size_t shared_bytes = 0;  // the last class whose slots others may take
  for (auto& [bytes, found] : classes) {
    const std::size_t live_num = 1 + prefetch_bytes / bytes;
    const bool may_share = reshard && !found.has_root;
    if (may_share && pool.slot_num(shared_bytes) >= live_num) {
      found.slot_bytes = shared_bytes;
      continue;
    }
    found.slot_bytes = bytes;
    pool.reserve(bytes, reshard ? std::min(found.unit_num, live_num) : found.unit_num);
    if (may_share) shared_bytes = bytes;
  }
  std::map<std::size_t, std::size_t> seen;
  for (std::size_t index = 0; index < units_.size(); ++index) {
    if (units_[index].gather_bytes == 0 || units_[index].is_spliced() != spliced) continue;
    const std::size_t bytes = slot_bytes_[index] = classes[units_[index].gather_bytes].slot_bytes;
    preferred_slot_[index] = seen[bytes]++ % pool.slot_num(bytes);
  }
}

SlotLease GatherSlots::take(std::size_t unit, bool spliced, std::optional<Lane> beside) {
  if (units_[unit].is_spliced() != spliced) return plain_.acquire(units_[unit].gather_bytes, 0, beside);
  return (spliced ? spliced_ : plain_).acquire(slot_bytes_[unit], preferred_slot_[unit], beside);
}

std::vector<Region> GatherSlots::destinations(const SlotLease& slot, std::size_t unit) const {
  const std::vector<FlatBuffer>& flats = units_[unit].flats;
  if (slot.is_spliced()) {
    std::vector<SplicedPart> parts;
    for (const FlatBuffer& flat : flats) {
      parts.push_back({flat.is_spliced ? flat.shard_parameters : Region{}, flat.shard_parameter_bytes()});
    }
    return slot.destinations(unit, parts);
  }
  std::vector<Region> regions;
  for (const FlatBuffer& flat : flats) regions.push_back(slot.region().at(flat.gather_offset_bytes));
  return regions;
}

void GatherSlots::drop_spares() noexcept {
  plain_.drop_spares();
  spliced_.drop_spares();
}

}  // namespace zb
