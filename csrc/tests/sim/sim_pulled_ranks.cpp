#include "sim/sim_pulled_ranks.h"

#include <gtest/gtest.h>

#include <random>

#include "common/scope_exit.h"
#include "rank_threads.h"

namespace zb::test::pulled {

Region Rank::shared(std::size_t bytes) const {
  return {comm->allocate(bytes, BufferRole::kShared, nullptr, Category::kStaging)};
}

Region Rank::own(std::size_t bytes) const {
  return {comm->allocate(bytes, BufferRole::kPrivate, nullptr, Category::kStaging)};
}

void Rank::write(const Region& region, std::vector<float> values, DType dtype) const {
  std::byte* const data = region.data();
  device->put_in(Lane::kCompute, "write", {SimDevice::written(data, dtype, values.size())},
                 [=] { cpu_kernels().cast(data, dtype, values.data(), DType::kFloat32, values.size()); });
  device->wait(lane, device->mark(Lane::kCompute));
}

std::vector<float> Rank::read(const Region& region, std::size_t numel, DType dtype) const {
  std::vector<float> values(numel);
  std::vector<std::byte> bytes(numel * dtype_bytes(dtype));
  device->download(bytes.data(), region.data(), bytes.size());
  cpu_kernels().cast(values.data(), DType::kFloat32, bytes.data(), dtype, numel);
  return values;
}

void run_pulled(int world_size, std::uint32_t number, const std::function<void(Rank&)>& body,
                const std::function<void(const std::string&)>& report) {
  SimWorld world(world_size, sim_schedule(number), SimCollectives::kPulled);
  rethrow_first(run_rank_threads(world_size, [&](int rank) {
    world.turns().enter(rank);
    const ScopeExit leave([&] { world.turns().leave(rank); });
    SCOPED_TRACE("rank " + std::to_string(rank) + ", " + world.text());
    const Lane lane = number % 2 == 0 ? Lane::kGather : Lane::kReduce;
    Rank place{rank, world_size, world.make_device(rank, report), nullptr, lane};
    place.comm = world.make_communicator(place.device, rank, lane, 30s);
    body(place);
    place.device->synchronize();
    if (!place.comm->poisoned()) place.comm->barrier("end");
  }));
}

std::vector<float> values_of(int rank, std::size_t numel, std::uint32_t seed) {
  std::mt19937 random(seed * 31 + static_cast<std::uint32_t>(rank));
  std::normal_distribution<float> normal(0.0F, 3.0F);
  std::vector<float> values(numel);
  for (float& value : values) value = normal(random);
  return values;
}

std::vector<float> rounded(const std::vector<float>& values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * dtype_bytes(dtype));
  std::vector<float> result(values.size());
  cpu_kernels().cast(bytes.data(), dtype, values.data(), DType::kFloat32, values.size());
  cpu_kernels().cast(result.data(), DType::kFloat32, bytes.data(), dtype, values.size());
  return result;
}

std::vector<float> summed(int world_size, std::size_t numel, std::uint32_t seed, DType dtype) {
  std::vector<float> total = rounded(values_of(0, numel, seed), dtype);
  for (int rank = 1; rank < world_size; ++rank) {
    const std::vector<float> more = rounded(values_of(rank, numel, seed), dtype);
    for (std::size_t i = 0; i < numel; ++i) total[i] += more[i];
  }
  return rounded(total, dtype);
}

std::vector<float> slice(const std::vector<float>& values, std::size_t begin, std::size_t numel) {
  const auto first = values.begin() + static_cast<std::ptrdiff_t>(begin);
  return {first, first + static_cast<std::ptrdiff_t>(numel)};
}

}  // namespace zb::test::pulled
