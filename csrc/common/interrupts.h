// Signals that come while a thread waits for other ranks. Their handlers are of a language that the core does not know:
// bindings tell it how to run them, and what a handler raises ends the wait.
#pragma once

#include <chrono>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

namespace zb {

// A signal's handler has raised something, of this name.
class Interrupted : public std::runtime_error {
 public:
  Interrupted(const std::string& name, std::exception_ptr cause)
      : std::runtime_error("interrupted by " + name), cause_(std::move(cause)) {}
  const std::exception_ptr& cause() const noexcept { return cause_; }

 private:
  std::exception_ptr cause_;
};

// Runs the handlers of signals that came, where the calling thread is the one that does so. Throws Interrupted.
using RunSignalHandlers = void (*)();
void set_signal_handlers(RunSignalHandlers run) noexcept;

// One wait. Short ones are not interrupted: what they wait for has come before the application sees its signal.
class SignalWatch {
 public:
  // To be called again and again by who waits.
  void look() {
    const auto now = std::chrono::steady_clock::now();
    if (now < next_) return;
    next_ = now + kTurn;
    run_handlers();
  }

 private:
  static constexpr std::chrono::milliseconds kPatience{500};
  static constexpr std::chrono::milliseconds kTurn{100};
  static void run_handlers();

  std::chrono::steady_clock::time_point next_ = std::chrono::steady_clock::now() + kPatience;
};

}  // namespace zb
