// Slots: fixed pieces of device memory, made once per size class, that hold one unit's full buffer for a while.
//
// A unit lands in the same slot step after step while nobody else holds it. Private slots may grow by spares (counted
// in the ledger) when two live units would share one; shared slots, whose allocation is collective, never grow.
// Slots may be spliced ([Note: spliced slots] in spliced_slot.h): then what they hold is made for a unit's own parts,
// and kept for the next time. Where the device works in lanes, a slot that was given back may still be in use by its
// last lane: the next writer's lane is held back until that is over.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "comm/communicator.h"
#include "comm/spliced_slot.h"

namespace zb {

class SlotPool;

// Exclusive use of a slot; returns it on destruction.
class SlotLease {
 public:
  SlotLease() = default;
  SlotLease(SlotPool* pool, std::size_t bytes, std::size_t index, Region region);
  SlotLease(SlotLease&& other) noexcept;
  SlotLease& operator=(SlotLease&& other) noexcept;
  SlotLease(const SlotLease&) = delete;
  SlotLease& operator=(const SlotLease&) = delete;
  ~SlotLease() { reset(); }

  void reset() noexcept;
  explicit operator bool() const noexcept { return pool_ != nullptr; }
  const Region& region() const noexcept { return region_; }  // of a slot that is not spliced
  bool is_spliced() const noexcept { return pool_ != nullptr && region_.buffer == nullptr; }
  // Of one that is: SplicedSlot::destinations of these parts, which are the same for the same `user`.
  const std::vector<Region>& destinations(std::size_t user, std::span<const SplicedPart> parts) const;

 private:
  SlotPool* pool_ = nullptr;
  std::size_t bytes_ = 0;
  std::size_t index_ = 0;
  Region region_;
};

// The lanes that use a slot first (it is written) and last (before it is given back).
struct SlotLanes {
  Lane first;
  Lane last;
};

enum class SlotKind : std::uint8_t { kBuffer, kSpliced };

class SlotPool {
 public:
  SlotPool(Device& device, Communicator& communicator, Ledger* ledger, BufferRole role, Category category,
           SlotLanes lanes, SlotKind kind = SlotKind::kBuffer);

  // Makes `slot_num` slots of this size. Collective for shared slots.
  void reserve(std::size_t bytes, std::size_t slot_num);
  std::size_t slot_num(std::size_t bytes) const;
  // The preferred slot, else (private slots) another free one, else a spare. An empty lease when a shared slot is
  // taken. `beside` is a further lane that writes to it first.
  SlotLease acquire(std::size_t bytes, std::size_t preferred_index, std::optional<Lane> beside = std::nullopt);
  // Frees spares that nobody holds, once all lanes have passed.
  void drop_spares() noexcept;

 private:
  friend class SlotLease;
  struct Slot {
    std::shared_ptr<RegisteredBuffer> buffer;
    std::unique_ptr<SplicedSlot> spliced;
    std::map<std::size_t, std::vector<Region>> destinations;  // by user
    bool taken = false;
    bool spare = false;
    MarkPtr last_use = nullptr;

    bool has_memory() const noexcept { return buffer != nullptr || spliced != nullptr; }
  };

  Slot make_slot(std::size_t bytes, bool spare);
  void give_back(std::size_t bytes, std::size_t index) noexcept;

  Device& device_;
  Communicator& communicator_;
  Ledger* ledger_;
  BufferRole role_;
  Category category_;
  SlotLanes lanes_;
  SlotKind kind_;
  std::map<std::size_t, std::vector<Slot>> classes_;
};

}  // namespace zb
