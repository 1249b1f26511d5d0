// The step: what ranks tell each other, the norm, the updates, and how updated parameters reach those who use them.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "common/error.h"
#include "common/scope_exit.h"
#include "zero/engine.h"

namespace zb {

// What a rank tells the others before a step. Followed by the order in which its units became complete (uint32).
struct Engine::RankReport {
  std::int64_t steps_tried;
  std::int64_t window_backwards;
  std::uint64_t hyperparameters;  // hashed
};

namespace {

// FNV-1a, of their values.
std::uint64_t hash_of(std::span<const AdamHyperparameters> groups) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  const auto add = [&](std::uint64_t value) {
    for (int byte = 0; byte < 8; ++byte) hash = (hash ^ (value >> (8 * byte) & 0xffU)) * 0x100000001b3U;
  };
  for (const AdamHyperparameters& group : groups) {
    for (const double value : {group.lr, group.beta1, group.beta2, group.eps, group.weight_decay}) {
      add(std::bit_cast<std::uint64_t>(value));
    }
    add(static_cast<std::uint64_t>(group.kind));
  }
  return hash;
}

}  // namespace

// Tells the others about this step.
void Engine::exchange_reports(std::span<const AdamHyperparameters> groups) {
  finish_reports();
  std::vector<std::uint32_t> order(reduces_->completion_order().begin(), reduces_->completion_order().end());
  order.resize(reduces_->reduced_unit_num(), 0);
  const std::size_t order_bytes = order.size() * sizeof(std::uint32_t);
  const RankReport header{steps_tried_, reduces_->window_backwards(), hash_of(groups)};
  reports_.mine.resize(sizeof(header) + order_bytes);
  std::memcpy(reports_.mine.data(), &header, sizeof(header));
  std::memcpy(reports_.mine.data() + sizeof(header), order.data(), order_bytes);
  reports_.all.resize(reports_.mine.size() * static_cast<std::size_t>(world_size()));
  reports_.work = reduce_communicator_->start_exchange(reports_.mine, reports_.all, "step");
  if (!device().is_async()) finish_reports();
}

// Compares the ranks' reports on a step and adopts rank 0's order of completion.
void Engine::finish_reports() {
  if (!reports_.work) return;
  {
    const CommunicationClock::Scope timed(clock_, "report on the step");
    std::exchange(reports_.work, nullptr)->wait();
  }
  RankReport header;
  std::memcpy(&header, reports_.mine.data(), sizeof(header));
  for (int other = 0; other < world_size(); ++other) {
    RankReport report;
    std::memcpy(&report, reports_.all.data() + static_cast<std::size_t>(other) * reports_.mine.size(), sizeof(report));
    const bool is_same_step =
        report.steps_tried == header.steps_tried && report.window_backwards == header.window_backwards;
    if (!is_same_step) throw_other_window(other, report, header);
    if (report.hyperparameters == header.hyperparameters) continue;
    const std::string reason = "ranks " + std::to_string(rank()) + " and " + std::to_string(other) + " made step " +
                               std::to_string(header.steps_tried + 1) +
                               " with different hyperparameters, so their parameters differ now; "
                               "set the learning rate from what is equal on all ranks, such as a loss averaged over "
                               "them";
    reduce_communicator_->abort(reason);
    throw CommunicationError(reason, other);
  }
  std::vector<std::uint32_t> order((reports_.mine.size() - sizeof(header)) / sizeof(std::uint32_t));
  std::memcpy(order.data(), reports_.all.data() + sizeof(header), order.size() * sizeof(std::uint32_t));
  reduces_->adopt_order(std::vector<std::size_t>(order.begin(), order.end()));
}

void Engine::throw_other_window(int other, const RankReport& theirs, const RankReport& ours) {
  const std::string reason =
      "rank " + std::to_string(other) + " brings gradients of " + std::to_string(theirs.window_backwards) +
      " backwards to its step " + std::to_string(theirs.steps_tried + 1) + " and rank " + std::to_string(rank()) +
      " of " + std::to_string(ours.window_backwards) + " to its step " + std::to_string(ours.steps_tried + 1) +
      "; a rank that lost its gradients to an exception, or dropped them, cannot step with the others";
  reduce_communicator_->abort(reason);
  throw CommunicationError(reason, other);
}

