// What an engine makes once: flat buffers from rank 0's values, the store's shards, and memory for the norm.
#include <algorithm>
#include <utility>

#include "common/error.h"
#include "kernels/drain.h"
#include "zero/engine.h"

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
      policy_(stage_policy(options.stage, reduce_communicator_->world_size(), options.parameters_away)),
      parts_(std::move(parts)),
      scaler_(options.loss_scale) {
  enter([&] { or_abort([&] { build(model); }); });
}

void Engine::build(EngineModel& model) {
  const EngineOptions& options = options_;
  store_ = options.make_store(&ledger_, parts_);
  store_->set_timeline(&timeline_);
  ZB_EXPECT(options.accumulation_steps >= 1,
            "gradient_accumulation_steps must be at least 1, got " + std::to_string(options.accumulation_steps));
  ZB_EXPECT(!options.optimizer_in_backward || (options.clip == 0.0 && !options.loss_scale.enabled),
            "optimizer_in_backward updates before the norm is known: it cannot clip gradients or scale the loss");
  ZB_EXPECT(model.bindings.size() == model.parameters.size(), "every parameter needs a binding");
  // A rank that blocks in one of the two still serves its peers in the other.
  gather_communicator_->serve_while_blocked(*reduce_communicator_);
  reduce_communicator_->serve_while_blocked(*gather_communicator_);
  for (const ParameterSpec& spec : model.parameters) {
    if (spec.trainable) param_group_num_ = std::max(param_group_num_, static_cast<std::size_t>(spec.param_group) + 1);
  }
  if (policy_.gradients != GradientPlacement::kShardedEachMicroBatch) {
    // What persists in full is accumulated before it is reduced, and reduced as it is.
    for (ParameterSpec& spec : model.parameters) spec.reduce_dtype = spec.accumulate_dtype.value_or(spec.reduce_dtype);
  }
  units_ = make_units(model.unit_names, model.root_unit, model.parameters, world_size(), parameters_);
  prefetch_bytes_ = options.default_prefetch ? largest_unit_bytes(units_) : options.prefetch_bytes;
  unpublished_ = units_.size();
  ZB_EXPECT(!options.store_param_remainders || store_->takes_remainders(),
            "store_param_remainders needs the optimizer state on the device");
  ZB_EXPECT(!options.store_param_remainders || !parameters_sharded() || options.keep_parameter_shards,
            "store_param_remainders needs the shards of parameters to be kept");
  if (parameters_sharded() && !options.keep_parameter_shards) {
    const auto is_kept = [this](const FlatBuffer& flat) {
      return flat.trainable ? store_->keeps_master(flat.param_dtype) : store_->keeps_frozen();
    };
    for (Unit& unit : units_) unit.fetch_parameters_of(is_kept);
  }
  if (parameters_sharded() && gather_communicator_->splices() && !options.optimizer_in_backward) {
    for (Unit& unit : units_) unit.splice_parameters(options.splice_bytes);
  }
  gathers_ =
      std::make_unique<GatherScheduler>(device(), *gather_communicator_, *store_, &ledger_, units_, parameters_, clock_,
                                        GatherOptions{.sharded = parameters_sharded(),
                                                      .reshard = options.reshard_after_forward,
                                                      .keep_root_bytes = options.keep_root_bytes,
                                                      .prefetch_bytes = prefetch_bytes_,
                                                      .keep_reads = options.optimizer_in_backward,
                                                      .own_part_lane = own_part_lane(),
                                                      .own_part_beside_bytes = options.own_part_beside_bytes});
  reduces_ = std::make_unique<ReduceScheduler>(
      device(), *reduce_communicator_, &ledger_, units_, parameters_, clock_,
      ReduceOptions{.placement = policy_.gradients,
                    .push_bytes = options.push_gradient_bytes,
                    .in_place = leaves_gradients_in_place(),
                    .sums_together = leaves_gradients_in_place() && !options.optimizer_in_backward},
      ReduceEvents{.before = [this](Unit& unit) { make_gradient_shards(unit); },
                   .reduced = [this](Unit& unit) { on_reduced(unit); },
                   .gathers_meet = [this] { return gathers_->meets(); },
                   .is_compute_waiting = [this] { return gathers_->awaits_own_part(); }});
  reserve_store();
  for (Unit& unit : units_) build_unit(unit, model);
  build_norms();
  gathers_->reserve_slots();
  reduces_->reserve_slots(options.accumulation_steps);
  take_update_order();
}

