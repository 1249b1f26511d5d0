#include "zero/reduce_scheduler.h"

#include <algorithm>
#include <utility>

#include "common/error.h"
#include "common/scope_exit.h"

namespace zb {

std::string foreign_backward_text(const std::string& place) {
  return "this backward reached " + place +
         " of an engine that did not start it, and each engine takes gradients in its own backward only. Call "
         "engine.backward(loss), not loss.backward(). To train two models by one loss (two towers, actor and critic), "
         "make one engine for both: give zerobench.initialize a module that holds both models and calls them in its "
         "forward. To train one model through the other (a generator through its discriminator), call "
         "requires_grad_(False) on the other before its forward and requires_grad_(True) after this backward";
}

ReduceScheduler::ReduceScheduler(Device& device, Communicator& communicator, Ledger* ledger, std::vector<Unit>& units,
                                 std::vector<Parameter>& parameters, CommunicationClock& clock,
                                 const ReduceOptions& options, ReduceEvents events)
    : device_(device),
      communicator_(communicator),
      units_(units),
      parameters_(parameters),
      clock_(clock),
      options_(options),
      events_(std::move(events)),
      slots_(device, communicator, ledger, units, clock),
      packer_(device, parameters, persistent() && !takes_pushes() && !options.in_place),
      retained_(device, events_.gathers_meet, events_.is_compute_waiting),
      in_place_(parameters, ledger),
      expectations_(units, parameters) {
  // A first guess that most models confirm: backward visits units in reverse, and the root's gradients end it.
  for (std::size_t unit = units_.size(); unit-- > 0;) {
    if (units_[unit].has_trainable() && !units_[unit].is_root) order_.push_back(unit);
  }
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    if (units_[unit].has_trainable() && units_[unit].is_root) order_.push_back(unit);
  }
  for (const std::size_t unit : order_)
    units_[unit].is_push_worthwhile = takes_pushes() && is_mostly_large(units_[unit]);
}

void ReduceScheduler::reserve_slots(long accumulation_steps) {
  accumulates_ = accumulation_steps > 1;
  if (!persistent()) slots_.reserve(order_, accumulation_steps);
  adopt_order(std::vector<std::size_t>(order_));
  expectations_.guess();
}

void ReduceScheduler::adopt_order(const std::vector<std::size_t>& order) {
  order_ = order;
  if (!persistent()) slots_.assign(order_);
}

void ReduceScheduler::begin_backward(bool last) {
  ZB_EXPECT_STATE(!in_backward_, "a backward began inside a backward");
  in_backward_ = true;
  last_ = last;
  next_turn_ = 0;
  completed_.clear();
  // An earlier backward whose gradients no step has used may still be reading and writing them.
  if (persistent() && lane() != Lane::kCompute) device_.wait(Lane::kCompute, device_.mark(lane()));
  if (persistent() && reduced_in_window_) resume_accumulation();
  last_work_.reset();
  expectations_.begin_backward();
  for (const std::size_t index : order_) {
    Unit& unit = units_[index];
    unit.complete = false;
    unit.gradient_state.reset();
    if (!persistent() || window_backwards_ == 0) {
      for (const FlatBuffer& flat : unit.flats) {
        for (const std::size_t p : flat.parameters) parameters_[p].arrived_in_window = false;
      }
    }
  }
  for (const std::size_t index : order_) {
    if (expectations_.is_unused(units_[index])) mark_complete(index);
  }
  launch_ready();
}

// A further backward follows one that was reduced already, before any step. The sum so far stays in this rank's slice,
// and what other ranks hold of theirs must not be added again.
void ReduceScheduler::resume_accumulation() {
  if (communicator_.world_size() == 1) return;
  const CommunicationClock::Scope timed(clock_, "reduce-scatter of gradients");
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
  units_[index].set_gradient_state(GradientState::kAccumulating);
  if (persistent() || device_.is_async()) return;
  slots_.take_or_spare(index, [this] { finish_ready(); });
}