// Every rank ends the window alike.
void Engine::end_window() {
  enter([&] {
    ZB_EXPECT_STATE(!reduces_->in_backward() && !gathers_->in_pass(),
                    "a window of micro-batches was ended inside a forward or backward");
    expect_no_updates();
    finish_reports();
    if (world_size() > 1) {
      const RankReport mine{steps_tried_, reduces_->window_backwards(), 0};
      std::vector<RankReport> all(static_cast<std::size_t>(world_size()));
      or_abort([&] {
        reduce_communicator_->exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)),
                                       "end of a window");
      });
      for (int other = 0; other < world_size(); ++other) {
        const RankReport& theirs = all[static_cast<std::size_t>(other)];
        const bool is_same = theirs.steps_tried == mine.steps_tried && theirs.window_backwards == mine.window_backwards;
        if (!is_same) throw_other_window(other, theirs, mine);
      }
    }
    if (reduces_->window_backwards() == 0 || reduces_->is_window_reduced()) return;
    or_abort([&] { reduces_->reduce_window(); });
  });
}

// Puts the norm, the factor and the skip flag of this step into device memory, and on their way to the host.
void Engine::combine_norm() {
  static_cast<void>(put_in_norm());
  // The thread of a store that does not issue at once waits for it, and so does this one a step later.
  const Lane lane = reduces_->lane();
  pending_ = {.arrived = store_->issues_at_once() ? device().mark(lane) : device().mark_for_host(lane),
              .is_pending = true,
              .was_in_backward = backward_updates_.is_on};
}

WorkPtr Engine::put_in_norm() {
  const RangeScope range(device(), "norm");
  Communicator& communicator = *reduce_communicator_;
  const Lane lane = reduces_->lane();
  WorkPtr work;
  if (world_size() > 1) {
    const CommunicationClock::Scope timed(clock_, "norm");
    // Ranks meet here with all their gathers behind them, so that what follows may write what peers have read.
    device().wait(lane, device().mark(gather_communicator_->lane()));
    work = communicator.start_all_gather({.source = own_sums_,
                                          .destination = all_sums_,
                                          .shard_bytes = trainable_flats_.size() * sizeof(double),
                                          .label = "gradient norm"});
    work->wait(lane);
  }
  auto* scalars = norm_.as<StepScalars>();
  device().combine_norm(lane, {.partial_sums = reinterpret_cast<const double*>(all_sums_.data()),
                               .rank_num = static_cast<std::size_t>(world_size()),
                               .flat_num = trainable_flats_.size(),
                               .divisor = gradient_divisor(),
                               .clip = options_.clip,
                               .flat_sums = reinterpret_cast<double*>(scalars + 1),
                               .scalars = scalars});
  device().copy_to_pinned(lane, norm_on_host_.get(), norm_.data(), norm_.bytes());
  return work;
}

// Learns how the last step ended.
void Engine::wait_step() {
  if (!pending_.is_pending) return;
  device().synchronize(pending_.arrived);
  const bool was_in_backward = pending_.was_in_backward;
  pending_ = {};
  const std::vector<std::size_t> held = std::exchange(held_in_step_, {});
  check_communicators();
  StepScalars scalars;
  std::memcpy(&scalars, norm_on_host_.get(), sizeof(scalars));
  outcome_ = {.applied = scalars.is_skipped == 0, .grad_norm = scalars.norm};
  if (outcome_.applied) {
    ++steps_applied_;
    for (const std::size_t index : held) ++parameters_[index].held_steps;
    scaler_.step_succeeded();
    return;
  }
  if (scaler_.step_overflowed()) return;
  is_torn_ = was_in_backward;
  const auto* sums = reinterpret_cast<const double*>(norm_on_host_.get() + sizeof(scalars));
  std::size_t position = 0;
  for (const Unit& unit : units_) {
    for (const FlatBuffer& flat : unit.flats) {
      if (!flat.trainable || std::isfinite(sums[position++])) continue;
      throw NonFiniteGradientError(
          "the gradient of unit '" + unit.name + "' is not finite in step " + std::to_string(steps_tried_) +
          (scaler_.enabled() ? ", with the loss scale at its floor" : "") +
          (is_torn_ ? "; parameters were updated with it during backward, load a state (engine.load_full_state)."
                    : "; nothing was updated.") +
          " Lower the learning rate, clip gradients, or check the data");
    }
  }
}

