// How one unit is gathered and released, and explicit gathers.
#include <algorithm>
#include <exception>
#include <utility>

#include "common/error.h"
#include "zero/gather_scheduler.h"

namespace zb {

// Whether the unit's gather would not have to wait for the store.
bool GatherScheduler::is_issued(const Unit& unit) const {
  return std::all_of(unit.flats.begin(), unit.flats.end(),
                     [&](const FlatBuffer& flat) { return !flat.is_stored() || store_.is_issued(flat.store_shard); });
}

// See [Note: staging shards]. Null where nothing of the unit is fetched.
GatherScheduler::StagingShard* GatherScheduler::fetch(const Unit& unit) {
  if (unit.fetch_bytes == 0) return nullptr;
  StagingClass& size_class = staging_.at(unit.fetch_bytes);
  StagingShard& staging = size_class.shards[size_class.turn++ % size_class.shards.size()];
  for (const WorkPtr& work : staging.readers) work->wait_source_free(communicator_.lane());
  staging.readers.clear();
  for (const FlatBuffer& flat : unit.flats) {
    if (!flat.is_fetched) continue;
    const CommunicationClock::Pause updating(clock_);
    store_.fetch_parameters(flat.store_shard, communicator_.lane(), staging.region.data() + flat.fetch_offset_bytes);
  }
  return &staging;
}

bool GatherScheduler::all_final(const Unit& unit) const {
  const auto is_final = [](const FlatBuffer& flat) { return flat.is_final; };
  return tracks_final_shards() && std::all_of(unit.flats.begin(), unit.flats.end(), is_final);
}

bool GatherScheduler::lacks_own_parts(const Unit& unit, bool spliced) {
  return std::any_of(unit.flats.begin(), unit.flats.end(),
                     [&](const FlatBuffer& flat) { return lacks_own_part(flat, spliced); });
}

SlotLease GatherScheduler::take_slot(std::size_t unit_index, bool spliced) {
  const Unit& unit = units_[unit_index];
  const bool copies = all_final(unit) && lacks_own_parts(unit, spliced);
  return slots_.take(unit_index, spliced, copies ? own_part_lane_of(unit) : std::nullopt);
}

std::optional<Lane> GatherScheduler::own_part_lane_of(const Unit& unit) const {
  const std::size_t bytes = unit.gather_bytes / static_cast<std::size_t>(communicator_.world_size());
  return bytes >= options_.own_part_beside_bytes ? options_.own_part_lane : std::nullopt;
}

void GatherScheduler::copy_own_parts(const Unit& unit, const Destinations& into, Lane lane) {
  const auto rank = static_cast<std::size_t>(communicator_.rank());
  for (std::size_t index = 0; index < unit.flats.size(); ++index) {
    const FlatBuffer& flat = unit.flats[index];
    if (!lacks_own_part(flat, into.spliced)) continue;
    const std::size_t bytes = flat.shard_parameter_bytes();
    device_.copy(lane, into.regions[index].data() + rank * bytes, flat.shard_parameters.data(), bytes);
  }
}

void GatherScheduler::wait_own_parts(Unit& unit) {
  if (std::exchange(unit.lacks_own_parts, false)) copy_own_parts(unit, destinations_of(unit), Lane::kCompute);
  if (unit.own_parts_copied == nullptr) return;
  while (!own_parts_.empty() && device_.has_passed(own_parts_.front().copied)) own_parts_.pop_front();
  own_parts_.push_back({device_.mark(Lane::kCompute), std::exchange(unit.own_parts_copied, nullptr)});
  device_.wait(Lane::kCompute, own_parts_.back().copied);
}

bool GatherScheduler::awaits_own_part() {
  while (!own_parts_.empty() && device_.has_passed(own_parts_.front().copied)) own_parts_.pop_front();
  return !own_parts_.empty() && device_.has_passed(own_parts_.front().awaited);
}

std::vector<WorkPtr> GatherScheduler::start_into(Unit& unit, const Destinations& into) {
  const RangeScope range(device_, unit.ranges.gather.c_str());
  std::vector<WorkPtr> works;
  const bool is_final = all_final(unit);
  if (is_final) {
    for (const FlatBuffer& flat : unit.flats) device_.wait(communicator_.lane(), flat.final_after);
  }
  if (is_final && lacks_own_parts(unit, into.spliced)) {
    const std::optional<Lane> beside = own_part_lane_of(unit);
    unit.lacks_own_parts = !beside;
    if (beside) {
      for (const FlatBuffer& flat : unit.flats) device_.wait(*beside, flat.final_after);
      copy_own_parts(unit, into, *beside);
      unit.own_parts_copied = device_.mark(*beside);
    }
  }
  StagingShard* const staging = fetch(unit);
  for (FlatBuffer& flat : unit.flats) {
    device_.wait(communicator_.lane(), std::exchange(flat.written, nullptr));
    const CommunicationClock::Pause updating(clock_);
    if (flat.trainable) store_.wait_update(flat.store_shard, communicator_.lane());
  }
  {
    const CollectiveGroup group(communicator_);
    for (std::size_t index = 0; index < unit.flats.size(); ++index) {
      const FlatBuffer& flat = unit.flats[index];
      works.push_back(communicator_.start_all_gather(
          {.source = flat.is_fetched ? staging->region.at(flat.fetch_offset_bytes) : flat.shard_parameters,
           .destination = into.regions[index],
           .shard_bytes = flat.shard_parameter_bytes(),
           .label = flat.label,
           .is_final = is_final,
           .holds_own_part = !lacks_own_part(flat, into.spliced)}));
      if (flat.is_fetched) staging->readers.push_back(works.back());
    }
  }
  if (tracks_final_shards() && !is_final) {
    const MarkPtr gathered = device_.mark(communicator_.lane());
    for (FlatBuffer& flat : unit.flats) {
      flat.is_final = !flat.is_fetched;
      flat.final_after = gathered;
    }
  }
  if (options_.keep_reads) unit.reads = works;
  return works;
}

void GatherScheduler::start_gather(std::size_t unit_index, bool spliced) {
  Unit& unit = units_[unit_index];
  if (present(unit_index)) {  // kept from before: the others still need this rank's part
    serve(unit_index);
    return;
  }
  // Any of it may fail for want of memory, and then the unit is as it was.
  SlotLease slot = take_slot(unit_index, spliced && unit.is_spliced());
  std::vector<Region> regions = slots_.destinations(slot, unit_index);
  unit.gathering = start_into(unit, {regions, slot.is_spliced()});
  unit.gather_slot = std::move(slot);
  unit.gathered = std::move(regions);
  unit.set_parameter_state(ParameterState::kGathering);
}

void GatherScheduler::serve(std::size_t unit_index) {
  Unit& unit = units_[unit_index];
  if (all_final(unit)) return;
  // An unsharded unit receives the bytes that it already holds, but for those that a user is changing.
  const bool holds = unit.parameter_state == ParameterState::kUnsharded && unit.pins == 0;
  if (holds) {
    const MarkPtr read = device_.mark(Lane::kCompute);  // until then they may be read there
    device_.wait(communicator_.lane(), read);
    wait_works(unit, start_into(unit, destinations_of(unit)));
    return;
  }
  const SlotLease scratch = take_slot(unit_index, unit.is_spliced());
  const std::vector<Region> regions = slots_.destinations(scratch, unit_index);
  wait_works(unit, start_into(unit, {regions, scratch.is_spliced()}));
}

void GatherScheduler::wait_gather(std::size_t unit_index) {
  Unit& unit = units_[unit_index];
  if (unit.parameter_state != ParameterState::kGathering) return;
  wait_works(unit, unit.gathering);
  unit.gathering.clear();
  wait_own_parts(unit);
  if (!is_intact(unit)) return drop_gathered(unit);
  unit.set_parameter_state(ParameterState::kUnsharded);
  attach(unit_index);
}

bool GatherScheduler::is_intact(const Unit& unit) const {
  return std::all_of(unit.flats.begin(), unit.flats.end(), [&](const FlatBuffer& flat) {
    return std::all_of(flat.parameters.begin(), flat.parameters.end(),
                       [&](std::size_t index) { return parameters_[index].binding->intact(); });
  });
}

// Of a unit that was gathered.
void GatherScheduler::expect_intact(const Unit& unit) const {
  if (unit.parameter_state == ParameterState::kUnsharded) return;
  for (const FlatBuffer& flat : unit.flats) {
    for (const std::size_t index : flat.parameters) check_intact(parameters_[index]);
  }
}

void GatherScheduler::wait_works(const Unit& unit, std::span<const WorkPtr> works) {
  const RangeScope range(device_, unit.ranges.wait_for_gather.c_str());
  for (const WorkPtr& work : works) work->wait();
}

void GatherScheduler::attach(std::size_t unit_index) {
  Unit& unit = units_[unit_index];
  for (std::size_t position = 0; position < unit.flats.size(); ++position) {
    const FlatBuffer& flat = unit.flats[position];
    std::byte* const base = unit.gathered[position].data();
    for (const std::size_t index : flat.parameters) {
      const Parameter& parameter = parameters_[index];
      parameter.binding->attach(base + parameter.offset_numel * dtype_bytes(flat.param_dtype));
    }
  }
}

void GatherScheduler::gather(const std::vector<std::size_t>& units) {
  try {
    for (const std::size_t unit : units) {
      const bool is_needed = leave_spliced_slot(unit);
      start_gather(unit, false);
      units_[unit].needed_for_backward = is_needed;
    }
    for (const std::size_t unit : units) wait_gather(unit);
  } catch (...) {
    for (const std::size_t unit : units) drop_gather(units_[unit]);
    throw;
  }
}

void GatherScheduler::pin(const std::vector<std::size_t>& units) {
  for (const std::size_t unit : units) {
    if (options_.sharded) expect_intact(units_[unit]);
  }
  for (const std::size_t unit : units) ++units_[unit].pins;
}

// There the shard itself would be changed. Returns whether a backward needs the unit that is gathered anew.
bool GatherScheduler::leave_spliced_slot(std::size_t unit_index) {
  const Unit& unit = units_[unit_index];
  const bool is_needed = unit.needed_for_backward;
  if (unit.gather_slot.is_spliced()) release(unit_index);
  return is_needed;
}

// Ends a gather that nobody will use.
void GatherScheduler::drop_gather(Unit& unit) noexcept {
  if (unit.parameter_state != ParameterState::kGathering) return;
  try {
    wait_works(unit, unit.gathering);
    wait_own_parts(unit);
  } catch (const std::exception&) {
    // The communicator has failed, and the engine ends with it.
  }
  drop_gathered(unit);
}

void GatherScheduler::drop_gathered(Unit& unit) noexcept {
  unit.gathering.clear();
  unit.gathered.clear();
  unit.gather_slot.reset();
  unit.parameter_state.reset();
}

void GatherScheduler::unpin(const std::vector<std::size_t>& units) {
  for (const std::size_t unit : units) {
    --units_[unit].pins;
    if (!units_[unit].needed_for_backward) release(unit);
  }
  slots_.drop_spares();  // a whole model's, perhaps
}

void GatherScheduler::release(std::size_t unit_index) {
  Unit& unit = units_[unit_index];
  if (!options_.sharded || unit.pins > 0 || unit.parameter_state != ParameterState::kUnsharded) return;
  for (const FlatBuffer& flat : unit.flats) {
    for (const std::size_t index : flat.parameters)
      parameters_[index].binding->detach(parameters_[index].sharded_message);
  }
  unit.gathered.clear();
  unit.gather_slot.reset();
  unit.needed_for_backward = false;
  unit.set_parameter_state(ParameterState::kSharded);
}

void GatherScheduler::release_all() {
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    units_[unit].needed_for_backward = false;
    release(unit);
  }
}

}  // namespace zb
