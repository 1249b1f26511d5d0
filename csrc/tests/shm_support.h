// What the tests of the shm communicator share: ranks as threads, and values whose sums are exact.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <exception>
#include <fstream>
#include <functional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "comm/shm_communicator.h"
#include "common/error.h"
#include "kernels/cpu_kernels.h"

namespace zb::test::shm {

using namespace std::chrono_literals;

inline std::string unique_rendezvous() {
  static int number = 0;
  return "test-" + std::to_string(::getpid()) + "-" + std::to_string(number++);
}

inline ShmOptions options_of(int rank, int world_size, const std::string& rendezvous,
                             std::chrono::milliseconds timeout = 60s) {
  ShmOptions options;
  options.rank = rank;
  options.world_size = world_size;
  options.rendezvous = rendezvous;
  options.timeout = timeout;
  return options;
}

using RankBody = std::function<void(Communicator&)>;

// Runs the body on threads as ranks and returns what each threw.
inline std::vector<std::exception_ptr> run_threads(int world_size, const RankBody& body,
                                                   std::chrono::milliseconds timeout = 60s) {
  const std::string rendezvous = unique_rendezvous();
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(world_size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const auto communicator = make_shm_communicator(options_of(rank, world_size, rendezvous, timeout));
        body(*communicator);
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

inline void run_ranks(int world_size, const RankBody& body) {
  for (const std::exception_ptr& error : run_threads(world_size, body)) {
    if (error) std::rethrow_exception(error);
  }
}

// The message of the CommunicationError that this call must throw.
inline std::string communication_error(const std::function<void()>& call) {
  try {
    call();
  } catch (const CommunicationError& error) {
    return error.what();
  }
  return "no CommunicationError";
}

inline std::string message_of(const std::exception_ptr& error) {
  return communication_error([&] {
    if (error) std::rethrow_exception(error);
  });
}

// Small integers: their sums over ranks are exact in every dtype.
inline float value_of(int rank, std::size_t index) {
  return static_cast<float>(static_cast<std::size_t>(rank + 1) * (index % 7 + 1));
}

inline float sum_over_ranks(int world_size, std::size_t index) {
  float sum = 0;
  for (int rank = 0; rank < world_size; ++rank) sum += value_of(rank, index);
  return sum;
}

inline void write_values(std::byte* data, DType dtype, std::size_t numel,
                         const std::function<float(std::size_t)>& value) {
  std::vector<float> values(numel);
  for (std::size_t i = 0; i < numel; ++i) values[i] = value(i);
  if (numel != 0) cpu_kernels().cast(data, dtype, values.data(), DType::kFloat32, numel);
}

// The first index whose value differs, or -1.
inline std::ptrdiff_t first_difference(const std::byte* data, DType dtype, std::size_t numel,
                                       const std::function<float(std::size_t)>& value) {
  std::vector<float> values(numel);
  if (numel != 0) cpu_kernels().cast(values.data(), DType::kFloat32, data, dtype, numel);
  for (std::size_t i = 0; i < numel; ++i) {
    if (values[i] != value(i)) return static_cast<std::ptrdiff_t>(i);
  }
  return -1;
}

inline Region shared(Communicator& communicator, std::size_t bytes) {
  return {communicator.allocate(bytes, BufferRole::kShared, nullptr, Category::kStaging), 0};
}

inline Region local(Communicator& communicator, std::size_t bytes) {
  return {communicator.allocate(bytes, BufferRole::kPrivate, nullptr, Category::kStaging), 0};
}

inline std::vector<std::byte> exchange_int(Communicator& communicator, int value) {
  std::vector<std::byte> all(sizeof(int) * static_cast<std::size_t>(communicator.world_size()));
  communicator.exchange(std::as_bytes(std::span(&value, 1)), all, "value");
  return all;
}

// Lines of a /proc file that hold the text.
inline int lines_with(const std::string& path, const std::string& text) {
  std::ifstream file(path);
  int number = 0;
  for (std::string line; std::getline(file, line);) number += line.find(text) != std::string::npos ? 1 : 0;
  return number;
}

inline int open_descriptors() {
  int number = 0;
  for (int i = 0; i < 1024; ++i) number += ::access(("/proc/self/fd/" + std::to_string(i)).c_str(), F_OK) == 0 ? 1 : 0;
  return number;
}

inline constexpr DType kDtypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
inline constexpr std::size_t kNumels[] = {0, 1, 2, 31, 33, 1000, 4097, 70001};
inline constexpr std::size_t kLargestNumel = 70001;

}  // namespace zb::test::shm
