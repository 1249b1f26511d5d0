#include "zero/reduce_scheduler.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <map>
#include <optional>
#include <thread>
#include <utility>

#include "common/error.h"
#include "common/scope_exit.h"

namespace zb {
namespace {

constexpr std::size_t kNone = SIZE_MAX;
constexpr std::size_t kSlotNum = 2;  // one unit's gradients arrive while the one before is reduced
constexpr auto kLongestSlotWait = std::chrono::milliseconds(100);
constexpr auto kLongestIdleWait = std::chrono::milliseconds(1);  // of a host whose compute lane is empty
constexpr auto kPollInterval = std::chrono::microseconds(20);

}  // namespace

ReduceScheduler::ReduceScheduler(Device& device, Communicator& communicator, Ledger* ledger, std::vector<Unit>& units,
                                 std::vector<Parameter>& parameters, CommunicationClock& clock,
                                 GradientPlacement placement, bool gathers_beside, ReduceEvents events)
    : device_(device),
      communicator_(communicator),
      ledger_(ledger),
      units_(units),
      parameters_(parameters),
      clock_(clock),
      placement_(placement),
      gathers_beside_(gathers_beside),
      events_(std::move(events)),
      slots_(device, communicator, ledger, BufferRole::kShared, Category::kGradientSlots,
             {.first = Lane::kCompute, .last = communicator.lane()}),
      staging_(device, communicator, ledger, BufferRole::kPrivate, Category::kStaging,
               {.first = communicator.lane(), .last = communicator.lane()}),
      slot_index_(units.size(), 0),
      slot_predecessor_(units.size(), kNone),
      staged_(units.size()) {
  // A first guess that most models confirm: backward visits units in reverse, and the root's gradients end it.
  for (std::size_t unit = units_.size(); unit-- > 0;) {
    if (units_[unit].has_trainable() && !units_[unit].is_root) order_.push_back(unit);
  }
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    if (units_[unit].has_trainable() && units_[unit].is_root) order_.push_back(unit);
  }
}

void ReduceScheduler::reserve_slots(long accumulation_steps) {
  if (!persistent()) {
    std::map<std::size_t, std::size_t> unit_num;
    std::map<std::size_t, std::size_t> shard_num;
    for (const std::size_t unit : order_) {
      ++unit_num[units_[unit].gradient_bytes];
      for (const FlatBuffer& flat : units_[unit].flats) {
        if (flat.trainable) ++shard_num[flat.shard_gradient_bytes()];
      }
    }
    for (const auto& [bytes, num] : unit_num) slots_.reserve(bytes, std::min(num, kSlotNum));
    if (accumulation_steps > 1) {
      for (const auto& [bytes, num] : shard_num) staging_.reserve(bytes, std::min(num, kSlotNum));
    }
  }
  adopt_order(std::vector<std::size_t>(order_));
  // Until a backward was recorded: every module is called once and every parameter gets one gradient.
  for (const std::size_t index : order_) {
    units_[index].expected_uses = 1;
    units_[index].expected_arrivals = static_cast<std::uint32_t>(units_[index].trainable_parameters);
    for (const FlatBuffer& flat : units_[index].flats) {
      for (const std::size_t p : flat.parameters) parameters_[p].expected_arrivals = 1;
    }
  }
}

void ReduceScheduler::adopt_order(const std::vector<std::size_t>& order) {
  order_ = order;
  if (persistent()) return;
  std::map<std::size_t, std::vector<std::size_t>> last_in_slot;  // by size class: last unit of each slot
  std::map<std::size_t, std::size_t> seen;
  for (const std::size_t unit : order_) {
    const std::size_t bytes = units_[unit].gradient_bytes;
    std::vector<std::size_t>& last = last_in_slot[bytes];
    last.resize(slots_.slot_num(bytes), kNone);
    const std::size_t index = seen[bytes]++ % last.size();
    slot_index_[unit] = index;
    slot_predecessor_[unit] = last[index];
    last[index] = unit;
  }
}

std::byte* ReduceScheduler::gradient_base(const Unit& unit, const FlatBuffer& flat) const {
  if (flat.full_gradients) return flat.full_gradients.data();
  if (unit.gradient_slot) return unit.gradient_slot.region().data() + flat.gradient_offset_bytes;
  return unit.spare->data() + flat.gradient_offset_bytes;
}

