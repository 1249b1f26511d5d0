#include "zero/gather_scheduler.h"

#include <algorithm>
#include <functional>
#include <map>
#include <utility>

#include "common/error.h"
#include "common/scope_exit.h"

namespace zb {
namespace {

// One unit in so many, those that a forward uses first, are gathered with a meeting of their own.
constexpr std::size_t kFirstUnitsShare = 4;

}  // namespace

GatherScheduler::GatherScheduler(Device& device, Communicator& communicator, Store& store, Ledger* ledger,
                                 std::vector<Unit>& units, std::vector<Parameter>& parameters,
                                 CommunicationClock& clock, const GatherOptions& options)
    : device_(device),
      communicator_(communicator),
      store_(store),
      clock_(clock),
      units_(units),
      parameters_(parameters),
      options_(options),
      ledger_(ledger),
      slots_(device, communicator, ledger, units) {}

void GatherScheduler::reserve_slots() {
  if (!options_.sharded) return;
  slots_.reserve(options_.prefetch_bytes, options_.reshard);
  reserve_staging();
}

// In a lane one shard is read before the next is fetched. Elsewhere peers read it when they come to wait for the unit:
// as many as units can be under way keep a rank from waiting for them.
void GatherScheduler::reserve_staging() {
  std::map<std::size_t, std::pair<std::size_t, std::size_t>> classes;  // units, and units under way at once
  for (const Unit& unit : units_) {
    if (unit.fetch_bytes == 0) continue;
    auto& [unit_num, ahead] = classes[unit.fetch_bytes];
    ++unit_num;
    ahead = communicator_.runs_in_background() ? 0 : std::max(ahead, options_.prefetch_bytes / unit.gather_bytes);
  }
  for (const auto& [bytes, numbers] : classes) {
    std::vector<StagingShard>& shards = staging_[bytes].shards;
    while (shards.size() < std::min(numbers.first, 1 + numbers.second)) {
      shards.push_back({{communicator_.allocate(bytes, BufferRole::kShared, ledger_, Category::kStaging)}, {}});
    }
  }
}

void GatherScheduler::begin_pass(PassKind kind) {
  ZB_EXPECT_STATE(!in_pass_, "a " + std::string(pass_kind_name(kind)) + " began inside a " +
                                 std::string(pass_kind_name(pass_.kind)) +
                                 "; a forward of the whole model cannot be nested");
  in_pass_ = true;
  pass_ = {.kind = kind, .number = pass_.number + 1, .gathered = {}};
  cursor_ = 0;
  forward_uses_.clear();
}

void GatherScheduler::use(std::size_t unit_index) {
  if (!options_.sharded) return;
  const CommunicationClock::Scope timed(clock_, "all-gather of parameters", units_[unit_index].name);
  Unit& unit = units_[unit_index];
  if (in_pass_ && pass_.kind != PassKind::kBackward) {
    forward_uses_.push_back(unit_index);
    if (forward_uses_.size() == sequence().size() / 2) halfway_ = device_.mark(Lane::kCompute);
  }
  if (unit.parameter_state == ParameterState::kUnsharded) {
    if (in_pass_) prefetch();
    return;
  }
  ZB_EXPECT_STATE(in_pass_,
                  "unit '" + unit.name +
                      "' was called outside a forward of the engine; call the engine itself, or wrap the call "
                      "in engine.gather()");
  if (unit.parameter_state == ParameterState::kSharded) {
    const std::vector<std::size_t>& order = sequence();
    const auto found = std::find(order.begin() + static_cast<std::ptrdiff_t>(cursor_), order.end(), unit_index);
    if (found == order.end()) {
      get_unexpected(unit_index);
      return;
    }
    start_through(static_cast<std::size_t>(found - order.begin()));
  }
  // Started by now, as prefetched work or just above: what lay before it in the sequence was skipped by this rank.
  const auto mine = std::find_if(prefetched_.begin(), prefetched_.end(),
                                 [&](const Prefetched& entry) { return entry.unit == unit_index; });
  if (mine != prefetched_.end()) {
    const std::size_t position = mine->position;
    prefetched_bytes_ -= unit.gather_bytes;
    prefetched_.erase(mine);
    drop_prefetched_before(position);
  }
  pass_.gathered.push_back(unit_index);
  prefetch();
  wait_gather(unit_index);
}

void GatherScheduler::start_through(std::size_t position) {
  const std::vector<std::size_t>& order = sequence();
  for (; cursor_ < position; ++cursor_) serve(order[cursor_]);
  start_gather(order[cursor_]);
  ++cursor_;
}

void GatherScheduler::prefetch() {
  const std::vector<std::size_t>& order = sequence();
  while (cursor_ < order.size()) {
    const std::size_t next = order[cursor_];
    const std::size_t bytes = units_[next].gather_bytes;
    if (present(next) || prefetched_bytes_ + bytes > options_.prefetch_bytes || !is_issued(units_[next])) return;
    start_gather(next);
    prefetched_.push_back({cursor_, next});
    prefetched_bytes_ += bytes;
    ++cursor_;
  }
}

void GatherScheduler::drop_prefetched_before(std::size_t position) {
  while (!prefetched_.empty() && prefetched_.front().position < position) {
    const std::size_t unit = prefetched_.front().unit;
    prefetched_bytes_ -= units_[unit].gather_bytes;
    prefetched_.pop_front();
    wait_gather(unit);
    release(unit);
  }
}

// Whether the unit's gather would not have to wait for the store.
bool GatherScheduler::is_issued(const Unit& unit) const {
  return std::all_of(unit.flats.begin(), unit.flats.end(),
                     [&](const FlatBuffer& flat) { return !flat.trainable || store_.is_issued(flat.store_shard); });
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

bool GatherScheduler::is_settled(const Unit& unit) const {
  const auto settled = [](const FlatBuffer& flat) { return flat.is_settled; };
  return settles() && std::all_of(unit.flats.begin(), unit.flats.end(), settled);
}

bool GatherScheduler::meets() const {
  return options_.sharded && std::any_of(units_.begin(), units_.end(), [this](const Unit& unit) {
           return unit.gather_bytes > 0 && !is_settled(unit);
         });
}

void GatherScheduler::settle_updated(const MarkPtr& met) {
  const std::vector<std::size_t>& order = sequence_of(PassKind::kTrainForward);
  const auto first_end = order.begin() + static_cast<std::ptrdiff_t>(order.size() / kFirstUnitsShare);
  for (std::size_t index = 0; index < units_.size(); ++index) {
    if (std::find(order.begin(), first_end, index) != first_end) continue;
    for (FlatBuffer& flat : units_[index].flats) {
      if (flat.is_fetched) continue;
      flat.is_settled = true;
      flat.settled_behind = met;
    }
  }
}

bool GatherScheduler::lacks_own_parts(const Unit& unit, bool spliced) {
  return std::any_of(unit.flats.begin(), unit.flats.end(),
                     [&](const FlatBuffer& flat) { return lacks_own_part(flat, spliced); });
}

SlotLease GatherScheduler::take_slot(std::size_t unit_index, bool spliced) {
  const Unit& unit = units_[unit_index];
  const bool copies = is_settled(unit) && lacks_own_parts(unit, spliced);
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
  const bool settled = is_settled(unit);
  if (settled) {
    for (const FlatBuffer& flat : unit.flats) device_.wait(communicator_.lane(), flat.settled_behind);
  }
  if (settled && lacks_own_parts(unit, into.spliced)) {
    const std::optional<Lane> beside = own_part_lane_of(unit);
    unit.lacks_own_parts = !beside;
    if (beside) {
      for (const FlatBuffer& flat : unit.flats) device_.wait(*beside, flat.settled_behind);
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
           .is_settled = settled,
           .holds_own_part = !lacks_own_part(flat, into.spliced)}));
      if (flat.is_fetched) staging->readers.push_back(works.back());
    }
  }
  if (settles() && !settled) {
    const MarkPtr gathered = device_.mark(communicator_.lane());
    for (FlatBuffer& flat : unit.flats) {
      flat.is_settled = !flat.is_fetched;
      flat.settled_behind = gathered;
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
  if (is_settled(unit)) return;
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
  for (const FlatBuffer& flat : unit.flats) {
    for (const std::size_t index : flat.parameters) check_intact(parameters_[index]);
  }
  unit.set_parameter_state(ParameterState::kUnsharded);
  attach(unit_index);
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

void GatherScheduler::finish_forward(std::size_t unit_index) {
  if (!options_.sharded || !in_pass_ || pass_.kind == PassKind::kBackward) return;
  Unit& unit = units_[unit_index];
  if (unit.parameter_state != ParameterState::kUnsharded) return;
  const bool first_in_backward =
      unit.is_root ? unit.gather_bytes <= options_.keep_root_bytes : unit_index == last_forward_unit_;
  if (pass_.kind == PassKind::kTrainForward && (first_in_backward || !options_.reshard)) {
    unit.needed_for_backward = true;  // resharding what backward needs first would only be undone
  }
  if (!unit.needed_for_backward) release(unit_index);
}

void GatherScheduler::finish_backward(std::size_t unit_index) {
  if (!options_.sharded || units_[unit_index].is_root)
    return;  // the root's parameters may be shared by modules still to come
  units_[unit_index].needed_for_backward = false;
  if (units_[unit_index].parameter_state == ParameterState::kUnsharded) release(unit_index);
}

void GatherScheduler::end_pass() {
  if (!in_pass_) return;
  const ScopeExit over([this] { in_pass_ = false; });
  if (!options_.sharded) return;
  const CommunicationClock::Scope timed(clock_, "end of the pass");
  while (cursor_ < sequence().size()) serve(sequence()[cursor_++]);
  drop_prefetched_before(SIZE_MAX);
  finish_agreement();
  ended_ = std::make_unique<EndedPass>(pass_, communicator_);
  if (pass_.kind == PassKind::kEvalForward || meets()) finish_agreement();
  if (pass_.kind == PassKind::kTrainForward && !forward_uses_.empty()) {
    const auto last = std::find_if(forward_uses_.rbegin(), forward_uses_.rend(),
                                   [&](std::size_t unit) { return !units_[unit].is_root; });
    last_forward_unit_ = last == forward_uses_.rend() ? SIZE_MAX : *last;
  }
}

void GatherScheduler::finish_agreement() {
  if (!ended_) return;
  const std::unique_ptr<EndedPass> ended = std::move(ended_);
  std::vector<GatherMessage> messages = ended->messages.wait();
  while (std::any_of(messages.begin(), messages.end(), [](const GatherMessage& m) { return m.wish != kNoWish; })) {
    serve_wishes(messages);
    messages = agree(ended->pass, kNoWish);
  }
  adopt_sequence(communicator_, messages, ended->pass.gathered, sequence_of(ended->pass.kind));
}

void GatherScheduler::get_unexpected(std::size_t unit_index) {
  pass_.gathered.push_back(unit_index);
  if (is_settled(units_[unit_index])) {
    start_gather(unit_index);
    wait_gather(unit_index);
    return;
  }
  while (cursor_ < sequence().size()) serve(sequence()[cursor_++]);
  drop_prefetched_before(SIZE_MAX);
  finish_agreement();
  while (units_[unit_index].parameter_state == ParameterState::kSharded) {
    serve_wishes(agree(pass_, static_cast<std::int32_t>(unit_index)));
  }
}

std::vector<GatherMessage> GatherScheduler::agree(const Pass& pass, std::int32_t wish) {
  return GatherMessages(communicator_, pass.kind, pass.number, pass.gathered, wish).wait();
}

void GatherScheduler::serve_wishes(const std::vector<GatherMessage>& messages) {
  const std::int32_t own = messages[static_cast<std::size_t>(communicator_.rank())].wish;
  for (const std::int32_t wish : wishes_in(messages)) {
    const auto unit = static_cast<std::size_t>(wish);
    if (wish == own) {
      start_gather(unit);
      wait_gather(unit);
    } else {
      serve(unit);
    }
  }
}

void GatherScheduler::gather(const std::vector<std::size_t>& units) {
  ZB_EXPECT_STATE(!in_pass_, "engine.gather() cannot be called inside a " + std::string(pass_kind_name(pass_.kind)));
  if (options_.sharded) {
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
  unit.gathering.clear();
  unit.gathered.clear();
  unit.gather_slot.reset();
  unit.set_parameter_state(ParameterState::kUnsharded);
  unit.set_parameter_state(ParameterState::kSharded);
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
