// What the tests of the shm communicator share: ranks as threads, and values whose sums are exact.
#pragma once

#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "comm/shm_communicator.h"
#include "rank_threads.h"

namespace zb::test::shm {

using namespace std::chrono_literals;
using test::communication_error;
using test::unique_rendezvous;

ShmOptions options_of(int rank, int world_size, const std::string& rendezvous, std::chrono::milliseconds timeout = 60s);

using RankBody = std::function<void(Communicator&)>;

// Runs the body on threads as ranks and returns what each threw.
std::vector<std::exception_ptr> run_threads(int world_size, const RankBody& body,
                                            std::chrono::milliseconds timeout = 60s);

inline void run_ranks(int world_size, const RankBody& body) { rethrow_first(run_threads(world_size, body)); }

std::string message_of(const std::exception_ptr& error);

// Small integers: their sums over ranks are exact in every dtype.
float value_of(int rank, std::size_t index);

float sum_over_ranks(int world_size, std::size_t index);

void write_values(std::byte* data, DType dtype, std::size_t numel, const std::function<float(std::size_t)>& value);

// The first index whose value differs, or -1.
std::ptrdiff_t first_difference(const std::byte* data, DType dtype, std::size_t numel,
                                const std::function<float(std::size_t)>& value);

Region shared(Communicator& communicator, std::size_t bytes);

Region local(Communicator& communicator, std::size_t bytes);

std::vector<std::byte> exchange_int(Communicator& communicator, int value);

// Lines of a /proc file that hold the text.
int lines_with(const std::string& path, const std::string& text);

int open_descriptors();

inline constexpr DType kDtypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
inline constexpr std::size_t kNumels[] = {0, 1, 2, 31, 33, 1000, 4097, 70001};
inline constexpr std::size_t kLargestNumel = 70001;

}  // namespace zb::test::shm
