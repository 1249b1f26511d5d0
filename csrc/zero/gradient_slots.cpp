#include "zero/gradient_slots.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <thread>

namespace zb {
namespace {

constexpr std::size_t kNone = SIZE_MAX;
constexpr auto kLongestSlotWait = std::chrono::milliseconds(100);
constexpr auto kSlotPollInterval = std::chrono::microseconds(20);

}  // namespace

GradientSlots::GradientSlots(Device& device, Communicator& communicator, Ledger* ledger, std::vector<Unit>& units,
                             CommunicationClock& clock)
    : device_(device),
      communicator_(communicator),
      ledger_(ledger),
      units_(units),
      clock_(clock),
      slot_num_(device.is_async() ? 1
                                  : 2),  // two: one unit's gradients arrive while those of the one before are reduced
      slots_(device, communicator, ledger, BufferRole::kShared, Category::kGradientSlots,
             {.first = communicator.lane(), .last = communicator.lane()}),
      staging_(device, communicator, ledger, BufferRole::kPrivate, Category::kStaging,
               {.first = communicator.lane(), .last = communicator.lane()}),
      slot_index_(units.size(), 0),
      predecessor_(units.size(), kNone),
      staged_(units.size()) {}

void GradientSlots::reserve(const std::vector<std::size_t>& order, long accumulation_steps) {
  std::map<std::size_t, std::size_t> unit_num;
  std::map<std::size_t, std::size_t> shard_num;
  for (const std::size_t unit : order) largest_bytes_ = std::max(largest_bytes_, units_[unit].gradient_bytes);
  for (const std::size_t unit : order) {
    ++unit_num[slot_bytes(unit)];
    for (const FlatBuffer& flat : units_[unit].flats) {
      const bool is_staged = accumulation_steps > 1 || flat.accumulates_in_another_dtype();
      if (flat.trainable && is_staged) ++shard_num[flat.shard_gradient_bytes()];
    }
  }
  for (const auto& [bytes, num] : unit_num) slots_.reserve(bytes, std::min(num, slot_num_));
  for (const auto& [bytes, num] : shard_num) staging_.reserve(bytes, std::min(num, slot_num_));
}

void GradientSlots::assign(const std::vector<std::size_t>& order) {
  std::map<std::size_t, std::vector<std::size_t>> last_in_slot;  // by size class: last unit of each slot
  std::map<std::size_t, std::size_t> seen;
  for (const std::size_t unit : order) {
    const std::size_t bytes = slot_bytes(unit);
    std::vector<std::size_t>& last = last_in_slot[bytes];
    last.resize(slots_.slot_num(bytes), kNone);
    const std::size_t index = seen[bytes]++ % last.size();
    slot_index_[unit] = index;
    predecessor_[unit] = last[index];
    last[index] = unit;
  }
}

SlotLease GradientSlots::acquire(std::size_t unit) { return slots_.acquire(slot_bytes(unit), slot_index_[unit]); }

bool GradientSlots::may_take(std::size_t unit) const {
  if (predecessor_[unit] == kNone) return true;
  const GradientState state = units_[predecessor_[unit]].gradient_state;
  return state == GradientState::kReducing || state == GradientState::kReduced;
}

bool GradientSlots::try_take(std::size_t index) {
  if (!may_take(index)) return false;
  Unit& unit = units_[index];
  unit.gradient_slot = acquire(index);
  return static_cast<bool>(unit.gradient_slot);
}

void GradientSlots::take_or_spare(std::size_t index, const std::function<void()>& finish_ready) {
  Unit& unit = units_[index];
  if (may_take(index)) unit.gradient_slot = await_release(index, finish_ready);
  if (!unit.gradient_slot) {
    unit.spare = communicator_.allocate(unit.gradient_bytes, BufferRole::kPrivate, ledger_, Category::kStaging);
  }
}

SlotLease GradientSlots::await_release(std::size_t unit, const std::function<void()>& finish_ready) {
  SlotLease slot = acquire(unit);
  if (slot) return slot;
  const CommunicationClock::Scope timed(clock_, "reduce-scatter of gradients");
  const auto give_up = std::chrono::steady_clock::now() + kLongestSlotWait;
  while (!slot && std::chrono::steady_clock::now() < give_up) {
    finish_ready();
    slot = acquire(unit);
    if (!slot) std::this_thread::sleep_for(kSlotPollInterval);
  }
  return slot;
}

Region GradientSlots::stage(std::size_t unit, std::size_t bytes) {
  staged_[unit].push_back(staging_.acquire(bytes, slot_index_[unit]));
  return staged_[unit].back().region();
}

}  // namespace zb