bool ReduceScheduler::arrive(std::size_t index, const void* gradient, DType dtype, int graph_task,
                             std::shared_ptr<const void> owner) {
  Parameter& parameter = parameters_[index];
  Unit& unit = units_[parameter.unit];
  ZB_EXPECT_STATE(in_backward_, foreign_backward_text("parameter '" + parameter.name + "'"));
  if (unit.gradient_state == GradientState::kReducing || unit.gradient_state == GradientState::kReduced) {
    expectations_.refute(unit);
    throw StateError("a further gradient of '" + parameter.name + "' arrived after unit '" + unit.name +
                     "' had been reduced, because its module was not used as in earlier steps. Repeat forward and "
                     "backward of this step on all ranks, and make parts of the module that some steps skip units of "
                     "their own (units in the configuration)");
  }
  if (unit.gradient_state == GradientState::kEmpty) {
    begin_unit(parameter.unit);
    unit.graph_task = graph_task;
  }
  unit.pending_gradients.push_back({index, gradient, dtype, parameter.arrived_in_window, std::move(owner)});
  if (!device_.is_async()) packer_.pack_pending(unit);
  parameter.arrived_in_window = true;
  expectations_.count_arrival(unit, parameter);
  if (!expectations_.is_complete(unit, parameter, graph_task)) return false;
  mark_complete(parameter.unit);
  if (reduces_now()) {
    launch_ready();
  } else {
    prepare(unit);
    packer_.pack_pending(unit);
  }
  return true;
}

void ReduceScheduler::mark_complete(std::size_t unit) {
  units_[unit].complete = true;
  completed_.push_back(unit);
}

void ReduceScheduler::launch_ready() {
  const CommunicationClock::Scope timed(clock_, "reduce-scatter of gradients");
  while (reduces_now() && next_turn_ < order_.size() && units_[order_[next_turn_]].complete) {
    const std::size_t index = order_[next_turn_];
    Unit& unit = units_[index];
    // Without its shared slot it cannot be reduced yet; the next event tries again.
    if (!persistent() && !unit.gradient_slot && !slots_.try_take(index)) break;
    retained_.make_room();
    prepare(unit);
    ++next_turn_;
    launch(index);
  }
  finish_ready();
}

void ReduceScheduler::prepare(Unit& unit) {
  if (discards_) return;
  if (options_.in_place && last_ && window_backwards_ == 0 && in_place_.can_stay_in_place(unit)) {
    in_place_.leave_in_place(unit);
  } else {
    InPlaceGradients::take_back(unit);  // pack what an earlier backward left in place before adding to it
  }
  events_.before(unit);
}

void ReduceScheduler::launch(std::size_t index) {
  Unit& unit = units_[index];
  const RangeScope range(device_, unit.ranges.reduce.c_str());
  if (unit.gradient_state == GradientState::kEmpty) unit.set_gradient_state(GradientState::kAccumulating);
  if (!unit.in_place_gradients.empty()) {
    unit.set_gradient_state(GradientState::kReducing);
    finish(index);
    return;
  }
  const Lane lane = this->lane();
  if (unit.spare) {
    device_.copy(lane, unit.gradient_slot.region().data(), unit.spare->data(), unit.gradient_bytes);
    unit.spare.reset();
  }
  if (lane != Lane::kCompute) device_.wait(lane, device_.mark(Lane::kCompute));
  const bool is_pushed = pushes(unit);
  const bool is_retained = retained_.retain(
      is_pushed ? packer_.push_whole(unit, communicator_, options_.push_bytes) : packer_.pack_whole(unit, lane), lane);
  unit.set_gradient_state(GradientState::kReducing);
  start_reduce(unit, is_pushed);
  if (is_pushed && is_retained) retained_.extend(lane);
  // In lanes nothing is left to wait for, and what follows a reduction is put in at once, so that all ranks start the
  // same operations in the same order whenever their gradients arrive.
  if (device_.is_async()) {
    finish(index);
  } else {
    in_flight_.push_back(index);
  }
}

// What this backward alone brings: where micro-batches were added up, the sum lies in one place already.
bool ReduceScheduler::pushes(const Unit& unit) const {
  return unit.is_push_worthwhile && !(persistent() && (accumulates_ || window_backwards_ > 0));
}

