#include "zero/engine.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "common/error.h"
#include "common/scope_exit.h"
#include "kernels/drain.h"

namespace zb {
namespace {

std::size_t largest_unit_bytes(const std::vector<Unit>& units) {
  std::size_t largest = 0;
  for (const Unit& unit : units) {
    if (!unit.is_root) largest = std::max(largest, unit.gather_bytes);
  }
  return largest;
}

}  // namespace

Engine::Engine(const EngineOptions& options, EngineModel model, DeviceParts parts,
               std::unique_ptr<Communicator> gather_communicator, std::unique_ptr<Communicator> reduce_communicator)
    : options_(options),
      gather_communicator_(std::move(gather_communicator)),
      reduce_communicator_(std::move(reduce_communicator)),
      policy_(stage_policy(options.stage, reduce_communicator_->world_size())),
      parts_(std::move(parts)),
      store_(make_device_store(&ledger_, parts_)),
      scaler_(options.loss_scale) {
  ZB_EXPECT(options.accumulation_steps >= 1, "gradient_accumulation_steps must be at least 1");
  ZB_EXPECT(model.bindings.size() == model.parameters.size(), "every parameter needs a binding");
  // A rank that blocks in one of the two still serves its peers in the other.
  gather_communicator_->serve_while_blocked(*reduce_communicator_);
  reduce_communicator_->serve_while_blocked(*gather_communicator_);
  units_ = make_units(model.unit_names, model.root_unit, model.parameters, world_size(), parameters_);
  prefetch_bytes_ = options.default_prefetch ? largest_unit_bytes(units_) : options.prefetch_bytes;
  gathers_ = std::make_unique<GatherScheduler>(device(), *gather_communicator_, &ledger_, units_, parameters_, clock_,
                                               parameters_sharded(), options.reshard_after_forward, prefetch_bytes_);
  reduces_ = std::make_unique<ReduceScheduler>(device(), *reduce_communicator_, &ledger_, units_, parameters_, clock_,
                                               policy_.gradients, parameters_sharded());
  for (Unit& unit : units_) build_unit(unit, model);
  build_norms();
  gathers_->reserve_slots();
  reduces_->reserve_slots(options.accumulation_steps);
}

Engine::~Engine() {
  {
    const Drain drain(device());
  }
  // Slots go with the engine; parameters must not point there any more, and units give theirs back before the pools go.
  for (Unit& unit : units_) {
    unit.gather_slot.reset();
    unit.gradient_slot.reset();
    if (!parameters_sharded()) continue;
    for (const FlatBuffer& flat : unit.flats) {
      for (const std::size_t index : flat.parameters) {
        Parameter& parameter = parameters_[index];
        if (parameter.binding)
          parameter.binding->detach("parameter '" + parameter.name + "' belonged to an engine that was closed");
      }
    }
  }
}

void Engine::build_unit(Unit& unit, EngineModel& model) {
  if (model.materialise) model.materialise(static_cast<std::size_t>(&unit - units_.data()));
  for (FlatBuffer& flat : unit.flats) {
    for (const std::size_t index : flat.parameters) {
      parameters_[index].binding = std::move(model.bindings[index]);
      parameters_[index].sharded_message =
          "parameter '" + parameters_[index].name +
          "' is sharded (ZeRO stage 3): most of it is on other ranks now; read or change it inside "
          "`with engine.gather():`";
    }
    build_flat(flat);
  }
  if (parameters_sharded()) unit.parameter_state = ParameterState::kSharded;
}

// Makes a flat buffer's memory from rank 0's values, and frees the tensors' own.
void Engine::build_flat(FlatBuffer& flat) {
  const FlatLayout& layout = flat.layout;
  const auto rank_offset = static_cast<std::size_t>(rank()) * layout.shard_numel();
  const bool several = world_size() > 1;
  Communicator& communicator = *reduce_communicator_;

  Region initial{communicator.allocate(layout.padded_numel() * sizeof(float),
                                       several ? BufferRole::kShared : BufferRole::kPrivate, &ledger_,
                                       Category::kStaging)};
  const Drain drain(device());
  auto* values = reinterpret_cast<float*>(initial.data());
  for (const std::size_t index : flat.parameters) {
    parameters_[index].binding->read(values + parameters_[index].offset_numel);
    parameters_[index].binding->adopt(flat.param_dtype);
  }
  if (several) {
    device().wait(communicator.lane(), device().mark(Lane::kCompute));
    communicator
        .start_broadcast(
            {.buffer = initial, .bytes = layout.padded_numel() * sizeof(float), .root = 0, .label = flat.label})
        ->wait();
  }

  if (parameters_sharded()) {
    flat.shard_parameters = {gather_communicator_->allocate(flat.shard_parameter_bytes(), BufferRole::kShared, &ledger_,
                                                            Category::kParameters)};
    device().cast(Lane::kCompute, flat.shard_parameters.data(), flat.param_dtype, values + rank_offset, DType::kFloat32,
                  layout.shard_numel());
    flat.updated = device().mark(Lane::kCompute);
  } else {
    const bool gathered = several && state_sharded() && flat.trainable;
    flat.full_parameters = {gather_communicator_->allocate(flat.full_parameter_bytes(),
                                                           gathered ? BufferRole::kShared : BufferRole::kPrivate,
                                                           &ledger_, Category::kParameters)};
    flat.shard_parameters = flat.full_parameters.at(static_cast<std::size_t>(rank()) * flat.shard_parameter_bytes());
    device().cast(Lane::kCompute, flat.full_parameters.data(), flat.param_dtype, values, DType::kFloat32,
                  layout.padded_numel());
  }
  for (const std::size_t index : flat.parameters) {
    Parameter& parameter = parameters_[index];
    if (parameters_sharded()) {
      parameter.binding->detach(parameter.sharded_message);
    } else {
      parameter.binding->attach_owned(flat.full_parameters.at(parameter.offset_numel * dtype_bytes(flat.param_dtype)));
    }
  }
  if (!flat.trainable) {
    if (several) communicator.barrier(flat.label);
    return;
  }

  if (policy_.gradients == GradientPlacement::kShardedEachMicroBatch) {
    flat.shard_gradients = {
        communicator.allocate(flat.shard_gradient_bytes(), BufferRole::kPrivate, &ledger_, Category::kGradients)};
  } else {
    flat.full_gradients = {communicator.allocate(flat.full_gradient_bytes(),
                                                 several ? BufferRole::kShared : BufferRole::kPrivate, &ledger_,
                                                 Category::kGradients)};
    flat.shard_gradients = flat.full_gradients.at(static_cast<std::size_t>(rank()) * flat.shard_gradient_bytes());
  }
  ShardSpec spec{.numel = layout.padded_numel(), .param_dtype = flat.param_dtype, .segments = layout.segments()};
  std::size_t first = 0;
  if (state_sharded()) {
    first = rank_offset;
    spec.numel = layout.shard_numel();
    spec.segments = layout.segments_within(rank_offset, rank_offset + layout.shard_numel());
  }
  flat.store_shard = store_->add_shard(spec, std::span<const float>(values + first, spec.numel));
  if (several) communicator.barrier(flat.label);  // nobody reads the broadcast's buffer any more
}

void Engine::build_norms() {
  for (Unit& unit : units_) {
    for (FlatBuffer& flat : unit.flats) {
      if (flat.trainable) trainable_flats_.push_back(&flat);
    }
  }
  const std::size_t bytes = trainable_flats_.size() * sizeof(double);
  const bool several = world_size() > 1;
  own_sums_ = {reduce_communicator_->allocate(bytes, several ? BufferRole::kShared : BufferRole::kPrivate, &ledger_,
                                              Category::kStaging)};
  all_sums_ = own_sums_;
  if (several) {
    all_sums_ = {reduce_communicator_->allocate(bytes * static_cast<std::size_t>(world_size()), BufferRole::kPrivate,
                                                &ledger_, Category::kStaging)};
  }
  norm_ = DeviceBuffer(device(), sizeof(StepScalars) + bytes, &ledger_, Category::kStaging);
  norm_on_host_ = device().allocate_pinned(norm_.bytes());
  auto* sums = reinterpret_cast<double*>(own_sums_.data());
  for (FlatBuffer* flat : trainable_flats_) flat->sum_of_squares = sums++;
}

void Engine::begin_forward(bool train) {
  enter([&] {
    gathers_->begin_pass(train ? PassKind::kTrainForward : PassKind::kEvalForward);
    if (train) reduces_->begin_forward();
  });
}

void Engine::end_forward() {
  enter([&] { gathers_->end_pass(); });
}

void Engine::abandon_forward() {
  enter([&] {
    if (!gathers_->in_pass() || gathers_->pass_kind() == PassKind::kBackward) return;
    if (gathers_->pass_kind() == PassKind::kTrainForward) reduces_->abandon_forward();
    gathers_->end_pass();
  });
}

void Engine::pre_forward(std::size_t unit) {
  enter([&] {
    wait_published(units_[unit]);
    // Recomputation inside a backward is not a use of its own.
    if (!reduces_->in_backward() && gathers_->in_pass() && gathers_->pass_kind() == PassKind::kTrainForward) {
      reduces_->count_use(unit);
    }
    gathers_->use(unit);
  });
}

void Engine::post_forward(std::size_t unit) {
  enter([&] { gathers_->finish_forward(unit); });
}

void Engine::pre_backward(std::size_t unit) {
  enter([&] {
    ZB_EXPECT_STATE(reduces_->in_backward(),
                    "backward reached unit '" + units_[unit].name +
                        "' outside engine.backward(); call engine.backward(loss), not loss.backward()");
    gathers_->use(unit);
  });
}

void Engine::await_inputs(std::size_t unit) {
  enter([&] { ++units_[unit].awaited_inputs; });
}

void Engine::inputs_done(std::size_t unit) {
  enter([&] {
    if (units_[unit].awaited_inputs > 0) --units_[unit].awaited_inputs;
    if (reduces_->in_backward()) finish_backward_if_done(unit);
  });
}

// Gradients towards inputs may come before those of parameters, and the other way round.
void Engine::finish_backward_if_done(std::size_t index) {
  const Unit& unit = units_[index];
  if (unit.awaited_inputs == 0 && (unit.complete || !unit.has_trainable())) gathers_->finish_backward(index);
}

void Engine::begin_backward(bool last) {
  enter([&] {
    gathers_->begin_pass(PassKind::kBackward);
    reduces_->begin_backward(last);
    for (std::size_t index = 0; index < units_.size(); ++index) {
      // No hook asks for the root's parameters; an earlier backward may have resharded them.
      if (units_[index].is_root) gathers_->use(index);
    }
  });
}

void Engine::gradient_arrived(std::size_t parameter, const void* gradient, DType dtype, int graph_task,
                              std::shared_ptr<const void> owner) {
  enter([&] {
    if (reduces_->arrive(parameter, gradient, dtype, graph_task, std::move(owner))) {
      finish_backward_if_done(parameters_[parameter].unit);
    }
  });
}

void Engine::end_backward() {
  enter([&] {
    try {
      gathers_->end_pass();
      reduces_->end_backward();
    } catch (...) {
      reduces_->drop_backward();
      throw;
    }
    gathers_->release_all();
  });
}

void Engine::abort_backward() {
  enter([&] {
    try {
      gathers_->end_pass();
      reduces_->abort_backward();
    } catch (...) {
      reduces_->drop_backward();
      throw;
    }
    gathers_->release_all();
  });
}

// What a rank tells the others before a step. Followed by the order in which its units became complete (uint32).
struct Engine::RankReport {
  std::int64_t steps_tried;
  std::int64_t window_backwards;
};

// Tells the others about this step.
void Engine::exchange_reports() {
  finish_reports();
  std::vector<std::uint32_t> order(reduces_->completion_order().begin(), reduces_->completion_order().end());
  order.resize(reduces_->reduced_unit_num(), 0);
  const std::size_t order_bytes = order.size() * sizeof(std::uint32_t);
  const RankReport header{steps_tried_, reduces_->window_backwards()};
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
    const CommunicationClock::Scope timed(clock_);
    std::exchange(reports_.work, nullptr)->wait();
  }
  RankReport header;
  std::memcpy(&header, reports_.mine.data(), sizeof(header));
  for (int other = 0; other < world_size(); ++other) {
    RankReport report;
    std::memcpy(&report, reports_.all.data() + static_cast<std::size_t>(other) * reports_.mine.size(), sizeof(report));
    if (report.steps_tried == header.steps_tried && report.window_backwards == header.window_backwards) continue;
    const std::string reason =
        "rank " + std::to_string(other) + " brings gradients of " + std::to_string(report.window_backwards) +
        " backwards to its step " + std::to_string(report.steps_tried + 1) + " and rank " + std::to_string(rank()) +
        " of " + std::to_string(header.window_backwards) + " to its step " + std::to_string(header.steps_tried + 1) +
        "; a rank that lost its gradients to an exception cannot step with the others";
    reduce_communicator_->abort(reason);
    throw CommunicationError(reason, other);
  }
  std::vector<std::uint32_t> order((reports_.mine.size() - sizeof(header)) / sizeof(std::uint32_t));
  std::memcpy(order.data(), reports_.all.data() + sizeof(header), order.size() * sizeof(std::uint32_t));
  reduces_->adopt_order(std::vector<std::size_t>(order.begin(), order.end()));
}

