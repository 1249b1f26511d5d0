#include "comm/shm_queue.h"

#include <sched.h>

#include <algorithm>
#include <utility>

#include "comm/shm_socket.h"
#include "comm/text.h"

namespace zb::shm {
namespace {

inline void cpu_pause() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr std::chrono::microseconds kServingSlice{200};

}  // namespace

Queue::Queue(const ShmOptions& options, Connection connection)
    : peers_(std::in_place, options, std::move(connection)), runner_(*peers_) {}

Peers& Queue::peers() {
  ZB_EXPECT_STATE(peers_.has_value(), "the communicator is closed; keep it until its operations are finished");
  return *peers_;
}

void Queue::close() noexcept {
  pending_.clear();
  peers_.reset();
}

void Queue::check_process() {
  ZB_EXPECT_STATE(peers().is_own_process(),
                  "this communicator belongs to the process that made it; a forked child must not call it");
}

void Queue::start(const std::shared_ptr<Operation>& operation) {
  check_process();
  peers_->check();
  check_source(*operation);
  operation->sequence = next_sequence_;
  // A slot of the ring is free once every rank has finished the operation that it held.
  if (next_sequence_ >= kRingDepth) wait_completed(next_sequence_ - kRingDepth, *operation, "the start of ");
  runner_.prepare(*operation);
  next_sequence_ += 1;
  pending_.push_back(operation);
  peers_->publish(Counter::kPosted, next_sequence_);
}

// Peers may read a source from its start on, so it must not be what an unfinished operation is still to write.
void Queue::check_source(const Operation& operation) {
  for (const std::shared_ptr<Operation>& earlier : pending_) {
    ZB_EXPECT_STATE(!writes_source_of(*earlier, operation, peers_->rank(), peers_->world_size()),
                    "the source of " + describe(operation) + " is still to be written by " + describe(*earlier) +
                        "; wait for that first");
  }
}

void Queue::advance() {
  check_process();
  if (!run_pending()) peers_->check();
}

bool Queue::test_done(const Operation& operation) {
  if (operation.is_done) return true;
  check_process();
  return try_reach({operation, Counter::kPosted, 0, ""});
}

bool Queue::run_pending() {
  // Asked for first: what a peer published before it aborted counts.
  const bool is_poisoned = peers_->is_poisoned();
  while (!pending_.empty()) {
    Operation& front = *pending_.front();
    if (is_poisoned && moves_data(front)) break;
    if (!runner_.step(front)) break;
    front.is_done = true;
    front.source.reset();
    front.destination_owner.reset();
    const std::uint64_t sequence = front.sequence;
    pending_.pop_front();
    finished_num_ += 1;
    peers_->publish(Counter::kCompleted, sequence + 1);
  }
  return !is_poisoned;
}

void Queue::wait_done(const Operation& operation) {
  if (!operation.is_done) block({operation, Counter::kPosted, 0, ""});
}

bool Queue::is_source(const Operation& operation) {
  return operation.descriptor.kind != OperationKind::kBroadcast || operation.descriptor.root == peers().rank();
}

bool Queue::test_source_free(const Operation& operation) {
  advance();
  return operation.is_done && (!is_source(operation) || all_completed(operation.sequence));
}

void Queue::wait_source_free(const Operation& operation) {
  wait_done(operation);
  check_process();
  if (is_source(operation)) wait_completed(operation.sequence, operation, "wait_source_free of ");
}

void Queue::wait_completed(std::uint64_t sequence, const Operation& operation, const char* reason) {
  if (!all_completed(sequence)) block({operation, Counter::kCompleted, sequence, reason});
}

bool Queue::all_completed(std::uint64_t sequence) noexcept {
  for (int peer = 0; peer < peers_->world_size(); ++peer) {
    if (!peers_->reached(peer, Counter::kCompleted, sequence)) return false;
  }
  return true;
}

// True while a served queue has something unfinished.
bool Queue::run_served() {
  bool has_pending = false;
  for (const std::weak_ptr<Queue>& entry : served_) {
    const std::shared_ptr<Queue> queue = entry.lock();
    if (!queue || !queue->peers_) continue;
    if (!queue->run_pending()) queue->peers_->check();
    has_pending = has_pending || !queue->pending_.empty();
  }
  return has_pending;
}

// Operations that were started later are run too: a peer may need them to get on.
bool Queue::try_reach(const Goal& goal) {
  const bool is_sound = run_pending();
  if (goal.counter == Counter::kCompleted ? all_completed(goal.sequence) : goal.operation.is_done) return true;
  if (!is_sound) peers_->check();
  return false;
}

// Whether an unfinished operation of this rank stands before the goal; then it is the oldest one.
bool Queue::is_blocked_itself(const Goal& goal) const noexcept {
  return goal.counter != Counter::kCompleted || (!pending_.empty() && pending_.front()->sequence <= goal.sequence);
}

bool Queue::awaits(const Goal& goal, int peer) noexcept {
  return is_blocked_itself(goal) ? runner_.awaits(*pending_.front(), peer)
                                 : !peers_->reached(peer, Counter::kCompleted, goal.sequence);
}

std::uint32_t Queue::interest(const Goal& goal) noexcept {
  return goal.counter == Counter::kCompleted ? kInterestInAll : runner_.interest(*pending_.front());
}

std::string Queue::describe_wait(const Goal& goal) const {
  return is_blocked_itself(goal) ? describe(*pending_.front()) : goal.reason + describe(goal.operation);
}

void Queue::block(const Goal& goal) {
  check_process();
  if (try_reach(goal) || spin(goal)) return;
  Clock::time_point last_progress = Clock::now();
  SignalWatch signals;
  for (;;) {
    const std::uint64_t progress = progress_num();
    if (sleep_once(goal)) return;
    if (progress_num() != progress) {
      last_progress = Clock::now();
    } else if (check_awaited(goal, last_progress)) {
      return;
    }
    peers_->look_for_signals(signals, [&] { return describe_wait(goal); });
  }
}

// Spinning is in vain where a peer shares this rank's CPU or computes for long, so it gets shorter with every failure;
// but a full one is tried now and then, since ranks that always sleep wake each other too late to ever meet again.
bool Queue::spin(const Goal& goal) {
  constexpr unsigned kRetryNum = 8;
  constexpr unsigned kMostHalvings = 3;
  if (peers_->is_crowded()) return yield(goal);
  const Clock::time_point end =
      Clock::now() + peers_->spin_time() / (1U << std::min(vain_spin_num_ % kRetryNum, kMostHalvings));
  do {
    for (int i = 0; i < 4; ++i) {
      cpu_pause();
      if (try_reach(goal)) {
        vain_spin_num_ = 0;
        return true;
      }
    }
  } while (Clock::now() < end);
  ++vain_spin_num_;
  return false;
}

// Where ranks share CPUs, the awaited one may wait for this CPU: hand it over. A futex would do that too, but waking
// costs a system call of the peer and, where a CPU went idle in between, tens of microseconds.
bool Queue::yield(const Goal& goal) {
  const Clock::time_point end = Clock::now() + peers_->spin_time();
  do {
    ::sched_yield();
    if (try_reach(goal)) return true;
  } while (Clock::now() < end);
  return false;
}

// One announced check and, when nothing moved, one sleep. True when the goal is reached.
bool Queue::sleep_once(const Goal& goal) {
  struct Awake {
    Peers& peers;
    ~Awake() { peers.awake(); }
  } awake{*peers_};
  const std::uint64_t progress = progress_num();
  const Peers::Ticket ticket = peers_->announce(interest(goal));
  const bool serves = run_served();
  if (try_reach(goal)) return true;
  if (progress_num() != progress) return false;  // what was announced may no longer be what is awaited
  // The peers of a served queue ring its own doorbell, not this one.
  peers_->sleep(ticket, serves ? kServingSlice : kSlice);
  return try_reach(goal);
}

// Throws where a peer that is waited for cannot come any more. True when the goal was reached meanwhile.
bool Queue::check_awaited(const Goal& goal, Clock::time_point last_progress) {
  const bool is_late = Clock::now() - last_progress >= peers_->timeout();
  for (int peer = 0; peer < peers_->world_size(); ++peer) {
    if (peer == peers_->rank() || !awaits(goal, peer)) continue;
    const std::string who = rank_text(peer);
    const std::string self = rank_text(peers_->rank());
    if (const std::optional<std::string> how = peers_->how_lost(peer)) {
      // What it published before it went counts, so look again.
      if (try_reach(goal)) return true;
      if (!awaits(goal, peer)) return false;
      peers_->fail(peer, who + " " + *how + " " + describe_wait(goal) + " (noticed by " + self + ")");
    }
    if (is_late) {
      peers_->fail(peer,
                   self + " waited " + seconds_text(peers_->timeout()) + " for " + who + " in " + describe_wait(goal));
    }
  }
  return false;
}

}  // namespace zb::shm
