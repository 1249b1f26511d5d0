// Runs a store's updates one after the other, beside the engine's thread: of what is queued, the most urgent first.
//
// Work that throws ends it: later work is not run, and every wait rethrows. The destructor ends the work that runs,
// drops what waits behind it, and returns. A copy in a forked child has no thread and is left alone.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include <sys/types.h>

namespace zb {

// kCaller: no thread; waiting runs what was queued, for devices that know one thread only.
enum class UpdatesRun : std::uint8_t { kInThread, kInCaller };

class UpdateThread {
 public:
  using Ticket = std::uint64_t;  // 0: done before anything was queued
  // Smaller is more urgent: the parameters are expected to be awaited earlier in the next forward. Work of one urgency
  // runs in the order in which it was queued.
  using Urgency = std::size_t;

  explicit UpdateThread(UpdatesRun runs);
  ~UpdateThread();
  UpdateThread(const UpdateThread&) = delete;
  UpdateThread& operator=(const UpdateThread&) = delete;

  Ticket queue(Urgency urgency, std::function<void()> work);
  bool is_done(Ticket ticket) const;
  std::size_t waiting_num() const;     // queued and not begun
  std::exception_ptr failure() const;  // null: none
  // Blocks until the work has run. Rethrows what ended this work, or other work before this could run.
  void wait(Ticket ticket);

 private:
  void run();
  void run_first(std::unique_lock<std::mutex>& lock);
  bool has_run(Ticket ticket) const { return !undone_.contains(ticket); }

  UpdatesRun runs_;
  pid_t owner_;
  mutable std::mutex mutex_;
  std::condition_variable queued_;
  std::condition_variable done_changed_;
  std::map<std::pair<Urgency, Ticket>, std::function<void()>> works_;
  std::set<Ticket> undone_;  // queued or running, or never to be run
  Ticket last_ = 0;
  std::exception_ptr failure_;
  bool stopping_ = false;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace zb