// Puts the norm, the factor and the skip flag of this step into device memory, and on their way to the host.
void Engine::combine_norm() {
  Communicator& communicator = *reduce_communicator_;
  const Lane lane = communicator.lane();
  if (world_size() > 1) {
    const CommunicationClock::Scope timed(clock_);
    communicator
        .start_all_gather({.source = own_sums_,
                           .destination = all_sums_,
                           .shard_bytes = trainable_flats_.size() * sizeof(double),
                           .label = "gradient norm"})
        ->wait(lane);
  }
  auto* scalars = norm_.as<StepScalars>();
  device().combine_norm(lane, {.partial_sums = reinterpret_cast<const double*>(all_sums_.data()),
                               .rank_num = static_cast<std::size_t>(world_size()),
                               .flat_num = trainable_flats_.size(),
                               .divisor = static_cast<double>(world_size()) *
                                          static_cast<double>(reduces_->window_backwards()) * scaler_.scale(),
                               .clip = options_.clip,
                               .flat_sums = reinterpret_cast<double*>(scalars + 1),
                               .scalars = scalars});
  device().copy_to_pinned(lane, norm_on_host_.get(), norm_.data(), norm_.bytes());
  pending_ = {device().mark(lane), true};
}

// Learns how the last step ended.
void Engine::settle_step() {
  if (!pending_.is_pending) return;
  device().synchronize(pending_.arrived);
  pending_ = {};
  check_communicators();
  StepScalars scalars;
  std::memcpy(&scalars, norm_on_host_.get(), sizeof(scalars));
  outcome_ = {.applied = scalars.is_skipped == 0, .grad_norm = scalars.norm};
  if (outcome_.applied) {
    ++steps_applied_;
    scaler_.step_succeeded();
    return;
  }
  scaler_.step_overflowed();
  if (scaler_.enabled()) return;
  const auto* sums = reinterpret_cast<const double*>(norm_on_host_.get() + sizeof(scalars));
  std::size_t position = 0;
  for (const Unit& unit : units_) {
    for (const FlatBuffer& flat : unit.flats) {
      if (!flat.trainable || std::isfinite(sums[position++])) continue;
      throw NonFiniteGradientError("the gradient of unit '" + unit.name + "' is not finite in step " +
                                   std::to_string(steps_tried_) +
                                   "; nothing was updated. Lower the learning rate, clip gradients, or check the data");
    }
  }
}