void Engine::step(std::span<const AdamHyperparameters> groups) {
  enter([&] {
    ZB_EXPECT_STATE(!reduces_->in_backward() && !gathers_->in_pass(), "step() was called inside a forward or backward");
    expect_not_gathered("step() was called");
    ZB_EXPECT_STATE(reduces_->window_backwards() > 0,
                    "step() was called without gradients; call engine.backward(loss) first (after an exception or "
                    "zero_grad(), repeat forward and backward)");
    ZB_EXPECT_STATE(reduces_->is_window_reduced(),
                    "step() was called in the middle of a window of micro-batches; end it with "
                    "engine.step(end_window=True)");
    check_bindings();
    if (!backward_updates_.is_on) expect_possible(groups);
    {
      const ScopeExit clear([this] {
        reduces_->clear_window();
        ++steps_tried_;
        backward_updates_.is_on = false;
      });
      wait_step();
      or_abort([&] {
        if (!backward_updates_.is_on) finish_updates();
        exchange_reports(groups);
        combine_norm();
        gathers_->release_all();
        if (backward_updates_.is_on) {
          publish_updates();
        } else {
          update(groups);
        }
        if (!options_.overlap_updates) {
          finish_updates();
          await_reads();
        }
      });
    }
    guard_updating();
    if (!device().is_async()) wait_step();
    if (stop_num_.exchange(0) != 0) go_on();
  });
}

// Nobody reads parameters between a step and the arrival of its updates.
void Engine::guard_updating() {
  if (parameters_sharded()) return;
  for (Unit& unit : units_) {
    if (!unit.is_updating || std::exchange(unit.is_guarded, true)) continue;
    for (const FlatBuffer& flat : unit.flats) {
      if (!flat.trainable) continue;
      for (const std::size_t index : flat.parameters) {
        parameters_[index].binding->guard(parameters_[index].updating_message);
      }
    }
  }
}

// What a block holds unsharded would be of the step before, and its end may make that everybody's.
void Engine::expect_not_gathered(const char* what) const {
  ZB_EXPECT_STATE(std::none_of(units_.begin(), units_.end(), [](const Unit& unit) { return unit.pins > 0; }),
                  std::string(what) + " inside engine.gather(); leave the block first");
}

// Before anything is begun that a refusal would leave behind.
void Engine::expect_possible(std::span<const AdamHyperparameters> groups) const {
  for (const AdamHyperparameters& group : groups) static_cast<void>(make_adam_scalars(group, 1, 1.0F));
  ZB_EXPECT(groups.size() >= param_group_num_, "the parameters belong to " + std::to_string(param_group_num_) +
                                                   " param groups, but hyperparameters were given for " +
                                                   std::to_string(groups.size()));
}

StepOutcome Engine::outcome() {
  return enter([&] {
    wait_step();
    return outcome_;
  });
}

LossScaleState Engine::loss_scale_state() {
  if (!scaler_.enabled()) return scaler_.state();
  return enter([&] {
    wait_step();
    return scaler_.state();
  });
}

long Engine::steps_applied() {
  return enter([&] {
    wait_step();
    return steps_applied_;
  });
}

