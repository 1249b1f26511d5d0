// Forked children of tests: what a copy of an object does in a process that has the memory and not the threads.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <exception>
#include <string>
#include <thread>

namespace zb::test {

// Whether a forked child that runs `body` ends by itself within seconds, the body having returned true.
template <typename Body>
testing::AssertionResult holds_in_child(Body body) {
  constexpr std::chrono::seconds kPatience{10};
#ifdef __SANITIZE_ADDRESS__
  // A child inherits the locks of the sanitizer's allocator as they are: let threads that just began come to rest.
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
#endif
  const pid_t child = ::fork();
  if (child < 0) return testing::AssertionFailure() << "fork failed";
  if (child == 0) {
    try {
      ::_exit(body() ? 0 : 1);
    } catch (const std::exception& error) {
      static_cast<void>(!::write(STDERR_FILENO, error.what(), std::string(error.what()).size()));
    }
    ::_exit(2);
  }
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  int status = 0;
  while (::waitpid(child, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() >= deadline) {
      ::kill(child, SIGKILL);
      ::waitpid(child, &status, 0);
      return testing::AssertionFailure() << "the child hung";
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "the child ended with status " << status;
}

}  // namespace zb::test
