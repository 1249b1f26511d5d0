// Threads as ranks, and what they threw.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "common/error.h"

namespace zb::test {

inline std::string unique_rendezvous() {
  static std::atomic<int> number{0};
  return "test-" + std::to_string(::getpid()) + "-" + std::to_string(number++);
}

// Runs the body on a thread for each rank and returns what each threw.
inline std::vector<std::exception_ptr> run_rank_threads(int world_size, const std::function<void(int rank)>& body) {
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(world_size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

inline void rethrow_first(const std::vector<std::exception_ptr>& errors) {
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

// The message of the error of this type that the call must throw, or else `missing`.
template <typename Error>
std::string thrown(const std::function<void()>& call, const char* missing) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return missing;
}

inline std::string communication_error(const std::function<void()>& call) {
  return thrown<CommunicationError>(call, "no CommunicationError");
}

inline std::string non_finite_error(const std::function<void()>& call) {
  return thrown<NonFiniteGradientError>(call, "no NonFiniteGradientError");
}

}  // namespace zb::test
