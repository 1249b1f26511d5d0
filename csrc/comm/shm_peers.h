// One rank's view of the others: their counters, whether they live, the common cause of failure, sleeping and waking.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "comm/shm_control.h"
#include "comm/shm_rendezvous.h"
#include "common/interrupts.h"
#include "common/process_owned.h"

namespace zb::shm {

// Longer than a hand-over between two running ranks, far shorter than a time slice.
inline constexpr std::chrono::microseconds kSpinTime{20};
// Longer than the other ranks of a CPU take for a piece of a few hundred KiB each.
inline constexpr std::chrono::microseconds kYieldTime{500};

class Peers {
 public:
  Peers(const ShmOptions& options, Connection connection);
  // Tells peers that this rank leaves; in a forked child only drops its copies.
  ~Peers();
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  int rank() const noexcept { return rank_; }
  int world_size() const noexcept { return world_size_; }
  std::chrono::milliseconds timeout() const noexcept { return timeout_; }
  // Fewer CPUs than ranks.
  bool is_crowded() const noexcept { return connection_.cpu_num < world_size_; }
  // How long a rank watches before it sleeps.
  std::chrono::nanoseconds spin_time() const noexcept { return is_crowded() ? kYieldTime : kSpinTime; }
  RankBlock& own() noexcept { return *own_; }
  RankBlock& of(int rank) noexcept { return control_->rank(rank); }

  bool reached(int rank, Counter counter, std::uint64_t sequence) noexcept;
  // Sets this rank's counter to `value` and wakes the peers that sleep for it.
  void publish(Counter counter, std::uint64_t value) noexcept;

  // Throws the original cause when the communicator is poisoned.
  void check() {
    if (control_->poisoner.load(std::memory_order_acquire) != 0) [[unlikely]]
      throw CommunicationError(*cause());
  }
  bool is_poisoned() const noexcept { return control_->poisoner.load(std::memory_order_acquire) != 0; }
  std::optional<CommunicationError> cause() const noexcept;  // callable from any thread
  // The first cause of any rank stays; wakes everyone. Callable from any thread.
  void poison(int fault_rank, std::string_view reason) noexcept;
  [[noreturn]] void fail(int fault_rank, std::string_view reason);
  // Of a wait for `what`. Where a signal ends it, this rank is where no peer can go on with it: poisons.
  void look_for_signals(SignalWatch& signals, const std::function<std::string()>& what);

  // A rank that left closed its communicator; the process of a dead one ended. Neither publishes anything more.
  bool has_left(int rank) noexcept { return of(rank).left.load(std::memory_order_seq_cst) != 0; }
  bool is_dead(int rank) noexcept;
  // Communicator::stop and go_on of this rank. Callable from any thread.
  void stop(std::string_view why, std::uint32_t stop_num) noexcept;
  void go_on(std::uint32_t stop_num) noexcept;
  // AbsentPeer::how of a rank that has left, is dead, or stopped and did not go on; none while it may still come.
  // Callable from any thread.
  std::optional<std::string> how_lost(int rank);
  // Communicator::tell_put_in and absent_peer.
  void tell_put_in(std::uint64_t num) noexcept;
  std::optional<AbsentPeer> absent_peer(std::uint64_t num);
  // False in a forked child, which must not speak for its parent.
  bool is_own_process() const noexcept;

  // Sleeping: announce(), check once more, sleep(), and in any case awake().
  struct Ticket {
    std::uint32_t doorbell = 0;
  };
  Ticket announce(std::uint32_t interest) noexcept;
  void sleep(Ticket ticket, std::chrono::microseconds at_most) noexcept;
  void awake() noexcept;

  // Passes a descriptor from rank 0 to all others, and returns it there (an empty one on rank 0).
  FileDescriptor distribute(const FileDescriptor& of_rank0, std::uint64_t id);

 private:
  // Why a rank that stopped, and this one did not, is not to be waited for any more.
  std::optional<std::string> given_up(int rank);
  void wake_all() noexcept;

  int rank_;
  int world_size_;
  std::chrono::milliseconds timeout_;
  MakingProcess made_by_;
  Connection connection_;
  ControlBlock* control_;
  RankBlock* own_;
  std::atomic_flag reason_taken_ = ATOMIC_FLAG_INIT;
  std::mutex stop_mutex_;
};

}  // namespace zb::shm