void Engine::step(std::span<const AdamHyperparameters> groups) {
  enter([&] {
    ZB_EXPECT_STATE(!reduces_->in_backward() && !gathers_->in_pass(), "step() was called inside a forward or backward");
    ZB_EXPECT_STATE(std::none_of(units_.begin(), units_.end(), [](const Unit& unit) { return unit.pins > 0; }),
                    "step() was called inside engine.gather(); leave the block first");
    ZB_EXPECT_STATE(reduces_->window_backwards() > 0,
                    "step() was called without gradients; call engine.backward(loss) first (after an exception, "
                    "repeat forward and backward)");
    check_bindings();
    {
      const ScopeExit clear([this] {
        reduces_->clear_window();
        ++steps_tried_;
      });
      settle_step();
      exchange_reports();
      combine_norm();
      gathers_->release_all();
      update(groups);
    }
    if (!device().is_async()) settle_step();
  });
}

StepOutcome Engine::outcome() {
  return enter([&] {
    settle_step();
    return outcome_;
  });
}

double Engine::loss_scale() {
  if (!scaler_.enabled()) return scaler_.scale();
  return enter([&] {
    settle_step();
    return scaler_.scale();
  });
}

long Engine::steps_applied() {
  return enter([&] {
    settle_step();
    return steps_applied_;
  });
}