void ReduceScheduler::begin_backward(bool last) {
  ZB_EXPECT_STATE(!in_backward_, "a backward began inside a backward");
  in_backward_ = true;
  last_ = last;
  next_turn_ = 0;
  completed_.clear();
  // An earlier backward whose gradients no step has used may still be reading and writing them.
  if (persistent()) device_.wait(Lane::kCompute, device_.mark(communicator_.lane()));
  if (persistent() && reduced_in_window_) resume_accumulation();
  last_work_.reset();
  for (const std::size_t index : order_) {
    Unit& unit = units_[index];
    unit.complete = false;
    unit.arrivals = 0;
    unit.set_gradient_state(GradientState::kEmpty);
    for (FlatBuffer& flat : unit.flats) {
      for (const std::size_t p : flat.parameters) {
        parameters_[p].arrivals = 0;
        if (!persistent() || window_backwards_ == 0) parameters_[p].arrived_in_window = false;
      }
    }
  }
  regular_ = forwards_ == expected_forwards_;
  if (recorded_ && regular_) {
    for (const std::size_t index : order_) {
      if (units_[index].uses == 0 && units_[index].expected_uses > 0) mark_complete(index);
    }
    launch_ready();
  }
}

// A further backward follows one that was reduced already, before any step. The sum so far stays in this rank's slice,
// and what other ranks hold of theirs must not be added again.
void ReduceScheduler::resume_accumulation() {
  if (communicator_.world_size() == 1) return;
  const CommunicationClock::Scope timed(clock_);
  if (last_work_) last_work_->wait_source_free();
  const auto rank = static_cast<std::size_t>(communicator_.rank());
  for (const std::size_t index : order_) {
    for (const FlatBuffer& flat : units_[index].flats) {
      if (!flat.trainable) continue;
      const std::size_t begin = rank * flat.shard_gradient_bytes();
      const std::size_t end = begin + flat.shard_gradient_bytes();
      device_.zero(Lane::kCompute, flat.full_gradients.data(), begin);
      device_.zero(Lane::kCompute, flat.full_gradients.data() + end, flat.full_gradient_bytes() - end);
      for (const std::size_t p : flat.parameters) parameters_[p].arrived_in_window = true;  // on some rank
    }
  }
}

void ReduceScheduler::begin_unit(std::size_t index) {
  Unit& unit = units_[index];
  unit.set_gradient_state(GradientState::kAccumulating);
  if (persistent() || device_.is_async()) return;
  if (!try_take_slot(index, true)) {
    unit.spare = communicator_.allocate(unit.gradient_bytes, BufferRole::kPrivate, ledger_, Category::kStaging);
  }
}

// Takes the unit's shared slot if its predecessor in that slot is through; waits for that a bounded time if `block`.
bool ReduceScheduler::try_take_slot(std::size_t index, bool block) {
  Unit& unit = units_[index];
  const std::size_t predecessor = slot_predecessor_[index];
  if (predecessor != kNone) {
    const GradientState state = units_[predecessor].gradient_state;
    if (state != GradientState::kReducing && state != GradientState::kReduced) return false;
  }
  unit.gradient_slot = slots_.acquire(unit.gradient_bytes, slot_index_[index]);
  if (unit.gradient_slot || !block) return static_cast<bool>(unit.gradient_slot);
  const CommunicationClock::Scope timed(clock_);
  const auto give_up = std::chrono::steady_clock::now() + kLongestSlotWait;
  while (!unit.gradient_slot && std::chrono::steady_clock::now() < give_up) {
    finish_ready();
    unit.gradient_slot = slots_.acquire(unit.gradient_bytes, slot_index_[index]);
    if (!unit.gradient_slot) std::this_thread::sleep_for(kPollInterval);
  }
  return static_cast<bool>(unit.gradient_slot);
}

// Whether the compute lane may wait for the unit's slot: see [Note: gradient slots].
bool ReduceScheduler::await_slot(std::size_t index) {
  if (!device_.is_async() || !gathers_beside_ || slot_predecessor_[index] == kNone) return true;
  const MarkPtr last_use = slots_.last_use(units_[index].gradient_bytes, slot_index_[index]);
  if (device_.has_passed(last_use)) return true;
  const MarkPtr computed = device_.mark(Lane::kCompute);
  std::optional<std::chrono::steady_clock::time_point> idle_since;
  while (!device_.has_passed(last_use)) {
    const auto now = std::chrono::steady_clock::now();
    if (!idle_since && device_.has_passed(computed)) idle_since = now;
    if (idle_since && now - *idle_since >= kLongestIdleWait) return false;
    std::this_thread::sleep_for(kPollInterval);
  }
  return true;
}

void ReduceScheduler::abandon_forward() {
  if (forwards_ > 0) --forwards_;
  if (forwards_ == 0) forget_uses();
}

