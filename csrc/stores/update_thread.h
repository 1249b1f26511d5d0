// Runs a store's updates one after the other, beside the engine's thread: of what is queued, the most urgent first.
//
// Work that throws ends it: later work is not run, and every wait rethrows. The destructor ends the work that runs,
// drops what waits behind it, and returns. A forked child may drop its copy; every wait there throws at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>

#include "common/process_owned.h"

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
  struct State;

  bool is_forked() const noexcept;

  UpdatesRun runs_;
  ProcessOwned<State> state_;
};

}  // namespace zb
