// Owns an object that only the process that made it can use: threads, and what they lock and wait on.
//
// A forked child has the memory and not the threads. To destroy it there would wait for them, or, for a condition
// variable, for whoever waits on it in the parent: so a child lets go of its copy and destroys nothing.
#pragma once

#include <unistd.h>

#include <memory>
#include <utility>

namespace zb {

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

  bool is_own() const noexcept { return process_ == ::getpid(); }  // false in a forked child
  T& operator*() const noexcept { return *object_; }
  T* operator->() const noexcept { return object_.get(); }

 private:
  pid_t process_ = ::getpid();
  std::unique_ptr<T> object_;
};

}  // namespace zb
