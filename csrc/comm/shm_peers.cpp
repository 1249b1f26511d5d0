#include "comm/shm_peers.h"

#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cstring>
#include <ctime>

#include "comm/shm_socket.h"

namespace zb::shm {
namespace {

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected, std::chrono::microseconds at_most) noexcept {
  timespec time{};
  time.tv_sec = at_most.count() / 1'000'000;
  time.tv_nsec = at_most.count() % 1'000'000 * 1000;
  ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT, expected, &time, nullptr, 0);
}

void futex_wake(std::atomic<std::uint32_t>& word) noexcept {
  ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

std::atomic<std::uint64_t>& counter_of(RankBlock& block, Counter counter) noexcept {
  switch (counter) {
    case Counter::kPosted:
      return block.posted;
    case Counter::kReduced:
      return block.reduced;
    case Counter::kCompleted:
      break;
  }
  return block.completed;
}

}  // namespace

Peers::Peers(const ShmOptions& options, Connection connection)
    : rank_(options.rank),
      world_size_(options.world_size),
      timeout_(options.timeout),
      connection_(std::move(connection)),
      control_(reinterpret_cast<ControlBlock*>(connection_.control->data())),
      own_(&control_->rank(rank_)) {}

Peers::~Peers() {
  if (!is_own_process()) return;
  own_->left.store(1, std::memory_order_seq_cst);
  wake_all();
}

bool Peers::reached(int rank, Counter counter, std::uint64_t sequence) noexcept {
  return counter_of(of(rank), counter).load(std::memory_order_seq_cst) > sequence;
}

void Peers::publish(Counter counter, std::uint64_t value) noexcept {
  counter_of(*own_, counter).store(value, std::memory_order_seq_cst);
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    RankBlock& block = of(peer);
    const std::uint32_t interest = block.interest.load(std::memory_order_seq_cst);
    if (interest == 0 || (interest >> 16 & static_cast<std::uint32_t>(counter)) == 0) continue;
    const std::uint32_t awaited = interest & 0xffff;
    if (awaited != kAnyRank && awaited != static_cast<std::uint32_t>(rank_) + 1) continue;
    block.doorbell.fetch_add(1, std::memory_order_seq_cst);
    futex_wake(block.doorbell);
  }
}

void Peers::poison(int fault_rank, std::string_view reason) noexcept {
  if (!is_own_process() || is_poisoned() || reason_taken_.test_and_set()) return;
  own_->fault_rank = fault_rank;
  const std::size_t length = std::min(reason.size(), kReasonBytes - 1);
  std::memcpy(own_->reason.data(), reason.data(), length);
  own_->reason[length] = '\0';
  std::uint32_t nobody = 0;
  control_->poisoner.compare_exchange_strong(nobody, static_cast<std::uint32_t>(rank_) + 1, std::memory_order_acq_rel);
  wake_all();
}

void Peers::fail(int fault_rank, std::string_view reason) {
  poison(fault_rank, reason);
  check();
  // Another thread's abort() of this rank is about to publish its own reason; this one is as true.
  throw CommunicationError(std::string(reason), fault_rank);
}

void Peers::look_for_signals(SignalWatch& signals, const std::function<std::string()>& what) {
  try {
    signals.look();
  } catch (const Interrupted& interrupt) {
    poison(rank_, "rank " + std::to_string(rank_) + " was " + interrupt.what() + " while it waited for " + what());
    throw;
  }
}

std::optional<CommunicationError> Peers::cause() const noexcept {
  const std::uint32_t poisoner = control_->poisoner.load(std::memory_order_acquire);
  if (poisoner == 0) return std::nullopt;
  const RankBlock& block = control_->rank(static_cast<int>(poisoner) - 1);
  return CommunicationError(block.reason.data(), block.fault_rank);
}

bool Peers::is_dead(int rank) noexcept {
  pollfd entry{connection_.processes[static_cast<std::size_t>(rank)].get(), POLLIN, 0};
  return ::poll(&entry, 1, 0) > 0;
}

void Peers::stop(std::string_view why, std::uint32_t stop_num) noexcept {
  if (!is_own_process()) return;
  const std::lock_guard lock(stop_mutex_);
  own_->stopped_at.store(0, std::memory_order_seq_cst);
  const std::size_t length = std::min(why.size(), kStopBytes - 1);
  for (std::size_t i = 0; i < length; ++i) own_->why[i].store(why[i], std::memory_order_release);
  own_->why[length].store('\0', std::memory_order_release);
  own_->stop_num.store(stop_num, std::memory_order_relaxed);
  own_->stopped_at.store(Clock::now().time_since_epoch().count(), std::memory_order_seq_cst);
}

