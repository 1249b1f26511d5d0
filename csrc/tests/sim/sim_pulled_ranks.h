// Ranks over a PeerTransport whose lanes run late, what they bring, and what must come out.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "sim/sim_ranks.h"

namespace zb::test::pulled {

using namespace std::chrono_literals;

struct Rank {
  int rank;
  int world_size;
  std::shared_ptr<SimDevice> device;
  std::unique_ptr<Communicator> comm;
  Lane lane;

  Region shared(std::size_t bytes) const;
  Region own(std::size_t bytes) const;
  // In the compute lane, before and after what the communicator's lane does.
  void write(const Region& region, std::vector<float> values, DType dtype) const;
  std::vector<float> read(const Region& region, std::size_t numel, DType dtype) const;
};

void run_pulled(int world_size, std::uint32_t number, const std::function<void(Rank&)>& body,
                const std::function<void(const std::string&)>& report = nullptr);

// Values that are rounded, and whose sums are.
std::vector<float> values_of(int rank, std::size_t numel, std::uint32_t seed);

std::vector<float> rounded(const std::vector<float>& values, DType dtype);

// In rank order in float, rounded once.
std::vector<float> summed(int world_size, std::size_t numel, std::uint32_t seed, DType dtype);

std::vector<float> slice(const std::vector<float>& values, std::size_t begin, std::size_t numel);

}  // namespace zb::test::pulled