// A store that does not issue updates at once may begin with a unit before the norm is known.
void Engine::offer_gradients(Unit& unit) {
  if (store_->issues_at_once()) return;
  const MarkPtr ready = device().mark(reduce_communicator_->lane());
  for (const FlatBuffer& flat : unit.flats) {
    if (!flat.trainable) continue;
    store_->offer_gradient(flat.store_shard,
                           {.data = update_gradient(flat), .dtype = flat.accumulate_dtype, .ready = ready});
  }
  has_offered_ = true;
}

void Engine::drop_offers() {
  if (std::exchange(has_offered_, false)) store_->drop_gradients(Lane::kCompute);
}

// [Note: update order]
// About that in which the next forward waits for units, so that what it needs first is there first: the root, for whose
// parameters a forward waits at its beginning, wherever it uses them; then the reverse of the order in which backward
// completes units, which is everybody's. (Backward completes a root that is a last norm as one of the first: last in
// turn, it would hold up the forward until everything was updated and published.) Before a backward was recorded that
// is the order of registration.
void Engine::take_update_order() {
  const std::vector<std::size_t>& reduced = reduces_->order();
  update_order_.assign(reduced.rbegin(), reduced.rend());
  std::stable_partition(update_order_.begin(), update_order_.end(),
                        [this](std::size_t unit) { return units_[unit].is_root; });
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    if (!units_[unit].has_trainable()) update_order_.push_back(unit);
  }
  update_turns_.resize(units_.size());
  for (std::size_t turn = 0; turn < update_order_.size(); ++turn) update_turns_[update_order_[turn]] = turn;
}

void Engine::update(std::span<const AdamHyperparameters> groups) {
  const std::vector<AdamScalars> rows = make_rows(groups, steps_applied_ + 1);
  for (std::size_t index = 0; has_own_steps_ && index < parameters_.size(); ++index) {
    if (parameters_[index].is_held) held_in_step_.push_back(index);
  }
  published_.clear();
  take_update_order();
  // Behind the norm, and behind all that reads the parameters that are about to change.
  device().wait(update_lane(), pending_.arrived);
  device().wait(update_lane(), device().mark(Lane::kCompute));
  has_offered_ = false;
  if (publishes()) unpublished_ = 0;
  const StepPlaces step{.on_device = norm_.as<StepScalars>(),
                        .on_host = reinterpret_cast<const StepScalars*>(norm_on_host_.get()),
                        .arrived = pending_.arrived};
  if (!state_sharded() && store_->issues_at_once()) {  // nobody waits for a unit's alone
    update_units(units_, update_lane(), rows, step);
    for (Unit& unit : units_) release_gradients(unit);  // in the compute lane, whose memory they are
  } else {
    for (std::size_t turn = 0; turn < units_.size(); ++turn) {
      update_units({&units_[update_order_[turn]], 1}, update_lane(), rows, step);
      if (store_->issues_at_once()) publish_small_together(turn + 1);
    }
  }
  if (gathers_->tracks_final_shards() && store_->issues_at_once()) meet_behind_updates();
  finish_where_nothing_runs_beside();
}

// Scalars by segment row: by param group, and further ones for parameters whose own step count is another.
std::vector<AdamScalars> Engine::make_rows(std::span<const AdamHyperparameters> groups, long step) {
  std::vector<AdamScalars> rows;
  for (const AdamHyperparameters& group : groups) rows.push_back(make_adam_scalars(group, step, 1.0F));
  if (!has_own_steps_) return rows;
  std::map<std::pair<int, long>, int> row_of;
  for (FlatBuffer* flat : trainable_flats_) make_update_segments(*flat, groups, step, row_of, rows);
  return rows;
}

