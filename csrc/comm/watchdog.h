// The thread that looks after a communicator's lane: whether its operations end, and whether the peers live.
//
// Several times a second it asks for errors of the transport, for dead processes, for the control communicator's cause
// (a peer's), for a peer that stopped or left before it put in the operation that the lane waits for, and for an
// operation that has not ended within the timeout. The first of these poisons the communicator on this rank and, over
// the control communicator, on its peers; then the transport is aborted, so that kernels end and whoever waits for the
// device comes back. It also ends the transport, since that may block, and closing must not.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

#include "comm/cause.h"
#include "comm/communicator.h"
#include "comm/lane_transport.h"
#include "comm/operation_log.h"
#include "comm/peer_processes.h"
#include "common/process_owned.h"

namespace zb {

// What a communicator and its watchdog share.
struct WatchedLane {
  int rank = 0;
  std::chrono::milliseconds timeout{0};
  std::shared_ptr<Device> device;
  std::unique_ptr<LaneTransport> transport;
  std::unique_ptr<Communicator> control;
  PeerProcesses processes;
  std::shared_ptr<Cause> cause = std::make_shared<Cause>();
  OperationLog log;

  // The first cause stays. Callable from any thread.
  void poison(const std::string& reason, int fault_rank) noexcept;
  // This rank gives up. False where an earlier cause stays.
  bool give_up(std::string_view reason) noexcept;
  // A peer that will never come to the operation.
  void poison_for_lost(int peer, std::string_view how, const std::string& operation) noexcept;
  // The transport said that an operation failed. Waits a while for a dead peer that would explain it.
  void poison_for_failure(const std::string& operation, const std::string& failure) noexcept;

 private:
  // `reason` makes the text.
  template <typename Reason>
  void poison_with(int fault_rank, const Reason& reason) noexcept;
};

class Watchdog {
 public:
  explicit Watchdog(std::shared_ptr<WatchedLane> lane);
  ~Watchdog() { close(); }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // Looks at once rather than at its next turn.
  void wake() noexcept;
  // Waits until all operations have ended or were aborted, and ends the transport. Where that takes longer than the
  // timeout and some seconds, leaves it to the thread, which then outlives this object.
  void close() noexcept;

 private:
  struct Signals {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_woken = false;
    bool must_stop = false;
    bool is_done = false;
  };
  class Round;

  static void run(WatchedLane& lane, Signals& signals) noexcept;

  std::shared_ptr<WatchedLane> lane_;
  std::shared_ptr<Signals> signals_ = std::make_shared<Signals>();
  ProcessOwned<std::thread> thread_;
};

}  // namespace zb
