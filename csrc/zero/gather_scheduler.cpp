#include "zero/gather_scheduler.h"

#include <algorithm>
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
  ZB_EXPECT_STATE(!in_pass_,
                  "one pass (" + std::string(pass_kind_name(kind)) + ") began inside another (" +
                      std::string(pass_kind_name(pass_.kind)) +
                      "); a forward of the whole model cannot be nested: checkpoint blocks inside of it "
                      "rather than the engine, call the engine outside of its own forward, and put a model that "
                      "calls itself into a module that holds it");
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
      expect_intact(unit);
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
  expect_intact(unit);
}

// Later passes gather it right after the root, so that is where this one records it.
void GatherScheduler::use_with_root(std::size_t unit_index) {
  units_[unit_index].goes_with_root = true;
  use(unit_index);
  std::vector<std::size_t>& gathered = pass_.gathered;
  const auto own = std::find(gathered.begin(), gathered.end(), unit_index);
  const auto place = std::find_if(gathered.begin(), own, [&](std::size_t other) {
    return !is_at_root(units_[other]) || (!units_[other].is_root && other > unit_index);
  });
  if (own != gathered.end()) std::rotate(place, own, own + 1);
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

bool GatherScheduler::meets() const {
  return options_.sharded && std::any_of(units_.begin(), units_.end(), [this](const Unit& unit) {
           return unit.gather_bytes > 0 && !all_final(unit);
         });
}

void GatherScheduler::mark_updated_final(const MarkPtr& met) {
  const std::vector<std::size_t>& order = sequence_of(PassKind::kTrainForward);
  const auto first_end = order.begin() + static_cast<std::ptrdiff_t>(order.size() / kFirstUnitsShare);
  for (std::size_t index = 0; index < units_.size(); ++index) {
    if (std::find(order.begin(), first_end, index) != first_end) continue;
    for (FlatBuffer& flat : units_[index].flats) {
      if (flat.is_fetched) continue;
      flat.is_final = true;
      flat.final_after = met;
    }
  }
}

void GatherScheduler::finish_forward(std::size_t unit_index) {
  if (!options_.sharded || !in_pass_ || pass_.kind == PassKind::kBackward) return;
  Unit& unit = units_[unit_index];
  if (unit.parameter_state != ParameterState::kUnsharded) return;
  const bool first_in_backward =
      is_at_root(unit) ? unit.gather_bytes <= options_.keep_root_bytes : unit_index == last_forward_unit_;
  if (pass_.kind == PassKind::kTrainForward && (first_in_backward || !options_.reshard)) {
    unit.needed_for_backward = true;  // resharding what backward needs first would only be undone
  }
  if (!unit.needed_for_backward) release(unit_index);
}

void GatherScheduler::finish_backward(std::size_t unit_index) {
  if (!options_.sharded || is_at_root(units_[unit_index]))
    return;  // the root's parameters may be shared by modules still to come
  units_[unit_index].needed_for_backward = false;
  if (units_[unit_index].parameter_state == ParameterState::kUnsharded) release(unit_index);
}

void GatherScheduler::end_pass() {
  if (!in_pass_) return;
  const ScopeExit at_exit([this] { in_pass_ = false; });
  if (!options_.sharded) return;
  const CommunicationClock::Scope timed(clock_, "end of the pass");
  while (cursor_ < sequence().size()) serve(sequence()[cursor_++]);
  drop_prefetched_before(SIZE_MAX);
  finish_agreement();
  ended_ = std::make_unique<EndedPass>(pass_, communicator_);
  if (pass_.kind == PassKind::kEvalForward || meets()) finish_agreement();
  if (pass_.kind == PassKind::kTrainForward && !forward_uses_.empty()) {
    const auto last = std::find_if(forward_uses_.rbegin(), forward_uses_.rend(),
                                   [&](std::size_t unit) { return !is_at_root(units_[unit]); });
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
  if (all_final(units_[unit_index])) {
    start_gather(unit_index);
    wait_gather(unit_index);
    return;
  }
  while (cursor_ < sequence().size()) serve(sequence()[cursor_++]);
  drop_prefetched_before(SIZE_MAX);
  finish_agreement();
  cursor_ = sequence().size();  // one that was adopted just now is for later passes
  serve_wishes(agree(pass_, static_cast<std::int32_t>(unit_index)));
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

}  // namespace zb
