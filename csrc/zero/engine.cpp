// Forward and backward, their ends by an exception, and what may be asked of an engine at any time.
#include "zero/engine.h"

#include <utility>

#include "comm/lane_buffer.h"
#include "common/error.h"
#include "common/scope_exit.h"

namespace zb {

void Engine::begin_forward(bool train) {
  enter([&] {
    expect_no_updates();
    go_on();
    gathers_->begin_pass(train ? PassKind::kTrainForward : PassKind::kEvalForward);
    if (train) reduces_->begin_forward();
    for (std::size_t index = 0; index < units_.size(); ++index) {
      if (units_[index].is_awaited_early) await_updates(index);
    }
    in_forward_.start(device(), "forward");
  });
}

void Engine::end_forward() {
  enter([&] { end_open_forward(); });
}

void Engine::abandon_forward() {
  enter_torn([&] {
    if (!gathers_->in_pass() || gathers_->pass_kind() == PassKind::kBackward) return;
    if (gathers_->pass_kind() == PassKind::kTrainForward) reduces_->abandon_forward();
    end_open_forward();
  });
}

// Peers may use what this rank did not.
void Engine::end_open_forward() {
  const ScopeExit at_exit([this] { end_pass_ranges(); });
  or_abort([&] {
    publish_all();
    gathers_->end_pass();
  });
}

void Engine::pre_forward(std::size_t unit) {
  enter([&] {
    open_forward(unit);
    if (!units_[unit].is_root) return;
    for (std::size_t index = 0; index < units_.size(); ++index) {
      if (units_[index].goes_with_root) open_forward(index);
    }
  });
}

void Engine::pre_forward_with_root(std::size_t unit) {
  enter([&] {
    ZB_EXPECT_STATE(parameters_sharded() && gathers_->in_pass() && !reduces_->in_backward(),
                    "a unit can join the root only in a forward of stage 3");
    if (!units_[unit].goes_with_root) open_forward(unit, true);
  });
}

void Engine::open_forward(std::size_t unit, bool joins_root) {
  expect_not_updated(units_[unit]);
  if (!gathers_->in_pass()) expect_not_updating(units_[unit]);
  await_updates(unit);
  // Recomputation inside a backward is not a use of its own.
  if (!reduces_->in_backward() && gathers_->in_pass() && gathers_->pass_kind() == PassKind::kTrainForward) {
    reduces_->count_use(unit);
  }
  if (joins_root) {
    gathers_->use_with_root(unit);
  } else {
    gathers_->use(unit);
  }
  if (!parameters_sharded()) return;  // no hook tells when the module is done
  if (units_[unit].open_forwards++ == 0) units_[unit].in_forward.start(device(), units_[unit].ranges.forward.c_str());
}

void Engine::note_earlier_use(std::size_t unit) {
  enter([&] {
    if (units_[unit].is_updating) throw_missed(units_[unit]);
    units_[unit].is_awaited_early = true;
  });
}

// What lies before it in the model may have computed already, and no hook has waited for its parameters.
void Engine::expect_not_updating(const Unit& unit) const {
  ZB_EXPECT_STATE(!is_updating(), "unit '" + unit.name +
                                      "' was called outside a forward of the engine while the last step's updates are "
                                      "under way; call the engine itself, or wrap the call in engine.gather()");
}

void Engine::post_forward(std::size_t unit) {
  enter([&] {
    for (std::size_t index = 0; units_[unit].is_root && index < units_.size(); ++index) {
      if (units_[index].goes_with_root) close_forward(index);
    }
    close_forward(unit);
  });
}

void Engine::close_forward(std::size_t unit) {
  if (units_[unit].open_forwards > 0 && --units_[unit].open_forwards > 0) return;  // a module that calls itself
  units_[unit].in_forward.end();
  gathers_->finish_forward(unit);
}

void Engine::pre_backward(std::size_t unit) {
  enter([&] {
    ZB_EXPECT_STATE(reduces_->in_backward() || in_input_backward(),
                    foreign_backward_text("unit '" + units_[unit].name + "'") +
                        ". At stage 3 neither torch.autograd.grad nor another model's backward can pass through this "
                        "model: use stage 0, 1 or 2 for that");
    expect_not_updated(units_[unit]);
    gathers_->use(unit);
    start_backward_range(units_[unit]);
  });
}

// Backward reaches a unit once for each of its outputs, which may be after the last of its gradients has come.
void Engine::start_backward_range(Unit& unit) {
  const bool is_over = unit.has_trainable() ? unit.complete : unit.awaited_inputs == 0;
  if (parameters_sharded() && !is_over && !unit.in_backward.is_open()) {
    unit.in_backward.start(device(), unit.ranges.backward.c_str());
  }
}

void Engine::await_inputs(std::size_t unit) {
  enter([&] { ++units_[unit].awaited_inputs; });
}

void Engine::inputs_done(std::size_t unit) {
  enter([&] {
    if (units_[unit].awaited_inputs > 0) --units_[unit].awaited_inputs;
    if (reduces_->in_backward() || in_input_backward()) finish_backward_if_done(unit);
  });
}

// Gradients towards inputs may come before those of parameters, and the other way round.
void Engine::finish_backward_if_done(std::size_t index) {
  Unit& unit = units_[index];
  if (unit.awaited_inputs > 0 || (!unit.complete && unit.has_trainable())) return;
  unit.in_backward.end();
  gathers_->finish_backward(index);
}

// Of a pass that is over. Autograd calls hooks from threads of its own, and after an exception not all of them, so what
// they begin and end does not nest.
void Engine::end_pass_ranges() noexcept {
  for (Unit& unit : units_) {
    unit.open_forwards = 0;
    unit.in_forward.end();
    unit.in_backward.end();
  }
  in_forward_.end();
  in_backward_.end();
}

void Engine::begin_backward(bool last, std::span<const AdamHyperparameters> groups) {
  enter([&] {
    expect_no_updates();
    go_on();
    if (reduces_->window_backwards() == 0) begin_window();
    if (updates_in_backward(last)) {
      expect_possible(groups);
      expect_not_gathered("a backward with updates began");
    }
    await_gathers_of_forward();
    gathers_->begin_pass(PassKind::kBackward);
    or_leave_backward([&] {
      in_backward_.start(device(), "backward");
      drop_offers();
      for (Unit& unit : units_) unit.missed_update = unit.is_updating;
      // The last ones still read the gradients that are written now.
      if (!store_->issues_at_once() || options_.optimizer_in_backward) finish_updates();
      begin_updates(last, groups);
      reduces_->begin_backward(last);
      use_root_in_backward();
    });
  });
}

// No hook asks for the root's parameters; an earlier backward may have resharded them.
void Engine::use_root_in_backward() {
  for (std::size_t index = 0; index < units_.size(); ++index) {
    if (units_[index].is_root || units_[index].goes_with_root) gathers_->use(index);
  }
}

void Engine::begin_input_backward() {
  enter([&] {
    ZB_EXPECT_STATE(trainable_flats_.empty(),
                    "a backward of an engine that trains parameters needs a window of micro-batches");
    await_gathers_of_forward();
    gathers_->begin_pass(PassKind::kBackward);
    in_backward_.start(device(), "backward");
    or_abort([&] { use_root_in_backward(); });
  });
}

void Engine::end_input_backward() {
  enter([&] {
    if (!in_input_backward()) return;
    const ScopeExit at_exit([this] { end_pass_ranges(); });
    or_abort([&] { gathers_->end_pass(); });
    gathers_->release_all();
    for (Unit& unit : units_) unit.awaited_inputs = 0;
  });
}

// The host may be far ahead of the device. What it puts into the lane of reductions would wait there beside the lane of
// gathers, and two lanes that wait slow down every kernel (docs/decisions/0005-peer-communicator.md). The last gather
// of a forward stands some units before its end, so the compute lane does not run empty. A host that the device follows
// closely goes on.
void Engine::await_gathers_of_forward() {
  if (!parameters_sharded() || world_size() == 1 || !device().is_async()) return;
  if (device().has_passed(gathers_->halfway())) return;
  device().synchronize(device().mark_for_host(gather_communicator_->lane()));
}

void Engine::gradient_arrived(std::size_t parameter, const void* gradient, DType dtype, int graph_task,
                              std::shared_ptr<const void> owner) {
  enter([&] {
    const Unit& unit = units_[parameters_[parameter].unit];
    if (unit.missed_update) throw_missed(unit);
    if (reduces_->arrive(parameter, gradient, dtype, graph_task, std::move(owner))) {
      finish_backward_if_done(parameters_[parameter].unit);
    }
  });
}

// Hooks are how the engine knows that a forward comes to a unit.
void Engine::throw_missed(const Unit& unit) {
  throw StateError("a forward used parameters of unit '" + unit.name +
                   "' while the last step was still updating them: it did not call the unit's module first, so no hook "
                   "could wait for the update. Call modules, not their forward, and in the configuration's units name "
                   "a class whose forward holds all uses of its parameters");
}

void Engine::end_backward() {
  enter([&] {
    const ScopeExit at_exit([this] { end_pass_ranges(); });
    or_leave_backward([&] {
      or_abort([&] { gathers_->end_pass(); });
      reduces_->end_backward();
      finish_updates_in_backward();
    });
    gathers_->release_all();
  });
}

void Engine::abort_backward() {
  enter_torn([&] { leave_backward(); });
}

void Engine::leave_backward() {
  const ScopeExit at_exit([this] {
    tear();
    end_pass_ranges();
  });
  try {
    or_abort([&] {
      gathers_->end_pass();
      reduces_->abort_backward();
    });
  } catch (...) {
    reduces_->drop_backward();
    throw;
  }
  gathers_->release_all();
}

// The first error is the one to report.
void Engine::leave_failed_backward() {
  try {
    leave_backward();
  } catch (const std::exception& error) {
    note(error);
  }
}

void Engine::make_gradient_shards(Unit& unit) {
  backward_updates_.has_begun = true;
  if (!makes_gradients_each_step()) return;
  release_passed_gradients();
  unit.gradients_spent = false;  // what an unused unit still has is written again, in the lane of its last use
  for (FlatBuffer& flat : unit.flats) {
    if (!flat.trainable || flat.shard_gradients || !unit.in_place_gradients.empty()) continue;
    const std::size_t bytes = flat.accumulated_shard_bytes();
    auto memory = options_.allocate_in_compute ? options_.allocate_in_compute(bytes)
                                               : device().allocate(bytes, category_name(Category::kGradients));
    flat.shard_gradients = {
        std::make_shared<LaneBuffer>(std::move(memory), bytes, device().is_async(),
                                     Allocation(&ledger_, Tier::kDevice, Category::kGradients, bytes))};
    if (leaves_gradients_in_place()) flat.full_gradients = flat.shard_gradients;
  }
}

void Engine::set_compute_stream(void* stream) {
  const Entry::Scope inside(entry_);
  device().set_compute_stream(stream);
}

void Engine::quiesce() {
  const Entry::Scope inside(entry_);
  try {
    finish_updates();
    for (const WorkPtr& work : published_) work->wait_source_free();
  } catch (const Interrupted& interrupt) {
    published_.clear();
    fail(cause_of(interrupt));
    throw;
  } catch (const std::exception&) {
    // Whoever was reading has failed, or will at its next call.
  }
  published_.clear();
}

// What collectives that were aborted leave in memory means nothing.
void Engine::check_communicators() const {
  for (const Communicator* communicator : {gather_communicator_.get(), reduce_communicator_.get()}) {
    if (const std::optional<CommunicationError> cause = communicator->poisoned()) throw CommunicationError(*cause);
  }
}

void Engine::check_bindings() const {
  for (const Parameter& parameter : parameters_) check_intact(parameter);
}

long Engine::window_backwards() const { return static_cast<long>(reduces_->window_backwards()); }

CommunicationCounters Engine::counters() const {
  CommunicationCounters sum = gather_communicator_->counters();
  const CommunicationCounters& other = reduce_communicator_->counters();
  for (std::size_t i = 0; i < kCollectiveNum; ++i) {
    sum.calls[i] += other.calls[i];
    sum.bytes[i] += other.bytes[i];
  }
  return sum;
}

StoreTraffic Engine::store_traffic() {
  const Entry::Scope inside(entry_);
  return store_->traffic();
}

double Engine::store_waited_ms() {
  const Entry::Scope inside(entry_);
  return store_->waited_ms();
}

double Engine::store_waited_for_files_ms() {
  const Entry::Scope inside(entry_);
  return store_->waited_for_files_ms();
}

PinnedStats Engine::store_pinned() {
  const Entry::Scope inside(entry_);
  return store_->pinned();
}

void Engine::reset_counters() {
  const Entry::Scope inside(entry_);
  gather_communicator_->reset_counters();
  reduce_communicator_->reset_counters();
  clock_.reset();
  ledger_.reset_peaks();
}

bool Engine::ends_engine(const std::exception& error) noexcept {
  return dynamic_cast<const CommunicationError*>(&error) != nullptr ||
         dynamic_cast<const Interrupted*>(&error) != nullptr;
}

void Engine::note(const std::exception& error) {
  if (const auto* const communication = dynamic_cast<const CommunicationError*>(&error)) {
    fail(*communication);
  } else if (const auto* const interrupt = dynamic_cast<const Interrupted*>(&error)) {
    fail(cause_of(*interrupt));
  } else {
    fail_with_store();
  }
}

// One communicator may notice what the other has yet to find out, and the peers wait on either.
void Engine::fail(const CommunicationError& error) noexcept {
  failure_ = error;
  abort(error.what());
}

CommunicationError Engine::cause_of(const Interrupted& interrupt) const {
  for (const Communicator* communicator : {gather_communicator_.get(), reduce_communicator_.get()}) {
    if (const std::optional<CommunicationError> cause = communicator->poisoned()) return *cause;
  }
  return {"rank " + std::to_string(rank()) + " was " + interrupt.what(), rank()};
}

// Where the store has ended for good: the peers would wait for updates that never come.
void Engine::fail_with_store() noexcept {
  store_failure_ = store_ ? store_->failure() : nullptr;
  if (!store_failure_) return;
  try {
    std::rethrow_exception(store_failure_);
  } catch (const std::exception& error) {
    abort(error.what());
  }
}

void Engine::abort(const std::string& reason) noexcept {
  gather_communicator_->abort(reason);
  reduce_communicator_->abort(reason);
}

void Engine::stop(const std::string& why, bool for_good) noexcept {
  const std::uint32_t stop_num = for_good ? kStopsForGood : ++stop_num_;
  gather_communicator_->stop(why, stop_num);
  reduce_communicator_->stop(why, stop_num);
}

void Engine::go_on() noexcept {
  gather_communicator_->go_on(stop_num_);
  reduce_communicator_->go_on(stop_num_);
}

}  // namespace zb