void Engine::make_update_segments(FlatBuffer& flat, std::span<const AdamHyperparameters> groups, long step,
                                  std::map<std::pair<int, long>, int>& row_of, std::vector<AdamScalars>& rows) {
  std::vector<Segment> segments;
  bool follows = false;  // the last segment ends with the parameter before
  for (std::size_t position = 0; position < flat.parameters.size(); ++position) {
    const Parameter& parameter = parameters_[flat.parameters[position]];
    const ParameterSpan& span = flat.layout.spans()[position];
    if (parameter.is_held) {
      follows = false;
      continue;
    }
    int row = span.param_group;
    if (parameter.held_steps > 0) {
      const auto [found, is_new] =
          row_of.try_emplace({span.param_group, parameter.held_steps}, static_cast<int>(rows.size()));
      const AdamHyperparameters& group = groups[static_cast<std::size_t>(span.param_group)];
      if (is_new) rows.push_back(make_adam_scalars(group, step - parameter.held_steps, 1.0F));
      row = found->second;
    }
    if (follows && segments.back().row == row) {
      segments.back().end = span.offset_numel + span.numel;
    } else {
      segments.push_back({span.offset_numel, span.offset_numel + span.numel, row});
    }
    follows = true;
  }
  const std::size_t begin = state_sharded() ? static_cast<std::size_t>(rank()) * flat.layout.shard_numel() : 0;
  const std::size_t numel = state_sharded() ? flat.layout.shard_numel() : flat.layout.padded_numel();
  flat.update_segments = within(segments, begin, begin + numel);
}

void Engine::meet_behind_updates() {
  const CommunicationClock::Scope timed(clock_, "all-gather of parameters");
  const Lane lane = reduce_communicator_->lane();
  reduce_communicator_
      ->start_all_gather(
          {.source = own_sums_, .destination = all_sums_, .shard_bytes = sizeof(double), .label = "updates"})
      ->wait(lane);
  gathers_->mark_updated_final(device().mark(lane));
}

// Where operations do not run beside the caller they are done here, and the next forward finds them done.
void Engine::finish_where_nothing_runs_beside() {
  if (gather_communicator_->runs_in_background() || !store_->issues_at_once()) return;
  const CommunicationClock::Scope timed(clock_, "all-gather of parameters");
  for (Unit& unit : units_) wait_updated(unit);
  await_reads();
}

// The caller may change parameters in place, once peers have read what this rank has updated.
void Engine::await_reads() {
  for (const WorkPtr& work : published_) work->wait_source_free(Lane::kCompute);
}

void Engine::update_units(std::span<Unit> units, Lane lane, std::span<const AdamScalars> rows, const StepPlaces& step) {
  const RangeScope range(device(), units.size() == 1 ? units.front().ranges.update.c_str() : "update");
  std::vector<std::pair<std::size_t, ShardUpdate>> updates;
  for (Unit& unit : units) {
    for (FlatBuffer& flat : unit.flats) {
      if (!flat.trainable) continue;
      const Region parameters = updated_parameters(flat);
      updates.emplace_back(flat.store_shard,
                           ShardUpdate{.lane = lane,
                                       .gradient = unit.in_place_gradients.empty() ? update_gradient(flat) : nullptr,
                                       .gradient_dtype = flat.accumulate_dtype,
                                       .gradient_pieces = flat.in_place_pieces,
                                       .parameters = flat.is_fetched ? nullptr : parameters.data(),
                                       .rows = rows,
                                       .segments = flat.update_segments ? &*flat.update_segments : nullptr,
                                       .step = step.on_device,
                                       .step_on_host = step.on_host,
                                       .step_arrived = step.arrived,
                                       .turn = update_turns_[static_cast<std::size_t>(&unit - units_.data())]});
      flat.is_final = false;
    }
  }
  store_->start_updates(updates);
  for (Unit& unit : units) {
    unit.gradients_spent = true;
    unit.is_updating = lane != Lane::kCompute || !store_->issues_at_once() ||
                       (publishes() && gather_communicator_->runs_in_background());
  }
}

// Units whose turn is before `end` are updated: they are published, small ones together.
void Engine::publish_small_together(std::size_t end) {
  std::size_t bytes = 0;
  for (std::size_t turn = unpublished_; turn < end; ++turn) bytes += units_[update_order_[turn]].gather_bytes;
  if (bytes >= options_.publish_bytes || end == units_.size()) publish_before(end);
}

