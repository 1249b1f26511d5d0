#include "zero/slot_pool.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "common/error.h"

namespace zb {

SlotLease::SlotLease(SlotPool* pool, std::size_t bytes, std::size_t index, Region region)
    : pool_(pool), bytes_(bytes), index_(index), region_(std::move(region)) {}

SlotLease::SlotLease(SlotLease&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)),
      bytes_(other.bytes_),
      index_(other.index_),
      region_(std::move(other.region_)) {}

SlotLease& SlotLease::operator=(SlotLease&& other) noexcept {
  if (this != &other) {
    reset();
    pool_ = std::exchange(other.pool_, nullptr);
    bytes_ = other.bytes_;
    index_ = other.index_;
    region_ = std::move(other.region_);
  }
  return *this;
}

void SlotLease::reset() noexcept {
  region_ = {};
  if (pool_ != nullptr) std::exchange(pool_, nullptr)->give_back(bytes_, index_);
}

SlotPool::SlotPool(Device& device, Communicator& communicator, Ledger* ledger, BufferRole role, Category category,
                   SlotLanes lanes, SlotKind kind)
    : device_(device),
      communicator_(communicator),
      ledger_(ledger),
      role_(role),
      category_(category),
      lanes_(lanes),
      kind_(kind) {}

SlotPool::Slot SlotPool::make_slot(std::size_t bytes, bool spare) {
  Slot slot;
  slot.spare = spare;
  if (kind_ == SlotKind::kSpliced) {
    slot.spliced = communicator_.make_spliced_slot(ledger_, category_);
  } else {
    slot.buffer = communicator_.allocate(bytes, role_, ledger_, category_);
  }
  return slot;
}

const std::vector<Region>& SlotLease::destinations(std::size_t user, std::span<const SplicedPart> parts) const {
  SlotPool::Slot& slot = pool_->classes_[bytes_][index_];
  std::vector<Region>& known = slot.destinations[user];
  if (known.empty()) known = slot.spliced->destinations(parts);
  return known;
}

void SlotPool::reserve(std::size_t bytes, std::size_t slot_num) {
  std::vector<Slot>& slots = classes_[bytes];
  while (slots.size() < slot_num) slots.push_back(make_slot(bytes, false));
}

std::size_t SlotPool::slot_num(std::size_t bytes) const {
  const auto found = classes_.find(bytes);
  return found == classes_.end() ? 0 : found->second.size();
}

SlotLease SlotPool::acquire(std::size_t bytes, std::size_t preferred_index, std::optional<Lane> beside) {
  std::vector<Slot>& slots = classes_[bytes];
  auto take = [&](std::size_t index) {
    slots[index].taken = true;
    const MarkPtr last_use = std::exchange(slots[index].last_use, nullptr);
    device_.wait(lanes_.first, last_use);
    if (beside) device_.wait(*beside, last_use);
    return SlotLease(this, bytes, index, Region{slots[index].buffer, 0});
  };
  if (preferred_index < slots.size() && slots[preferred_index].has_memory() && !slots[preferred_index].taken) {
    return take(preferred_index);
  }
  if (role_ == BufferRole::kShared) return {};
  for (std::size_t index = 0; index < slots.size(); ++index) {
    if (slots[index].has_memory() && !slots[index].taken) return take(index);
  }
  for (std::size_t index = 0; index < slots.size(); ++index) {
    if (!slots[index].has_memory()) {
      slots[index] = make_slot(bytes, true);
      return take(index);
    }
  }
  slots.push_back(make_slot(bytes, true));
  return take(slots.size() - 1);
}

void SlotPool::drop_spares() noexcept {
  const auto is_idle_spare = [](const Slot& slot) { return slot.spare && slot.has_memory() && !slot.taken; };
  for (auto& [bytes, slots] : classes_) {
    if (std::none_of(slots.begin(), slots.end(), is_idle_spare)) continue;
    try {
      device_.synchronize();
    } catch (const std::exception&) {
      return;  // the device has failed, and says so in its next call
    }
    for (Slot& slot : slots) {
      if (is_idle_spare(slot)) slot = {};
    }
  }
}

void SlotPool::give_back(std::size_t bytes, std::size_t index) noexcept {
  Slot& slot = classes_[bytes][index];
  slot.taken = false;
  if (slot.spare && !device_.is_async()) {
    slot = {};  // a spare lives only as long as it is needed
    return;
  }
  // Giving device memory back would stop all lanes, so a spare stays there (drop_spares).
  try {
    slot.last_use = device_.mark(lanes_.last);
  } catch (const std::exception&) {
    // The device has failed, and says so in its next call.
  }
}

}  // namespace zb
