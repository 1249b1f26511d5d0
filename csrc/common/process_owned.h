// What only the process that made it can use. A forked child has the memory, and neither the threads nor a right to
// what the parent registered, locked or named.
#pragma once

#include <unistd.h>

#include <memory>
#include <utility>

namespace zb {

// The process in which it was made, or that of what it was copied from.
class MakingProcess {
 public:
  bool is_current() const noexcept { return process_ == ::getpid(); }  // false in a forked child

 private:
  pid_t process_ = ::getpid();
};

// Owns an object of its process: threads, and what they lock and wait on. To destroy it in a child would wait for them,
// or, for a condition variable, for whoever waits on it in the parent: so a child lets go of its copy and destroys
// nothing.
template <typename T>
class ProcessOwned {
 public:
  template <typename... Args>
  explicit ProcessOwned(Args&&... args) : object_(std::make_unique<T>(std::forward<Args>(args)...)) {}
  ~ProcessOwned() {
    if (!is_own()) static_cast<void>(object_.release());
  }
  ProcessOwned(const ProcessOwned&) = delete;
  ProcessOwned& operator=(const ProcessOwned&) = delete;

  bool is_own() const noexcept { return made_by_.is_current(); }
  T& operator*() const noexcept { return *object_; }
  T* operator->() const noexcept { return object_.get(); }

 private:
  MakingProcess made_by_;
  std::unique_ptr<T> object_;
};

}  // namespace zb