// Up to this unit, in the same order on all ranks; and what lies behind it as far as it costs no wait.
void Engine::publish_through(std::size_t unit) {
  const auto first = update_order_.begin() + static_cast<std::ptrdiff_t>(unpublished_);
  const auto found = std::find(first, update_order_.end(), unit);
  // Nothing has to be published for one that is.
  const std::size_t end =
      found == update_order_.end() ? unpublished_ : static_cast<std::size_t>(found - update_order_.begin()) + 1;
  publish_as_far(end);
}

void Engine::publish_all() { publish_as_far(units_.size()); }

// Up to `end`, and behind it what costs no wait.
void Engine::publish_as_far(std::size_t end) {
  const auto is_issued = [&](const FlatBuffer& flat) { return !flat.trainable || store_->is_issued(flat.store_shard); };
  while (unpublished_ < units_.size()) {
    const std::vector<FlatBuffer>& flats = units_[update_order_[unpublished_]].flats;
    if (unpublished_ >= end && !std::all_of(flats.begin(), flats.end(), is_issued)) return;
    publish_before(unpublished_ + 1);
  }
}

// Stages 1 and 2: every rank's updated shards of the next units go to all ranks, in one group.
void Engine::publish_before(std::size_t end) {
  if (unpublished_ >= end) return;
  Communicator& communicator = *gather_communicator_;
  const CommunicationClock::Scope timed(clock_, "all-gather of parameters", units_[update_order_[unpublished_]].name);
  const RangeScope together(device(), "publish");
  const std::size_t begin = std::exchange(unpublished_, end);
  for (std::size_t turn = begin; turn < end; ++turn) {
    const CommunicationClock::Pause updating(clock_);
    for (const FlatBuffer& flat : units_[update_order_[turn]].flats) {
      if (flat.trainable) store_->wait_update(flat.store_shard, communicator.lane());
    }
  }
  const CollectiveGroup group(communicator);
  for (std::size_t turn = begin; turn < end; ++turn) {
    Unit& unit = units_[update_order_[turn]];
    const RangeScope range(device(), unit.ranges.publish.c_str());
    for (const FlatBuffer& flat : unit.flats) {
      if (!flat.trainable) continue;
      unit.publishing.push_back(communicator.start_all_gather({.source = flat.shard_parameters,
                                                               .destination = flat.full_parameters,
                                                               .shard_bytes = flat.shard_parameter_bytes(),
                                                               .label = flat.label}));
      published_.push_back(unit.publishing.back());
    }
  }
}

// The compute lane stands behind the unit's last update.
void Engine::wait_updated(Unit& unit) {
  for (const FlatBuffer& flat : unit.flats) {
    if (flat.trainable) store_->wait_update(flat.store_shard, Lane::kCompute);
  }
  for (const WorkPtr& work : unit.publishing) work->wait();
  unit.publishing.clear();
  unit.is_updating = false;
  unguard(unit);
  release_gradients(unit);  // their memory is the compute lane's, which is behind all that uses it
}

void Engine::unguard(Unit& unit) {
  if (!std::exchange(unit.is_guarded, false)) return;
  for (const FlatBuffer& flat : unit.flats) {
    if (!flat.trainable) continue;
    for (const std::size_t index : flat.parameters) parameters_[index].binding->unguard();
  }
}

void Engine::release_gradients(Unit& unit) {
  if (!std::exchange(unit.gradients_spent, false) || !makes_gradients_each_step()) return;
  for (FlatBuffer& flat : unit.flats) flat.full_gradients = flat.shard_gradients = {};
  unit.drop_in_place();
}

void Engine::await_updates(std::size_t unit) {
  if (units_[unit].has_trainable()) publish_through(unit);  // frozen ones are last in turn, and wait for nobody
  wait_updated(units_[unit]);
}

void Engine::finish_updates() {
  publish_all();
  for (Unit& unit : units_) wait_updated(unit);
}

}  // namespace zb
