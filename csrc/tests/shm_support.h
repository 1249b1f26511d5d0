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
#include <vector>

#include "comm/shm_communicator.h"
#include "kernels/cpu_kernels.h"
#include "rank_threads.h"

namespace zb::test::shm {

using namespace std::chrono_literals;
using test::communication_error;
using test::unique_rendezvous;

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
  return run_rank_threads(world_size, [&](int rank) {
    const auto communicator = make_shm_communicator(options_of(rank, world_size, rendezvous, timeout));
    body(*communicator);
  });
}

inline void run_ranks(int world_size, const RankBody& body) { rethrow_first(run_threads(world_size, body)); }

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