void Engine::set_compute_stream(void* stream) {
  const std::lock_guard lock(mutex_);
  device().set_compute_stream(stream);
}

// In the order of the next forward, so that its first units are there first.
void Engine::update(std::span<const AdamHyperparameters> groups) {
  std::vector<AdamScalars> rows;
  for (const AdamHyperparameters& group : groups) rows.push_back(make_adam_scalars(group, steps_applied_ + 1, 1.0F));
  const bool publishes = state_sharded() && !parameters_sharded();
  published_.clear();
  // Behind the norm; and behind all that reads the parameters that are about to change, the last step's gathers too of
  // units that were not used since.
  for (Unit& unit : units_) wait_published(unit);
  device().wait(update_lane(), pending_.arrived);
  device().wait(update_lane(), device().mark(Lane::kCompute));
  std::vector<Unit*> ready;
  std::size_t ready_bytes = 0;
  for (Unit& unit : units_) {
    update_unit(unit, rows);
    if (!publishes) continue;
    ready.push_back(&unit);
    ready_bytes += unit.gather_bytes;
    if (ready_bytes < options_.publish_bytes) continue;
    publish(ready);
    ready.clear();
    ready_bytes = 0;
  }
  if (!ready.empty()) publish(ready);
  // Where operations do not run beside the caller they are done here, and the next forward finds them done.
  if (!gather_communicator_->runs_in_background()) {
    const CommunicationClock::Scope timed(clock_);
    for (Unit& unit : units_) wait_published(unit);
  }
}