bool ReduceScheduler::arrive(std::size_t index, const void* gradient, DType dtype, int graph_task,
                             std::shared_ptr<const void> owner) {
  Parameter& parameter = parameters_[index];
  Unit& unit = units_[parameter.unit];
  ZB_EXPECT_STATE(in_backward_,
                  "a gradient of '" + parameter.name +
                      "' arrived outside engine.backward(); call engine.backward(loss), not loss.backward()");
  if (unit.gradient_state == GradientState::kReducing || unit.gradient_state == GradientState::kReduced) {
    expected_forwards_ = 0;  // no expectation holds: the next backward settles everything at its end and records anew
    unit.settles_at_end = true;
    throw StateError("a further gradient of '" + parameter.name + "' arrived after unit '" + unit.name +
                     "' had been reduced, since its module was used otherwise than in the steps before; repeat forward "
                     "and backward of this step on all ranks");
  }
  if (unit.gradient_state == GradientState::kEmpty) {
    begin_unit(parameter.unit);
    unit.graph_task = graph_task;
  }
  unit.held.push_back({index, gradient, dtype, parameter.arrived_in_window, std::move(owner)});
  if (!device_.is_async()) pack_held(unit);
  parameter.arrived_in_window = true;
  if (++parameter.arrivals <= parameter.expected_arrivals) ++unit.arrivals;
  if (!is_complete(unit, parameter, graph_task)) return false;
  mark_complete(parameter.unit);
  if (reduces_now()) {
    launch_ready();
  } else {
    pack_held(unit);
  }
  return true;
}

void ReduceScheduler::pack_held(Unit& unit) {
  add_held(unit);
  pack_items();
}

void ReduceScheduler::pack_items() {
  if (!items_.empty()) device_.pack(Lane::kCompute, items_);
  items_.clear();
  packed_.clear();  // the compute lane gives their memory to nobody before it has packed them
}

// Needs the unit's slot where gradients do not persist.
void ReduceScheduler::add_held(Unit& unit) {
  for (auto held = unit.held.begin(); held != unit.held.end(); ++held) {
    const Parameter& parameter = parameters_[held->parameter];
    const FlatBuffer& flat = unit.flats[parameter.flat];
    // A further gradient of the same parameter is added to what the first one leaves.
    const bool repeats = held->accumulate && std::any_of(unit.held.begin(), held, [&](const HeldGradient& earlier) {
                           return earlier.parameter == held->parameter;
                         });
    if (repeats) pack_items();
    items_.push_back(
        {.destination = gradient_base(unit, flat) + parameter.offset_numel * dtype_bytes(flat.reduce_dtype),
         .destination_dtype = flat.reduce_dtype,
         .source = held->data,
         .source_dtype = held->dtype,
         .numel = parameter.numel,
         .accumulate = held->accumulate});
  }
  packed_.insert(packed_.end(), std::make_move_iterator(unit.held.begin()), std::make_move_iterator(unit.held.end()));
  unit.held.clear();
}

// Before anything is recorded, one gradient a parameter is a guess. It fails where reentrant checkpoints inside a unit
// use a parameter again, so units whose gradients come from several graph tasks, and the root, wait for the end then.
bool ReduceScheduler::is_complete(const Unit& unit, const Parameter& last, int graph_task) const {
  if (!regular_ || unit.settles_at_end || unit.uses != unit.expected_uses) return false;
  if (last.arrivals > last.expected_arrivals || unit.arrivals < unit.expected_arrivals) return false;
  return recorded_ || (!unit.is_root && unit.graph_task == graph_task);
}

void ReduceScheduler::mark_complete(std::size_t unit) {
  units_[unit].complete = true;
  completed_.push_back(unit);
}

void ReduceScheduler::launch_ready() {
  const CommunicationClock::Scope timed(clock_);
  while (reduces_now() && next_turn_ < order_.size() && units_[order_[next_turn_]].complete) {
    const std::size_t index = order_[next_turn_];
    Unit& unit = units_[index];
    // Without its shared slot it cannot be reduced yet; the next event tries again.
    if (!persistent() && !unit.gradient_slot && !(await_slot(index) && try_take_slot(index, false))) break;
    if (!discards_) events_.before(unit);
    ++next_turn_;
    launch(index);
  }
  finish_ready();
}

