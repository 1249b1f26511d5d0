#include "stores/update_thread.h"

#include <pthread.h>
#include <unistd.h>

#include <utility>

#include "common/blocked_signals.h"

namespace zb {

UpdateThread::UpdateThread(UpdatesRun runs) : runs_(runs), owner_(getpid()) {
  if (runs_ == UpdatesRun::kInCaller) return;
  const BlockedSignals blocked;
  thread_ = std::make_unique<std::thread>([this] { run(); });
  pthread_setname_np(thread_->native_handle(), "zb-update");
}

UpdateThread::~UpdateThread() {
  if (!thread_) return;
  if (owner_ != getpid()) {
    static_cast<void>(thread_.release());
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  queued_.notify_one();
  thread_->join();
}

UpdateThread::Ticket UpdateThread::queue(Urgency urgency, std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  const Ticket ticket = ++last_;
  works_.emplace(std::pair{urgency, ticket}, std::move(work));
  undone_.insert(ticket);
  queued_.notify_one();
  return ticket;
}

bool UpdateThread::is_done(Ticket ticket) const {
  const std::lock_guard lock(mutex_);
  return has_run(ticket) || failure_ != nullptr;  // neither makes a wait block
}

std::size_t UpdateThread::waiting_num() const {
  const std::lock_guard lock(mutex_);
  return works_.size();
}

std::exception_ptr UpdateThread::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void UpdateThread::wait(Ticket ticket) {
  std::unique_lock lock(mutex_);
  if (runs_ == UpdatesRun::kInCaller) {
    while (!has_run(ticket) && !failure_) run_first(lock);
  } else {
    done_changed_.wait(lock, [&] { return has_run(ticket) || failure_ != nullptr; });
  }
  if (!has_run(ticket)) std::rethrow_exception(failure_);
}

void UpdateThread::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    queued_.wait(lock, [&] { return stopping_ || !works_.empty(); });
    if (stopping_) return;
    run_first(lock);
  }
}

void UpdateThread::run_first(std::unique_lock<std::mutex>& lock) {
  const auto first = works_.begin();
  const Ticket ticket = first->first.second;
  std::function<void()> work = std::move(first->second);
  works_.erase(first);
  if (failure_) return;
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
    failure_ = error;
  } else {
    undone_.erase(ticket);
  }
  done_changed_.notify_all();
}

}  // namespace zb