// Ranks need to agree, so nothing counts that only this one knows.
bool ReduceScheduler::is_mostly_large(const Unit& unit) const {
  std::size_t large_bytes = 0;
  for (const FlatBuffer& flat : unit.flats) {
    for (const std::size_t index : flat.parameters) {
      const std::size_t bytes = parameters_[index].numel * dtype_bytes(flat.reduce_dtype);
      if (flat.trainable && bytes >= options_.push_bytes) large_bytes += bytes;
    }
  }
  return 2 * large_bytes >= unit.gradient_bytes;
}

void ReduceScheduler::start_reduce(Unit& unit, bool is_pushed) {
  if (communicator_.world_size() == 1) return;
  const std::size_t unit_index = static_cast<std::size_t>(&unit - units_.data());
  const CollectiveGroup group(communicator_);
  for (FlatBuffer& flat : unit.flats) {
    if (!flat.trainable) continue;
    Region source = unit.gradients_of(flat);
    Region destination = flat.shard_gradients;
    if (!destination) {  // the peers get this rank's part, and nobody reads what it receives
      destination = source.at(static_cast<std::size_t>(communicator_.rank()) * flat.shard_gradient_bytes());
    } else if (is_staged(flat)) {
      destination = slots_.stage(unit_index, flat.shard_gradient_bytes());
    }
    unit.reducing.push_back(communicator_.start_reduce_scatter({.source = source,
                                                                .destination = destination,
                                                                .shard_numel = flat.layout.shard_numel(),
                                                                .dtype = flat.reduce_dtype,
                                                                .label = flat.label,
                                                                .is_pushed = is_pushed}));
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
  const Lane lane = this->lane();
  for (const WorkPtr& work : unit.reducing) {
    work->wait(lane);
    if (!persistent()) work->wait_source_free(lane);
  }
  unit.reducing.clear();
  unit.gradient_slot.reset();
  std::size_t staged = 0;
  for (FlatBuffer& flat : unit.flats) {
    if (!flat.trainable || discards_) continue;
    if (is_staged(flat)) accumulate(flat, slots_.staged(index)[staged++]);
    if (last_) add_sum(flat);
  }
  if (!options_.sums_together) put_in_sums();
  slots_.drop_staged(index);
  // In lanes this costs the host nothing and hides behind the rest of backward; a CPU rank would wait for its peers.
  if (device_.is_async() && last_) start_replicate(unit, replicating_);
  unit.set_gradient_state(GradientState::kReduced);
  if (last_ && !discards_ && (device_.is_async() || !replicates())) events_.reduced(unit);
}

// The first micro-batch's begins the sum.
void ReduceScheduler::accumulate(const FlatBuffer& flat, const SlotLease& staged) {
  std::byte* const sum = flat.shard_gradients.data();
  const std::byte* const more = staged.region().data();
  const std::size_t numel = flat.layout.shard_numel();
  if (window_backwards_ == 0) {
    device_.cast(lane(), sum, flat.accumulate_dtype, more, flat.reduce_dtype, numel);
  } else {
    device_.add(lane(), sum, flat.accumulate_dtype, more, flat.reduce_dtype, numel);
  }
}

// One rank sums parameter by parameter, so that the norm is the same wherever gradients lie.
void ReduceScheduler::add_sum(const FlatBuffer& flat) {
  const std::size_t first = pieces_.size();
  if (!flat.in_place_pieces.empty()) {
    pieces_.insert(pieces_.end(), flat.in_place_pieces.begin(), flat.in_place_pieces.end());
  } else if (communicator_.world_size() == 1) {
    for (const ParameterSpan& span : flat.layout.spans()) {
      const std::size_t offset_bytes = span.offset_numel * dtype_bytes(flat.accumulate_dtype);
      pieces_.push_back(
          {.begin = span.offset_numel, .numel = span.numel, .data = flat.shard_gradients.data() + offset_bytes});
    }
  } else {
    pieces_.push_back({.numel = flat.layout.shard_numel(), .data = flat.shard_gradients.data()});
  }
  sums_.push_back({.flat = &flat, .first_piece = first, .piece_num = pieces_.size() - first});
}

void ReduceScheduler::put_in_sums() {
  std::vector<SquareSum> of_dtype;
  for (std::size_t next = 0; next < sums_.size();) {
    const DType dtype = sums_[next].flat->accumulate_dtype;
    for (; next < sums_.size() && sums_[next].flat->accumulate_dtype == dtype; ++next) {
      const Sum& sum = sums_[next];
      of_dtype.push_back(
          {.result = sum.flat->sum_of_squares, .pieces = std::span(pieces_).subspan(sum.first_piece, sum.piece_num)});
    }
    device_.sums_of_squares(lane(), dtype, of_dtype);
    of_dtype.clear();
  }
  sums_.clear();
  pieces_.clear();
}

void ReduceScheduler::finish_all() {
  const CommunicationClock::Scope timed(clock_, "reduce-scatter of gradients");
  if (!reduces_now()) return;
  while (next_turn_ < order_.size()) {
    const std::size_t index = order_[next_turn_];
    Unit& unit = units_[index];
    if (!persistent() && !unit.gradient_slot) {
      // All ranks are past their gathers here, so the slot's last unit is certain to be reduced.
      while (!slots_.try_take(index)) {
        ZB_EXPECT_STATE(!in_flight_.empty(), "no gradient slot for unit '" + unit.name + "' (an error of zerobench)");
        finish_first();
      }
    }
    prepare(unit);
    ++next_turn_;
    launch(index);
    finish_ready();
  }
  retained_.release();
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
  finish_all();
  if (!sums_.empty()) {
    const RangeScope range(device_, "norm");
    put_in_sums();
  }
  for (const std::size_t index : order_) {
    if (units_[index].pending_gradients.empty()) continue;
    prepare(units_[index]);  // a micro-batch before the accumulation boundary
    packer_.pack_pending(units_[index]);
  }
  expectations_.record();
  expectations_.forget_uses();
  in_backward_ = false;
  reduced_in_window_ = last_;
  ++window_backwards_;
}

void ReduceScheduler::reduce_window() {
  last_ = true;
  next_turn_ = 0;
  if (persistent()) {
    finish_all();
  } else {  // every backward has reduced its own
    sum_squares();
    for (const std::size_t index : order_) events_.reduced(units_[index]);
  }
  reduced_in_window_ = true;
}

void ReduceScheduler::sum_squares() {
  for (const std::size_t index : order_) {
    for (const FlatBuffer& flat : units_[index].flats) {
      if (flat.trainable) add_sum(flat);
    }
  }
  put_in_sums();
}

void ReduceScheduler::abort_backward() {
  if (!in_backward_) return;
  in_backward_ = false;
  expectations_.forget_uses();
  discards_ = true;
  const ScopeExit at_exit([this] { discards_ = false; });
  if (!options_.in_place) finish_all();  // for the peers
  drop_window();
}

// No step follows, whose exchange would tell that peers have read this rank's gradients: the next backward may write
// there at once. The last collective's source is free when all ranks are through all of them.
void ReduceScheduler::drop_window() {
  if (last_work_) last_work_->wait_source_free();
  last_work_.reset();
  clear_window();
}

void ReduceScheduler::drop_backward() noexcept {
  in_backward_ = false;
  expectations_.forget_uses();
  in_flight_.clear();
  replicating_.clear();
  retained_.drop();
  for (const std::size_t index : order_) {
    units_[index].reducing.clear();
    slots_.drop_staged(index);
  }
  clear_window();
}

void ReduceScheduler::clear_window() noexcept {
  window_backwards_ = 0;
  reduced_in_window_ = false;
  sums_.clear();
  pieces_.clear();
  for (Unit& unit : units_) unit.awaited_inputs = 0;
  for (const std::size_t index : order_) {
    units_[index].gradient_state.reset();
    units_[index].spare.reset();
    units_[index].pending_gradients.clear();
    if (!units_[index].gradients_spent) units_[index].drop_in_place();
    units_[index].gradient_slot.reset();
  }
}

}  // namespace zb
