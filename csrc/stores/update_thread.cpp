#include "stores/update_thread.h"

#include <pthread.h>

#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "common/blocked_signals.h"
#include "common/error.h"

namespace zb {
namespace {

constexpr const char* kForked = "an update thread does not survive fork(); make a new engine in the child";

}  // namespace

struct UpdateThread::State {
  mutable std::mutex mutex;
  std::condition_variable queued;
  std::condition_variable done_changed;
  std::map<std::pair<Urgency, Ticket>, std::function<void()>> works;
  std::set<Ticket> undone;  // queued or running, or never to be run
  Ticket last = 0;
  std::exception_ptr failure;
  bool stopping = false;
  std::thread thread;

  bool has_run(Ticket ticket) const { return !undone.contains(ticket); }

  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      queued.wait(lock, [&] { return stopping || !works.empty(); });
      if (stopping) return;
      run_first(lock);
    }
  }

  void run_first(std::unique_lock<std::mutex>& lock) {
    const auto first = works.begin();
    const Ticket ticket = first->first.second;
    std::function<void()> work = std::move(first->second);
    works.erase(first);
    if (failure) return;
    lock.unlock();
    std::exception_ptr error;
    try {
      work();
    } catch (...) {
      error = std::current_exception();
    }
    work = nullptr;  // what it holds goes before anybody learns that it is done
    lock.lock();
    if (error) {
      failure = error;
    } else {
      undone.erase(ticket);
    }
    done_changed.notify_all();
  }
};

UpdateThread::UpdateThread(UpdatesRun runs) : runs_(runs) {
  if (runs_ == UpdatesRun::kInCaller) return;
  const BlockedSignals blocked;
  state_->thread = std::thread([state = &*state_] { state->run(); });
  pthread_setname_np(state_->thread.native_handle(), "zb-update");
}

UpdateThread::~UpdateThread() {
  if (runs_ == UpdatesRun::kInCaller || !state_.is_own()) return;
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
  }
  state_->queued.notify_one();
  state_->thread.join();
}

UpdateThread::Ticket UpdateThread::queue(Urgency urgency, std::function<void()> work) {
  ZB_EXPECT_STATE(!is_forked(), kForked);
  const std::lock_guard lock(state_->mutex);
  const Ticket ticket = ++state_->last;
  state_->works.emplace(std::pair{urgency, ticket}, std::move(work));
  state_->undone.insert(ticket);
  state_->queued.notify_one();
  return ticket;
}

// What the thread had locked when the process forked stays locked in the child, so there nothing is asked.
bool UpdateThread::is_forked() const noexcept { return runs_ == UpdatesRun::kInThread && !state_.is_own(); }

bool UpdateThread::is_done(Ticket ticket) const {
  if (is_forked()) return true;
  const std::lock_guard lock(state_->mutex);
  return state_->has_run(ticket) || state_->failure != nullptr;  // neither makes a wait block
}

std::size_t UpdateThread::waiting_num() const {
  if (is_forked()) return 0;
  const std::lock_guard lock(state_->mutex);
  return state_->works.size();
}

std::exception_ptr UpdateThread::failure() const {
  if (is_forked()) return std::make_exception_ptr(StateError(kForked));
  const std::lock_guard lock(state_->mutex);
  return state_->failure;
}

void UpdateThread::wait(Ticket ticket) {
  ZB_EXPECT_STATE(!is_forked(), kForked);
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  const auto is_over = [&] { return state.has_run(ticket) || state.failure != nullptr; };
  if (runs_ == UpdatesRun::kInCaller) {
    while (!is_over()) state.run_first(lock);
  } else {
    state.done_changed.wait(lock, is_over);
  }
  if (!state.has_run(ticket)) std::rethrow_exception(state.failure);
}

}  // namespace zb