Engine::~Engine() {
  {
    const Drain drain(device());
  }
  store_.reset();  // ends what its threads have under way
  // Slots go with the engine; parameters must not point there any more, and units give theirs back before the pools go.
  for (Unit& unit : units_) {
    unguard(unit);
    unit.gathered.clear();
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
  const auto unit_index = static_cast<std::size_t>(&unit - units_.data());
  if (model.materialise) model.materialise(unit_index);
  std::string cure = "name a class whose forward holds that use in the configuration's units";
  if (unit_index < model.unit_cures.size() && !model.unit_cures[unit_index].empty()) {
    cure = model.unit_cures[unit_index];
  }
  for (FlatBuffer& flat : unit.flats) {
    for (const std::size_t index : flat.parameters) {
      parameters_[index].binding = std::move(model.bindings[index]);
      parameters_[index].sharded_message =
          "parameter '" + parameters_[index].name +
          "' is sharded (ZeRO stage 3): most of it is on other ranks now. Read or change it inside `with "
          "engine.gather():`. If a forward needs it without calling the module that holds it (module.forward(), or a "
          "use of its weight by another module), " +
          cure +
          ". If a backward needs it because of a tensor that no module returned, set reshard_after_forward to false";
      parameters_[index].updating_message =
          "parameter '" + parameters_[index].name +
          "' is being updated by the last step and cannot be read yet. Read it inside `with engine.gather():`, with "
          "engine.state_dict() or after the next forward, or set \"overlap_updates\": false in the configuration. If a "
          "forward reads it without calling the module that holds it (module.forward(), or a use of its weight by "
          "another module), name a class whose forward holds that read in the configuration's units";
    }
    build_flat(flat);
  }
  if (parameters_sharded()) unit.set_parameter_state(ParameterState::kSharded);
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

  if (parameters_sharded() && !flat.is_fetched) {
    flat.shard_parameters = {gather_communicator_->allocate(
        flat.shard_parameter_bytes(), flat.is_spliced ? BufferRole::kSharedAlone : BufferRole::kShared, &ledger_,
        Category::kParameters)};
    device().cast(Lane::kCompute, flat.shard_parameters.data(), flat.param_dtype, values + rank_offset, DType::kFloat32,
                  layout.shard_numel());
    flat.written = device().mark(Lane::kCompute);
  } else if (!parameters_sharded()) {
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
    // No gradients.
  } else if (makes_gradients_each_step()) {
    // Made when the unit is reduced.
  } else if (policy_.gradients == GradientPlacement::kShardedEachMicroBatch) {
    flat.shard_gradients = {
        communicator.allocate(flat.accumulated_shard_bytes(), BufferRole::kPrivate, &ledger_, Category::kGradients)};
  } else {
    flat.full_gradients = {communicator.allocate(flat.full_gradient_bytes(),
                                                 several ? BufferRole::kShared : BufferRole::kPrivate, &ledger_,
                                                 Category::kGradients)};
    flat.shard_gradients = flat.full_gradients.at(static_cast<std::size_t>(rank()) * flat.shard_gradient_bytes());
  }
  if (flat.is_stored()) {
    ShardSpec spec = shard_spec(flat);
    if (has_remainders(flat)) spec.parameters = updated_parameters(flat).data();
    const std::size_t first = state_sharded() ? rank_offset : 0;
    flat.store_shard = store_->add_shard(spec, std::span<const float>(values + first, spec.numel));
  }
  if (several) communicator.barrier(flat.label);  // nobody reads the broadcast's buffer any more
}

ShardSpec Engine::shard_spec(const FlatBuffer& flat) const {
  const FlatLayout& layout = flat.layout;
  ShardSpec spec{.numel = layout.padded_numel(),
                 .param_dtype = flat.param_dtype,
                 .gradient_dtype = flat.accumulate_dtype,
                 .segments = layout.segments(),
                 .unit = flat.label,
                 .is_frozen = !flat.trainable};
  if (state_sharded()) {
    const std::size_t begin = static_cast<std::size_t>(rank()) * layout.shard_numel();
    spec.numel = layout.shard_numel();
    spec.segments = layout.segments_within(begin, begin + layout.shard_numel());
  }
  return spec;
}

void Engine::reserve_store() {
  std::vector<ShardSpec> specs;
  for (const Unit& unit : units_) {
    for (const FlatBuffer& flat : unit.flats) {
      if (flat.is_stored()) specs.push_back(shard_spec(flat));
    }
  }
  store_->reserve(specs);
  if (world_size() > 1) reduce_communicator_->barrier("the store's memory");
}

void Engine::build_norms() {
  for (Unit& unit : units_) {
    for (FlatBuffer& flat : unit.flats) {
      if (flat.trainable) trainable_flats_.push_back(&flat);
    }
  }
  if (trainable_flats_.empty()) return;  // no step, no norm
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
  if (options_.optimizer_in_backward) {
    backward_updates_.scalars = DeviceBuffer(device(), sizeof(StepScalars), &ledger_, Category::kStaging);
    backward_updates_.scalars_on_host = device().allocate_pinned(sizeof(StepScalars));
  }
  auto* sums = reinterpret_cast<double*>(own_sums_.data());
  for (FlatBuffer* flat : trainable_flats_) flat->sum_of_squares = sums++;
}

}  // namespace zb
