#include "comm/watchdog.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "comm/text.h"

namespace zb {
namespace {

using Clock = OperationLog::Clock;

constexpr std::chrono::milliseconds kTurn{100};
constexpr std::chrono::milliseconds kTurnAtClose{2};
// A peer that has finished and gone may do so before this rank's last kernels have ended.
constexpr std::chrono::milliseconds kDeathGrace{500};
// A dead peer's connections break before its process counts as ended, which waits for the driver: to name it is better.
constexpr std::chrono::milliseconds kFailureGrace{5000};
constexpr std::chrono::seconds kCloseGrace{10};
constexpr std::string_view kDied = "died during";
constexpr std::string_view kNoMemory = "no host memory is left to say what failed";

}  // namespace

template <typename Reason>
void WatchedLane::poison_with(int fault_rank, const Reason& reason) noexcept {
  try {
    const std::string text = reason();
    if (cause->set(text, fault_rank)) control->abort(text);
  } catch (const std::exception&) {
    control->abort(kNoMemory);
  }
}

void WatchedLane::poison(const std::string& reason, int fault_rank) noexcept {
  poison_with(fault_rank, [&] { return reason; });
}

bool WatchedLane::give_up(std::string_view reason) noexcept {
  try {
    if (!cause->set(rank_text(rank) + " aborted: " + std::string(reason), rank)) return false;
  } catch (const std::exception&) {
    // No memory for the text; the watchdog finds what the control communicator has of it.
  }
  control->abort(reason);
  return true;
}

void WatchedLane::poison_for_lost(int peer, std::string_view how, const std::string& operation) noexcept {
  poison_with(peer, [&] {
    return rank_text(peer) + " " + std::string(how) + " " + operation + " (noticed by " + rank_text(rank) + ")";
  });
}

void WatchedLane::poison_for_failure(const std::string& operation, const std::string& failure) noexcept {
  const Clock::time_point deadline = Clock::now() + kFailureGrace;
  while (!cause->is_set() && !processes.is_empty() && Clock::now() < deadline) {
    if (const auto dead = processes.dead()) return poison_for_lost(*dead, kDied, operation);
    if (const auto theirs = control->poisoned()) return poison(theirs->what(), theirs->rank());
    std::this_thread::sleep_for(kTurn);
  }
  poison_with(-1, [&] { return operation + " failed on " + rank_text(rank) + ": " + failure; });
}

// What is remembered from one turn to the next.
class Watchdog::Round {
 public:
  explicit Round(WatchedLane& lane) : lane_(lane) {}

  void look() {
    const Clock::time_point now = Clock::now();
    const std::optional<std::string> failure = lane_.transport->failure();
    const std::optional<OperationLog::Unfinished> oldest = lane_.log.oldest(*lane_.device);
    if (look_for_dead(oldest, now, failure.has_value())) return;
    if (const auto cause = lane_.control->poisoned()) {
      lane_.poison(cause->what(), cause->rank());
    } else if (failure) {
      lane_.poison_for_failure(during(oldest), *failure);
    } else if (oldest) {
      look_for_absent(*oldest, now - oldest->since);
    }
  }

 private:
  static std::string during(const std::optional<OperationLog::Unfinished>& oldest) {
    return oldest ? oldest->name.text() : "a collective";
  }

  // Only what is unfinished can wait for a dead peer.
  bool look_for_dead(const std::optional<OperationLog::Unfinished>& oldest, Clock::time_point now, bool has_failed) {
    const std::optional<int> dead = lane_.processes.dead();
    if (!dead) return false;
    if (!death_seen_) death_seen_ = now;
    const bool is_stuck = oldest && now - std::max(*death_seen_, oldest->since) >= kDeathGrace;
    if (!is_stuck && !has_failed) return false;
    lane_.poison_for_lost(*dead, kDied, during(oldest));
    return true;
  }

  // A peer that will never put the operation in, or one that has not by the timeout.
  void look_for_absent(const OperationLog::Unfinished& oldest, Clock::duration waited) {
    const bool is_late = waited >= lane_.timeout;
    if (waited < kReturnTime && !is_late) return;
    std::optional<AbsentPeer> absent;
    if (oldest.number) absent = lane_.control->absent_peer(*oldest.number);
    if (absent && !absent->how.empty()) {
      lane_.poison_for_lost(absent->rank, absent->how, oldest.name.text());
    } else if (is_late) {
      lane_.poison(rank_text(lane_.rank) + " waited " + seconds_text(lane_.timeout) + " for " +
                       (absent ? rank_text(absent->rank) + " in " : "") + oldest.name.text(),
                   absent ? absent->rank : -1);
    }
  }

  WatchedLane& lane_;
  std::optional<Clock::time_point> death_seen_;
};

Watchdog::Watchdog(std::shared_ptr<WatchedLane> lane)
    : lane_(std::move(lane)), thread_([held = lane_, signals = signals_] { run(*held, *signals); }) {}

void Watchdog::run(WatchedLane& lane, Signals& signals) noexcept {
  Round round(lane);
  bool is_aborted = false;
  bool has_ended = false;
  bool must_stop = false;
  try {
    lane.transport->enter_thread();
  } catch (const std::exception& error) {
    lane.poison("the watchdog of " + rank_text(lane.rank) + " could not start: " + error.what(), lane.rank);
  }
  for (;;) {
    bool is_idle = false;
    try {
      if (!lane.cause->is_set()) round.look();
      is_idle = must_stop && !lane.log.oldest(*lane.device);
    } catch (const std::exception& error) {  // the device has failed: its error ends everything on it
      lane.poison(rank_text(lane.rank) + " failed: " + error.what(), lane.rank);
    }
    if (lane.cause->is_set() && !has_ended) {
      has_ended = lane.transport->abort();
      is_aborted = true;
    }
    if (must_stop && (is_aborted || is_idle)) break;
    std::unique_lock lock(signals.mutex);
    const auto is_called = [&] { return signals.is_woken || (signals.must_stop && !must_stop); };
    signals.changed.wait_for(lock, must_stop ? kTurnAtClose : kTurn, is_called);
    signals.is_woken = false;
    must_stop = signals.must_stop;
  }
  if (!is_aborted) lane.transport->finish();
  const std::lock_guard lock(signals.mutex);
  signals.is_done = true;
  signals.changed.notify_all();
}

void Watchdog::wake() noexcept {
  const std::lock_guard lock(signals_->mutex);
  signals_->is_woken = true;
  signals_->changed.notify_all();
}

void Watchdog::close() noexcept {
  if (!thread_.is_own() || !thread_->joinable()) return;
  bool is_done = false;
  {
    std::unique_lock lock(signals_->mutex);
    signals_->must_stop = true;
    signals_->changed.notify_all();
    is_done = signals_->changed.wait_for(lock, lane_->timeout + kCloseGrace, [&] { return signals_->is_done; });
  }
  if (is_done) {
    thread_->join();
  } else {
    thread_->detach();
  }
}

}  // namespace zb