void ReduceScheduler::launch(std::size_t index) {
  Unit& unit = units_[index];
  if (unit.gradient_state == GradientState::kEmpty) unit.set_gradient_state(GradientState::kAccumulating);
  if (unit.spare) {
    device_.copy(Lane::kCompute, unit.gradient_slot.region().data(), unit.spare->data(), unit.gradient_bytes);
    unit.spare.reset();
  }
  device_.push_range("reduce", unit.name);
  const ScopeExit over([this] { device_.pop_range(); });
  add_held(unit);
  add_missing(unit);
  pack_items();
  unit.set_gradient_state(GradientState::kReducing);
  device_.wait(communicator_.lane(), device_.mark(Lane::kCompute));
  start_reduce(unit);
  // In lanes nothing is left to wait for, and what follows a reduction is put in at once, so that all ranks start the
  // same operations in the same order whenever their gradients arrive.
  if (device_.is_async()) {
    finish(index);
  } else {
    in_flight_.push_back(index);
  }
}

// Zeros what no gradient was written to: parameters without one, and in slots the gaps that another unit may have used.
void ReduceScheduler::add_missing(const Unit& unit) {
  for (const FlatBuffer& flat : unit.flats) {
    if (!flat.trainable) continue;
    std::byte* base = gradient_base(unit, flat);
    const auto zero = [&](std::size_t offset_numel, std::size_t numel) {
      items_.push_back({.destination = base + offset_numel * dtype_bytes(flat.reduce_dtype),
                        .destination_dtype = flat.reduce_dtype,
                        .numel = numel});
    };
    if (!persistent()) {
      for (const Segment& gap : flat.layout.gaps()) zero(gap.begin, gap.end - gap.begin);
    }
    for (const std::size_t index : flat.parameters) {
      const Parameter& parameter = parameters_[index];
      if (!parameter.arrived_in_window) zero(parameter.offset_numel, parameter.numel);
    }
  }
}

void ReduceScheduler::start_reduce(Unit& unit) {
  if (communicator_.world_size() == 1) return;
  const std::size_t unit_index = static_cast<std::size_t>(&unit - units_.data());
  const CollectiveGroup group(communicator_);
  for (FlatBuffer& flat : unit.flats) {
    if (!flat.trainable) continue;
    Region source =
        flat.full_gradients ? flat.full_gradients : unit.gradient_slot.region().at(flat.gradient_offset_bytes);
    Region destination = flat.shard_gradients;
    if (!destination) {  // the peers get this rank's part, and nobody reads what it receives
      destination = source.at(static_cast<std::size_t>(communicator_.rank()) * flat.shard_gradient_bytes());
    } else if (!persistent() && window_backwards_ > 0) {
      staged_[unit_index].push_back(staging_.acquire(flat.shard_gradient_bytes(), slot_index_[unit_index]));
      destination = staged_[unit_index].back().region();
    }
    unit.reducing.push_back(communicator_.start_reduce_scatter({.source = source,
                                                                .destination = destination,
                                                                .shard_numel = flat.layout.shard_numel(),
                                                                .dtype = flat.reduce_dtype,
                                                                .label = flat.label}));
    last_work_ = unit.reducing.back();
  }
}

// Ends what is reduced and, where a slot goes to the next unit, no longer read by peers. Never blocks: in the middle of
// a backward a peer may be waiting for one of this rank's gathers.
void ReduceScheduler::finish_ready() {
  while (!in_flight_.empty()) {
    Unit& unit = units_[in_flight_.front()];
    const bool ready = std::all_of(unit.reducing.begin(), unit.reducing.end(), [this](const WorkPtr& work) {
      return persistent() ? work->test() : work->test_source_free();
    });
    if (!ready) return;
    finish_first();
  }
}

void ReduceScheduler::finish_first() {
  const std::size_t index = in_flight_.front();
  in_flight_.pop_front();
  finish(index);
}

void ReduceScheduler::finish(std::size_t index) {
  Unit& unit = units_[index];
  const Lane lane = communicator_.lane();
  for (const WorkPtr& work : unit.reducing) {
    work->wait(lane);
    if (!persistent()) work->wait_source_free(lane);
  }
  unit.reducing.clear();
  unit.gradient_slot.reset();
  std::size_t staged = 0;
  for (FlatBuffer& flat : unit.flats) {
    if (!flat.trainable || discards_) continue;
    if (!staged_[index].empty()) {
      device_.add(lane, flat.shard_gradients.data(), flat.reduce_dtype, staged_[index][staged++].region().data(),
                  flat.reduce_dtype, flat.layout.shard_numel());
    }
    if (last_) {
      device_.sum_of_squares(lane, flat.sum_of_squares, flat.shard_gradients.data(), flat.reduce_dtype,
                             flat.layout.shard_numel());
    }
  }
  staged_[index].clear();
  // In lanes this costs the host nothing and hides behind the rest of backward; a CPU rank would wait for its peers.
  if (device_.is_async() && last_) start_replicate(unit, replicating_);
  unit.set_gradient_state(GradientState::kReduced);
  if (last_ && !discards_ && (device_.is_async() || !replicates())) events_.reduced(unit);
}