void Peers::go_on(std::uint32_t stop_num) noexcept {
  if (!is_own_process()) return;
  const std::lock_guard lock(stop_mutex_);
  own_->stopped_at.store(0, std::memory_order_seq_cst);
  own_->stop_num.store(stop_num, std::memory_order_seq_cst);
}

std::optional<std::string> Peers::given_up(int rank) {
  const RankBlock& block = of(rank);
  const std::int64_t stopped_at = block.stopped_at.load(std::memory_order_seq_cst);
  if (stopped_at == 0 || Clock::now().time_since_epoch() - Clock::duration(stopped_at) < kReturnTime) return {};
  if (block.stop_num.load(std::memory_order_seq_cst) <= own_->stop_num.load(std::memory_order_seq_cst)) return {};
  std::string why;
  for (const std::atomic<char>& letter : block.why) {
    const char read = letter.load(std::memory_order_seq_cst);
    if (read == '\0') break;
    why += read;
  }
  if (block.stopped_at.load(std::memory_order_seq_cst) != stopped_at) return {};  // it goes on
  return why;
}

std::optional<std::string> Peers::how_lost(int rank) {
  if (has_left(rank)) return "left during";
  if (is_dead(rank)) return "died during";
  std::optional<std::string> why = given_up(rank);
  if (why) *why += " and did not come to";
  return why;
}

void Peers::tell_put_in(std::uint64_t num) noexcept { own_->put_in_num.store(num, std::memory_order_release); }

std::optional<AbsentPeer> Peers::absent_peer(std::uint64_t num) {
  std::optional<AbsentPeer> absent;
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    std::optional<std::string> how = how_lost(peer);  // asked first: what it put in before it went counts
    if (of(peer).put_in_num.load(std::memory_order_acquire) >= num) continue;
    if (how) return AbsentPeer{peer, std::move(*how)};
    if (!absent) absent = AbsentPeer{peer, ""};
  }
  return absent;
}

bool Peers::is_own_process() const noexcept { return made_by_.is_current(); }

Peers::Ticket Peers::announce(std::uint32_t interest) noexcept {
  const Ticket ticket{own_->doorbell.load(std::memory_order_seq_cst)};
  own_->interest.store(interest, std::memory_order_seq_cst);
  return ticket;
}

void Peers::sleep(Ticket ticket, std::chrono::microseconds at_most) noexcept {
  futex_wait(own_->doorbell, ticket.doorbell, at_most);
}

void Peers::awake() noexcept { own_->interest.store(0, std::memory_order_relaxed); }

void Peers::wake_all() noexcept {
  for (int peer = 0; peer < world_size_; ++peer) {
    of(peer).doorbell.fetch_add(1, std::memory_order_seq_cst);
    futex_wake(of(peer).doorbell);
  }
}

FileDescriptor Peers::distribute(const FileDescriptor& of_rank0, std::uint64_t id) {
  const Clock::time_point deadline = Clock::now() + timeout_;
  SignalWatch signals;
  const auto keep_waiting = [&](int peer) {
    check();
    look_for_signals(signals, [] { return "allocate"; });
    if (has_left(peer) || is_dead(peer)) {
      fail(peer,
           "rank " + std::to_string(peer) + " died during allocate (noticed by rank " + std::to_string(rank_) + ")");
    }
    if (Clock::now() >= deadline) {
      fail(peer, "rank " + std::to_string(rank_) + " waited longer than the timeout for rank " + std::to_string(peer) +
                     " in allocate");
    }
  };
  const auto id_bytes = std::as_bytes(std::span(&id, 1));
  if (rank_ == 0) {
    const int number = of_rank0.get();
    for (int peer = 1; peer < world_size_; ++peer) {
      send_message(connection_.sockets[static_cast<std::size_t>(peer)], id_bytes, {&number, 1},
                   [&] { keep_waiting(peer); });
    }
    return {};
  }
  Message message = receive_message(connection_.sockets[0], [&] { keep_waiting(0); });
  if (message.bytes.empty()) fail(0, "rank 0 left during allocate (noticed by rank " + std::to_string(rank_) + ")");
  std::uint64_t received_id = 0;
  std::memcpy(&received_id, message.bytes.data(), std::min(message.bytes.size(), sizeof(received_id)));
  if (received_id != id || message.descriptors.size() != 1) fail(0, "rank 0 sent the memory of another allocation");
  return std::move(message.descriptors[0]);
}

}  // namespace zb::shm
