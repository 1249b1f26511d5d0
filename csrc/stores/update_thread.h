// Runs a store's updates one after the other, beside the engine's thread.
//
// Work that throws ends it: later work is not run, and every wait rethrows. The destructor ends the work that runs,
// drops what waits behind it, and returns. A copy in a forked child has no thread and is left alone.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include <sys/types.h>

namespace zb {

// kCaller: no thread; waiting runs what was queued, for devices that know one thread only.
enum class UpdatesRun : std::uint8_t { kInThread, kInCaller };

class UpdateThread {
 public:
  using Ticket = std::uint64_t;  // 0: done before anything was queued

  explicit UpdateThread(UpdatesRun runs);
  ~UpdateThread();
  UpdateThread(const UpdateThread&) = delete;
  UpdateThread& operator=(const UpdateThread&) = delete;

  Ticket queue(std::function<void()> work);
  bool is_done(Ticket ticket) const;
  // Blocks until the work has run. Rethrows what ended this or earlier work.
  void wait(Ticket ticket);

 private:
  void run();
  void run_first(std::unique_lock<std::mutex>& lock);

  UpdatesRun runs_;
  pid_t owner_;
  mutable std::mutex mutex_;
  std::condition_variable queued_;
  std::condition_variable done_changed_;
  std::deque<std::function<void()>> works_;
  Ticket last_ = 0;
  Ticket done_ = 0;
  std::exception_ptr failure_;
  bool stopping_ = false;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace zb