void ReduceScheduler::settle() {
  const CommunicationClock::Scope timed(clock_);
  if (!reduces_now()) return;
  while (next_turn_ < order_.size()) {
    const std::size_t index = order_[next_turn_];
    Unit& unit = units_[index];
    if (!persistent() && !unit.gradient_slot) {
      // All ranks are past their gathers here, so the slot's last unit is certain to be reduced.
      while (!try_take_slot(index, false)) {
        ZB_EXPECT_STATE(!in_flight_.empty(), "no gradient slot for unit '" + unit.name + "' (an error of zerobench)");
        finish_first();
      }
    }
    if (!discards_) events_.before(unit);
    ++next_turn_;
    launch(index);
    finish_ready();
  }
  while (!in_flight_.empty()) finish_first();
  replicate();
}

// Stage 0: every rank's reduced shards go to all ranks.
void ReduceScheduler::start_replicate(Unit& unit, std::vector<WorkPtr>& works) {
  if (!replicates()) return;
  const CollectiveGroup group(communicator_);
  for (const FlatBuffer& flat : unit.flats) {
    if (!flat.trainable) continue;
    works.push_back(communicator_.start_all_gather({.source = flat.shard_gradients,
                                                    .destination = flat.full_gradients,
                                                    .shard_bytes = flat.shard_gradient_bytes(),
                                                    .label = flat.label}));
  }
}

void ReduceScheduler::replicate() {
  if (!device_.is_async()) {
    for (const std::size_t index : order_) start_replicate(units_[index], replicating_);
  }
  for (const WorkPtr& work : replicating_) work->wait(communicator_.lane());
  if (!replicating_.empty()) last_work_ = replicating_.back();
  replicating_.clear();
  if (device_.is_async() || !replicates() || discards_) return;
  for (const std::size_t index : order_) events_.reduced(units_[index]);
}

void ReduceScheduler::end_backward() {
  for (const std::size_t index : order_) {
    if (!units_[index].complete) mark_complete(index);
  }
  settle();
  for (const std::size_t index : order_) {
    if (!units_[index].held.empty()) pack_held(units_[index]);  // a micro-batch before the accumulation boundary
  }
  record_expectations();
  forget_uses();
  in_backward_ = false;
  reduced_in_window_ = reduced_in_window_ || last_;
  ++window_backwards_;
}

void ReduceScheduler::abort_backward() {
  if (!in_backward_) return;
  in_backward_ = false;
  forget_uses();
  discards_ = true;
  const ScopeExit over([this] { discards_ = false; });
  settle();
  // No step follows, whose exchange would tell that peers have read this rank's gradients: the next backward may write
  // there at once. The last collective's source is free when all ranks are through all of them.
  if (last_work_) last_work_->wait_source_free();
  last_work_.reset();
  clear_window();
}

void ReduceScheduler::drop_backward() noexcept {
  in_backward_ = false;
  forget_uses();
  in_flight_.clear();
  replicating_.clear();
  for (const std::size_t index : order_) {
    units_[index].reducing.clear();
    staged_[index].clear();
  }
  clear_window();
}

void ReduceScheduler::forget_uses() {
  forwards_ = 0;
  for (Unit& unit : units_) unit.uses = 0;
}

void ReduceScheduler::record_expectations() {
  if (forwards_ == 0) return;  // of an earlier forward's second backward: nothing tells how often modules were used
  expected_forwards_ = forwards_;
  for (const std::size_t index : order_) {
    Unit& unit = units_[index];
    const bool used_as_before = recorded_ && unit.uses == unit.expected_uses;
    unit.expected_uses = unit.uses;
    unit.expected_arrivals = 0;
    for (const FlatBuffer& flat : unit.flats) {
      for (const std::size_t p : flat.parameters) {
        Parameter& parameter = parameters_[p];
        // What came in some backwards only, such as an expert's gradient, is not waited for.
        parameter.expected_arrivals =
            used_as_before ? std::min(parameter.expected_arrivals, parameter.arrivals) : parameter.arrivals;
        unit.expected_arrivals += parameter.expected_arrivals;
      }
    }
  }
  recorded_ = true;
}

void ReduceScheduler::clear_window() {
  window_backwards_ = 0;
  reduced_in_window_ = false;
  for (Unit& unit : units_) unit.awaited_inputs = 0;
  for (const std::size_t index : order_) {
    units_[index].set_gradient_state(GradientState::kEmpty);
    units_[index].spare.reset();
    units_[index].held.clear();
    units_[index].gradient_slot.reset();
  }
}

}  // namespace zb
