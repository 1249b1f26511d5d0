#include "shm_support.h"

#include <unistd.h>

#include <fstream>
#include <span>

#include "kernels/cpu_kernels.h"

namespace zb::test::shm {

ShmOptions options_of(int rank, int world_size, const std::string& rendezvous, std::chrono::milliseconds timeout) {
  ShmOptions options;
  options.rank = rank;
  options.world_size = world_size;
  options.rendezvous = rendezvous;
  options.timeout = timeout;
  return options;
}

std::vector<std::exception_ptr> run_threads(int world_size, const RankBody& body, std::chrono::milliseconds timeout) {
  const std::string rendezvous = unique_rendezvous();
  return run_rank_threads(world_size, [&](int rank) {
    const auto communicator = make_shm_communicator(options_of(rank, world_size, rendezvous, timeout));
    body(*communicator);
  });
}

std::string message_of(const std::exception_ptr& error) {
  return communication_error([&] {
    if (error) std::rethrow_exception(error);
  });
}

float value_of(int rank, std::size_t index) {
  return static_cast<float>(static_cast<std::size_t>(rank + 1) * (index % 7 + 1));
}

float sum_over_ranks(int world_size, std::size_t index) {
  float sum = 0;
  for (int rank = 0; rank < world_size; ++rank) sum += value_of(rank, index);
  return sum;
}

void write_values(std::byte* data, DType dtype, std::size_t numel, const std::function<float(std::size_t)>& value) {
  std::vector<float> values(numel);
  for (std::size_t i = 0; i < numel; ++i) values[i] = value(i);
  if (numel != 0) cpu_kernels().cast(data, dtype, values.data(), DType::kFloat32, numel);
}

std::ptrdiff_t first_difference(const std::byte* data, DType dtype, std::size_t numel,
                                const std::function<float(std::size_t)>& value) {
  std::vector<float> values(numel);
  if (numel != 0) cpu_kernels().cast(values.data(), DType::kFloat32, data, dtype, numel);
  for (std::size_t i = 0; i < numel; ++i) {
    if (values[i] != value(i)) return static_cast<std::ptrdiff_t>(i);
  }
  return -1;
}

Region shared(Communicator& communicator, std::size_t bytes) {
  return {communicator.allocate(bytes, BufferRole::kShared, nullptr, Category::kStaging), 0};
}

Region local(Communicator& communicator, std::size_t bytes) {
  return {communicator.allocate(bytes, BufferRole::kPrivate, nullptr, Category::kStaging), 0};
}

std::vector<std::byte> exchange_int(Communicator& communicator, int value) {
  std::vector<std::byte> all(sizeof(int) * static_cast<std::size_t>(communicator.world_size()));
  communicator.exchange(std::as_bytes(std::span(&value, 1)), all, "value");
  return all;
}

int lines_with(const std::string& path, const std::string& text) {
  std::ifstream file(path);
  int number = 0;
  for (std::string line; std::getline(file, line);) number += line.find(text) != std::string::npos ? 1 : 0;
  return number;
}

int open_descriptors() {
  int number = 0;
  for (int i = 0; i < 1024; ++i) number += ::access(("/proc/self/fd/" + std::to_string(i)).c_str(), F_OK) == 0 ? 1 : 0;
  return number;
}

}  // namespace zb::test::shm