void Engine::update_unit(Unit& unit, std::span<const AdamScalars> rows) {
  const bool sharded = state_sharded();
  for (FlatBuffer& flat : unit.flats) {
    if (!flat.trainable) continue;
    store_->start_update(flat.store_shard,
                         {.lane = update_lane(),
                          .gradient = sharded ? flat.shard_gradients.data() : flat.full_gradients.data(),
                          .gradient_dtype = flat.reduce_dtype,
                          .parameters = sharded ? flat.shard_parameters.data() : flat.full_parameters.data(),
                          .rows = rows,
                          .step = norm_.as<StepScalars>()});
    store_->wait_update(flat.store_shard);
    if (parameters_sharded()) flat.updated = device().mark(update_lane());
  }
  if (sharded) unit.updated = device().mark(update_lane());
}

// Stages 1 and 2: every rank's updated shards of these units go to all ranks, in one group.
void Engine::publish(const std::vector<Unit*>& units) {
  Communicator& communicator = *gather_communicator_;
  const CommunicationClock::Scope timed(clock_);
  device().wait(communicator.lane(), device().mark(update_lane()));
  const CollectiveGroup group(communicator);
  for (Unit* unit : units) {
    for (const FlatBuffer& flat : unit->flats) {
      if (!flat.trainable) continue;
      unit->publishing.push_back(communicator.start_all_gather({.source = flat.shard_parameters,
                                                                .destination = flat.full_parameters,
                                                                .shard_bytes = flat.shard_parameter_bytes(),
                                                                .label = flat.label}));
      published_.push_back(unit->publishing.back());
    }
  }
}

void Engine::wait_published(Unit& unit) {
  device().wait(Lane::kCompute, std::exchange(unit.updated, nullptr));
  for (const WorkPtr& work : unit.publishing) work->wait();
  unit.publishing.clear();
}

void Engine::quiesce() noexcept {
  const std::lock_guard lock(mutex_);
  try {
    for (Unit& unit : units_) wait_published(unit);
    for (const WorkPtr& work : published_) work->wait_source_free();
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

CommunicationCounters Engine::counters() const {
  CommunicationCounters sum = gather_communicator_->counters();
  const CommunicationCounters& other = reduce_communicator_->counters();
  for (std::size_t i = 0; i < kCollectiveNum; ++i) {
    sum.calls[i] += other.calls[i];
    sum.bytes[i] += other.bytes[i];
  }
  return sum;
}

void Engine::reset_counters() {
  const std::lock_guard lock(mutex_);
  gather_communicator_->reset_counters();
  reduce_communicator_->reset_counters();
  clock_.reset();
  ledger_.reset_peaks();
}

// One communicator may notice what the other has yet to find out, and the peers wait on either.
void Engine::fail(const CommunicationError& error) noexcept {
  failure_ = error;
  abort(error.what());
}

void Engine::abort(const std::string& reason) noexcept {
  gather_communicator_->abort(reason);
  reduce_communicator_->abort(reason);
}

}  // namespace zb
