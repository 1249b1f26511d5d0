// Full states and explicit gathers: the parts of Engine that look at whole parameters outside of training.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "common/error.h"
#include "common/scope_exit.h"
#include "kernels/cpu_kernels.h"
#include "kernels/drain.h"
#include "zero/engine.h"

namespace zb {
namespace {

StateKind state_kind(FullState kind) {
  switch (kind) {
    case FullState::kExpAvg:
      return StateKind::kExpAvg;
    case FullState::kExpAvgSq:
      return StateKind::kExpAvgSq;
    case FullState::kParameters:
    case FullState::kMaster:
      break;
  }
  return StateKind::kMaster;
}

}  // namespace

void Engine::read_full_state(FullState kind, const VisitState& visit) {
  enter([&] {
    expect_no_updates();
    finish_updates();
    if (!state_sharded()) return assemble_full_state(kind, visit);  // every rank for itself
    or_abort([&] { assemble_full_state(kind, visit); });
  });
}

void Engine::assemble_full_state(FullState kind, const VisitState& visit) {
  Communicator& communicator = *reduce_communicator_;
  std::vector<float> on_host;
  for (const Unit& unit : units_) {
    for (const FlatBuffer& flat : unit.flats) {
      const FlatLayout& layout = flat.layout;
      const bool moments = kind == FullState::kExpAvg || kind == FullState::kExpAvgSq;
      if (moments && !flat.trainable) continue;
      // Parameters of which the store keeps none, and frozen ones, are their own masters.
      const bool from_store =
          moments || (kind == FullState::kMaster && flat.trainable && store_->keeps_master(flat.param_dtype));
      const bool sharded = from_store ? state_sharded() : parameters_sharded();
      const std::size_t own_numel = sharded ? layout.shard_numel() : layout.padded_numel();
      Region own{communicator.allocate(own_numel * sizeof(float), sharded ? BufferRole::kShared : BufferRole::kPrivate,
                                       &ledger_, Category::kStaging)};
      Region full = own;
      const Drain drain(device());
      const std::span<float> own_values(reinterpret_cast<float*>(own.data()), own_numel);
      if (from_store) {
        store_->read_state(flat.store_shard, state_kind(kind), own_values);
      } else {
        read_own_parameters(flat, own_values);
      }
      if (sharded) {
        full = {communicator.allocate(layout.padded_numel() * sizeof(float), BufferRole::kPrivate, &ledger_,
                                      Category::kStaging)};
        device().wait(communicator.lane(), device().mark(Lane::kCompute));
        const WorkPtr work = communicator.start_all_gather(
            {.source = own, .destination = full, .shard_bytes = own_numel * sizeof(float), .label = flat.label});
        work->wait();
        work->wait_source_free();
      }
      if (!visit) {  // this rank only gives its shard
        device().synchronize();
        check_communicators();
        continue;
      }
      on_host.resize(layout.padded_numel());
      device().download(on_host.data(), full.data(), on_host.size() * sizeof(float));
      check_communicators();
      for (const std::size_t index : flat.parameters) {
        visit(index, on_host.data() + parameters_[index].offset_numel);
      }
    }
  }
}

// This rank's piece, or all where parameters are replicated.
void Engine::read_own_parameters(const FlatBuffer& flat, std::span<float> values) {
  const auto cast_from = [&](const std::byte* parameters) {
    device().cast(Lane::kCompute, values.data(), DType::kFloat32, parameters, flat.param_dtype, values.size());
  };
  if (!flat.is_fetched) {
    cast_from((parameters_sharded() ? flat.shard_parameters : flat.full_parameters).data());
    return;
  }
  const DeviceBuffer fetched(device(), flat.shard_parameter_bytes(), &ledger_, Category::kStaging);
  const Drain drain(device());
  store_->fetch_parameters(flat.store_shard, Lane::kCompute, fetched.data());
  cast_from(fetched.data());
}

double Engine::place_state(double fitting_share) {
  // Thousandths: what is left of one is little, and the share is readable.
  constexpr double kSteps = 1000.0;
  return enter([&] {
    std::vector<double> all(static_cast<std::size_t>(world_size()));
    go_on();
    reduce_communicator_->exchange(std::as_bytes(std::span(&fitting_share, 1)), std::as_writable_bytes(std::span(all)),
                                   "what fits on the device");
    const double fitting = std::clamp(*std::min_element(all.begin(), all.end()), 0.0, 1.0);
    const double share = 1.0 - std::floor(fitting * kSteps) / kSteps;
    or_abort([&] {
      store_->choose_share(share);
      if (world_size() > 1) reduce_communicator_->barrier("the store's memory");
      store_->take_share();
    });
    return share;
  });
}

// Every rank's updates and reads of parameters end, and what they were for is forgotten.
void Engine::drop_everything_under_way() {
  finish_reports();
  drop_offers();
  finish_updates();
  gathers_->release_all();
  for (const WorkPtr& work : published_) work->wait_source_free();
  published_.clear();
  for (Unit& unit : units_) {
    for (const WorkPtr& work : unit.reads) work->wait_source_free();
    unit.reads.clear();
  }
  device().synchronize();
  pending_ = {};
  held_in_step_.clear();
  backward_updates_.updated.clear();
}

void Engine::write_full_state(const FullStateFacts& facts, std::vector<std::int64_t> held_steps,
                              const ReadState& read) {
  enter_torn([&] {
    if (is_torn_ && !reduces_->in_backward()) {  // of a backward whose step was refused
      backward_updates_.is_on = false;
      reduces_->clear_window();
    }
    expect_no_updates();
    ZB_EXPECT_STATE(!reduces_->in_backward() && !gathers_->in_pass() && reduces_->window_backwards() == 0,
                    "a state was loaded between a forward and its step; load it between steps");
    expect_not_gathered("a state was loaded");
    ZB_EXPECT(!facts.loss_scale || (scaler_.enabled() && std::isfinite(facts.loss_scale->scale) &&
                                    facts.loss_scale->scale > 0.0 && facts.loss_scale->good_steps >= 0),
              "the loss scale cannot be loaded: it must be a positive number with a count of steps of at least 0, and "
              "the engine must scale its loss");
    try {
      if (scaler_.enabled()) wait_step();  // the scale stays where none is given
    } catch (const NonFiniteGradientError&) {
      // Of a step that this state takes the place of.
    }
    is_torn_ = true;  // until all of it is there
    or_abort([&] { take_full_state(facts, std::move(held_steps), read); });
    is_torn_ = false;
  });
}

void Engine::take_full_state(FullStateFacts facts, std::vector<std::int64_t> held_steps, const ReadState& read) {
  static_assert(std::is_trivially_copyable_v<FullStateFacts>);
  held_steps.resize(parameters_.size(), 0);
  drop_everything_under_way();
  store_->expect_states();
  if (world_size() > 1) reduce_communicator_->barrier("the store's memory");
  broadcast_bytes(reinterpret_cast<std::byte*>(&facts), sizeof(facts));
  broadcast_bytes(reinterpret_cast<std::byte*>(held_steps.data()), held_steps.size() * sizeof(std::int64_t));
  std::vector<float> on_host;
  for (Unit& unit : units_) {
    for (FlatBuffer& flat : unit.flats) {
      for (const FullState kind : {FullState::kMaster, FullState::kExpAvg, FullState::kExpAvgSq}) {
        if (kind != FullState::kMaster && !flat.trainable) continue;
        on_host.assign(flat.layout.padded_numel(), 0.0F);
        for (const std::size_t index : flat.parameters) {
          if (rank() == 0) read(kind, index, on_host.data() + parameters_[index].offset_numel);
        }
        write_flat(flat, kind, on_host);
      }
    }
  }
  check_communicators();
  steps_applied_ = steps_tried_ = facts.steps_applied;
  if (facts.loss_scale) scaler_.restore(*facts.loss_scale);
  has_own_steps_ = false;
  for (std::size_t index = 0; index < parameters_.size(); ++index) {
    parameters_[index].held_steps = held_steps[index];
    has_own_steps_ = has_own_steps_ || held_steps[index] > 0;
  }
  for (FlatBuffer* flat : trainable_flats_) flat->update_segments.reset();
  outcome_ = {};
}

// One kind of state from rank 0's memory to where it lives.
void Engine::write_flat(FlatBuffer& flat, FullState kind, std::span<const float> on_host) {
  Communicator& communicator = *reduce_communicator_;
  const bool several = world_size() > 1;
  const Region full{communicator.allocate(on_host.size_bytes(), several ? BufferRole::kShared : BufferRole::kPrivate,
                                          &ledger_, Category::kStaging)};
  const Drain drain(device());
  if (rank() == 0) device().upload(full.data(), on_host.data(), on_host.size_bytes());
  WorkPtr work;
  if (several) {
    work =
        communicator.start_broadcast({.buffer = full, .bytes = on_host.size_bytes(), .root = 0, .label = flat.label});
    work->wait();
  }
  const auto* values = reinterpret_cast<const float*>(full.data());
  const std::size_t shard_begin = static_cast<std::size_t>(rank()) * flat.layout.shard_numel();
  if (kind == FullState::kMaster && parameters_sharded() && !flat.is_fetched) {
    device().cast(Lane::kCompute, flat.shard_parameters.data(), flat.param_dtype, values + shard_begin, DType::kFloat32,
                  flat.layout.shard_numel());
    flat.is_final = false;
    flat.written = device().mark(Lane::kCompute);
  } else if (kind == FullState::kMaster && !parameters_sharded()) {
    device().cast(Lane::kCompute, flat.full_parameters.data(), flat.param_dtype, values, DType::kFloat32,
                  flat.layout.padded_numel());
  }
  if (kind != FullState::kMaster || flat.is_fetched || (flat.trainable && store_->keeps_master(flat.param_dtype))) {
    const std::span<const float> all(values, flat.layout.padded_numel());
    store_->write_state(flat.store_shard, state_kind(kind),
                        state_sharded() ? all.subspan(shard_begin, flat.layout.shard_numel()) : all);
  }
  if (work) work->wait_source_free();
}

void Engine::exchange(std::span<const std::byte> mine, std::span<std::byte> all) {
  enter_torn([&] {
    go_on();
    reduce_communicator_->exchange(mine, all, "messages");
  });
}

void Engine::broadcast(std::byte* data, std::size_t bytes) {
  enter([&] { or_abort([&] { broadcast_bytes(data, bytes); }); });
}

void Engine::broadcast_bytes(std::byte* data, std::size_t bytes) {
  if (world_size() == 1 || bytes == 0) return;
  Communicator& communicator = *reduce_communicator_;
  const Region values{communicator.allocate(bytes, BufferRole::kShared, &ledger_, Category::kStaging)};
  const Drain drain(device());
  if (rank() == 0) device().upload(values.data(), data, bytes);
  const WorkPtr work = communicator.start_broadcast({.buffer = values, .bytes = bytes, .root = 0, .label = "buffer"});
  work->wait();
  if (rank() != 0) device().download(data, values.data(), bytes);
  check_communicators();
  work->wait_source_free();
}

bool Engine::try_wait_updates() {
  return enter([&] {
    if (backward_updates_.is_on) return false;
    if (parameters_sharded() || !is_updating() || gathers_->in_pass()) return true;  // in a pass units wait themselves
    if (publishes() && unpublished_ < units_.size()) return false;
    finish_updates();
    return true;
  });
}

// Where parameters are not sharded the caller changes them in place, and their masters could not be told any more.
void Engine::remember_parameters(Unit& unit) {
  for (FlatBuffer& flat : unit.flats) {
    if (!has_remainders(flat) || flat.remembered_parameters.bytes() > 0) continue;
    const Region parameters = updated_parameters(flat);
    const std::size_t bytes = state_sharded() ? flat.shard_parameter_bytes() : flat.full_parameter_bytes();
    flat.remembered_parameters = DeviceBuffer(device(), bytes, &ledger_, Category::kStaging);
    device().copy(Lane::kCompute, flat.remembered_parameters.data(), parameters.data(), bytes);
  }
}

// Undoes changes of this rank's piece that were not written back, as the next step does where masters are whole. A
// device that fails here fails whatever is called next, too.
void Engine::restore_parameters(Unit& unit) noexcept {
  for (FlatBuffer& flat : unit.flats) {
    if (flat.remembered_parameters.bytes() == 0) continue;
    try {
      const DeviceBuffer remembered = std::exchange(flat.remembered_parameters, {});
      const Drain drain(device());
      device().copy(Lane::kCompute, updated_parameters(flat).data(), remembered.data(), remembered.bytes());
    } catch (const std::exception&) {
    }
  }
}

void Engine::gather(const std::vector<std::size_t>& units, bool may_change) {
  enter([&] {
    expect_no_updates();
    ZB_EXPECT_STATE(!gathers_->in_pass(),
                    "engine.gather() cannot be called inside a " + std::string(pass_kind_name(gathers_->pass_kind())));
    go_on();
    finish_updates();
  });
  quiesce();  // the caller may write
  enter([&] {
    if (parameters_sharded()) or_abort([&] { gathers_->gather(units); });
    if (may_change && options_.store_param_remainders && !parameters_sharded()) {
      or_abort([&] {
        for (const std::size_t unit : units) remember_parameters(units_[unit]);
      });
    }
    gathers_->pin(units);
  });
}

void Engine::end_gather(const std::vector<std::size_t>& units, int modifier_rank) {
  enter([&] {
    ZB_EXPECT(modifier_rank < world_size(), "modifier_rank " + std::to_string(modifier_rank) +
                                                " is not below the world size " + std::to_string(world_size()));
    const ScopeExit at_exit([&] {
      gathers_->unpin(units);
      for (const std::size_t unit : units) {
        if (units_[unit].pins == 0) restore_parameters(units_[unit]);
      }
    });
    if (modifier_rank >= 0) {
      or_abort([&] {
        for (const std::size_t unit : units) write_back(units_[unit], modifier_rank);
      });
    }
    if (device().is_async()) check_communicators();  // what the host has read in the block may come of aborted lanes
  });
}

void Engine::write_back(Unit& unit, int modifier_rank) {
  Communicator& communicator = *reduce_communicator_;
  for (std::size_t index = 0; index < unit.flats.size(); ++index) {
    FlatBuffer& flat = unit.flats[index];
    const std::size_t bytes = flat.full_parameter_bytes();
    std::byte* current = (parameters_sharded() ? unit.gathered[index] : flat.full_parameters).data();
    if (world_size() == 1) {
      write_back_flat(flat, current);
      continue;
    }
    const Region values{communicator.allocate(bytes, BufferRole::kShared, &ledger_, Category::kStaging)};
    const Drain drain(device());
    if (rank() == modifier_rank) device().copy(Lane::kCompute, values.data(), current, bytes);
    device().wait(communicator.lane(), device().mark(Lane::kCompute));
    const WorkPtr work =
        communicator.start_broadcast({.buffer = values, .bytes = bytes, .root = modifier_rank, .label = flat.label});
    work->wait();
    device().copy(Lane::kCompute, current, values.data(), bytes);
    write_back_flat(flat, values.data());
    work->wait_source_free();
  }
}

// Gives this rank's piece of frozen parameters that the store keeps new values.
void Engine::write_frozen(const FlatBuffer& flat, const std::byte* values) {
  const std::size_t numel = flat.layout.shard_numel();
  const DeviceBuffer floats(device(), numel * sizeof(float), &ledger_, Category::kStaging);
  const Drain drain(device());
  device().cast(Lane::kCompute, floats.data(), DType::kFloat32, values, flat.param_dtype, numel);
  store_->write_state(flat.store_shard, StateKind::kMaster, {floats.as<float>(), numel});
}

// Brings shard and master up to new full values: both, or where memory is short neither. A master whose rounding
// already equals the new value keeps its bits.
void Engine::write_back_flat(FlatBuffer& flat, const std::byte* values) {
  const std::size_t element_bytes = dtype_bytes(flat.param_dtype);
  const std::size_t shard_begin = static_cast<std::size_t>(rank()) * flat.layout.shard_numel();
  const bool has_master = flat.trainable && store_->keeps_master(flat.param_dtype);
  const std::size_t kept_numel = state_sharded() ? flat.layout.shard_numel() : flat.layout.padded_numel();
  const std::size_t numel = has_master ? kept_numel : 0;
  const DeviceBuffer state(device(), numel * sizeof(float), &ledger_, Category::kStaging);
  const DeviceBuffer rounded(device(), numel * element_bytes, &ledger_, Category::kStaging);
  std::vector<float> master(numel);
  std::vector<std::byte> before(numel * element_bytes);
  std::vector<std::byte> fresh(numel * element_bytes);
  const Drain drain(device());
  const auto write_shard = [&] {
    if (!parameters_sharded() || (flat.is_fetched && flat.trainable)) return;
    if (flat.is_fetched) return write_frozen(flat, values + shard_begin * element_bytes);
    device().copy(Lane::kCompute, flat.shard_parameters.data(), values + shard_begin * element_bytes,
                  flat.shard_parameter_bytes());
    flat.is_final = false;
    flat.written = device().mark(Lane::kCompute);
  };
  if (!has_master) return write_shard();
  const DeviceBuffer& remembered = flat.remembered_parameters;
  const std::byte* const own_values = values + (state_sharded() ? shard_begin : 0) * element_bytes;
  device().download(fresh.data(), own_values, fresh.size());
  if (remembered.bytes() > 0) {
    device().copy(Lane::kCompute, updated_parameters(flat).data(), remembered.data(), remembered.bytes());
  }
  store_->read_state(flat.store_shard, StateKind::kMaster, {state.as<float>(), numel});
  if (remembered.bytes() > 0) {
    device().upload(remembered.data(), fresh.data(), fresh.size());
    device().copy(Lane::kCompute, updated_parameters(flat).data(), remembered.data(), remembered.bytes());
  }
  write_shard();
  device().cast(Lane::kCompute, rounded.data(), flat.param_dtype, state.data(), DType::kFloat32, numel);
  device().download(master.data(), state.data(), numel * sizeof(float));
  device().download(before.data(), rounded.data(), before.size());
  for (std::size_t i = 0; i < numel; ++i) {
    if (std::memcmp(before.data() + i * element_bytes, fresh.data() + i * element_bytes, element_bytes) != 0) {
      cpu_kernels().cast(master.data() + i, DType::kFloat32, fresh.data() + i * element_bytes, flat.param_dtype, 1);
    }
  }
  device().upload(state.data(), master.data(), numel * sizeof(float));
  store_->write_state(flat.store_shard, StateKind::kMaster, {state.as<float>(), numel});
}

}  // namespace zb
