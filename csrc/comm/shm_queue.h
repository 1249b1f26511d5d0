// The operations of one rank: numbers them, runs them in order, and blocks where the caller asks for it.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/shm_operation.h"
#include "comm/shm_peers.h"

namespace zb::shm {

class Queue {
 public:
  Queue(const ShmOptions& options, Connection connection);

  // Throws StateError after close().
  Peers& peers();
  // Drops what is not finished and tells the peers.
  void close() noexcept;

  // Publishes the operation; blocks only while kRingDepth of them are unfinished on some rank.
  void start(const std::shared_ptr<Operation>& operation);
  // Runs what can be run without blocking.
  void advance();
  // Runs what can be run; whether the operation has ended.
  bool test_done(const Operation& operation);
  void wait_done(const Operation& operation);
  // Runs what can be run; whether no peer reads this rank's source of the operation any more.
  bool test_source_free(const Operation& operation);
  // Until no peer reads this rank's source of the operation; also ends it here.
  void wait_source_free(const Operation& operation);
  // Advances `other` too while a call on this one blocks, for as long as it exists.
  void serve_while_blocked(const std::shared_ptr<Queue>& other) { served_.push_back(other); }
  // The next payload of exchanges; see RankBlock::payload.
  std::size_t next_payload_index() noexcept { return exchange_num_++ % kPayloadNum; }

 private:
  // What a caller blocks for: the end of `operation` here, or (kCompleted) that of operation `sequence` on all ranks.
  struct Goal {
    const Operation& operation;
    Counter counter;
    std::uint64_t sequence;
    const char* reason;  // put before the operation in errors
  };

  bool is_source(const Operation& operation);
  void wait_completed(std::uint64_t sequence, const Operation& operation, const char* reason);
  bool all_completed(std::uint64_t sequence) noexcept;
  void check_process();
  void check_source(const Operation& operation);
  // False once the communicator is poisoned. Then messages that all ranks have sent still arrive: where a peer's
  // exchange has ended, this rank's ends too, and it finds an error that they share by itself.
  bool run_pending();
  bool run_served();
  bool try_reach(const Goal& goal);
  bool is_blocked_itself(const Goal& goal) const noexcept;
  bool awaits(const Goal& goal, int peer) noexcept;
  std::uint32_t interest(const Goal& goal) noexcept;
  std::string describe_wait(const Goal& goal) const;
  std::uint64_t progress_num() const noexcept { return runner_.step_num() + finished_num_; }

  void block(const Goal& goal);
  bool spin(const Goal& goal);
  bool yield(const Goal& goal);
  bool sleep_once(const Goal& goal);
  bool check_awaited(const Goal& goal, Clock::time_point last_progress);

  std::optional<Peers> peers_;
  Runner runner_;
  std::deque<std::shared_ptr<Operation>> pending_;
  std::vector<std::weak_ptr<Queue>> served_;
  std::uint64_t next_sequence_ = 0;
  std::uint64_t finished_num_ = 0;
  std::uint64_t exchange_num_ = 0;
  unsigned vain_spin_num_ = 0;  // in a row
};

}  // namespace zb::shm
