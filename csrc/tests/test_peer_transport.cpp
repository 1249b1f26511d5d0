// Collectives that pull, between ranks whose lanes run late: the same bits as sums in rank order, whatever the order.
#include "comm/peer_transport.h"

#include <gtest/gtest.h>

#include "sim/sim_pulled_ranks.h"

namespace zb {
namespace {

using namespace test::pulled;

void check_case(const Rank& at, std::size_t numel, DType dtype, std::uint32_t seed) {
  const auto ranks = static_cast<std::size_t>(at.world_size);
  const auto own = static_cast<std::size_t>(at.rank);
  const std::size_t bytes = numel * dtype_bytes(dtype);
  const Region full = at.shared(bytes * ranks);
  const Region shard = at.shared(bytes);
  const Region target = at.own(bytes * ranks);

  at.write(full, values_of(at.rank, numel * ranks, seed), dtype);
  const std::vector<float> sums = summed(at.world_size, numel * ranks, seed, dtype);
  at.comm->start_reduce_scatter({full, target, numel, dtype, "unit"})->wait();
  EXPECT_EQ(at.read(target, numel, dtype), slice(sums, own * numel, numel));
  at.comm->start_reduce_scatter({full, full.at(own * bytes), numel, dtype, "unit"})->wait();
  EXPECT_EQ(at.read(full.at(own * bytes), numel, dtype), slice(sums, own * numel, numel));

  at.write(full, values_of(at.rank, numel * ranks, seed), dtype);
  at.comm->start_all_reduce({full, numel * ranks, dtype, "unit"})->wait();
  EXPECT_EQ(at.read(full, numel * ranks, dtype), sums);

  std::vector<float> gathered;
  for (int rank = 0; rank < at.world_size; ++rank) {
    const std::vector<float> part = rounded(values_of(rank, numel, seed + 1), dtype);
    gathered.insert(gathered.end(), part.begin(), part.end());
  }
  at.write(shard, values_of(at.rank, numel, seed + 1), dtype);
  at.comm->start_all_gather({shard, target, bytes, "unit"})->wait();
  EXPECT_EQ(at.read(target, numel * ranks, dtype), gathered);
  at.write(full.at(own * bytes), values_of(at.rank, numel, seed + 1), dtype);
  at.comm->start_all_gather({full.at(own * bytes), full, bytes, "unit"})->wait();
  EXPECT_EQ(at.read(full, numel * ranks, dtype), gathered);

  const int root = at.world_size - 1;
  at.write(shard, values_of(at.rank, numel, seed + 2), dtype);
  at.comm->start_broadcast({shard, bytes, root, "unit"})->wait();
  EXPECT_EQ(at.read(shard, numel, dtype), rounded(values_of(root, numel, seed + 2), dtype));
}

class PeerTransportRanks : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Pulled, PeerTransportRanks, testing::Values(2, 3, 5, 8));

TEST_P(PeerTransportRanks, EveryCollectiveGivesTheBitsOfRankOrder) {
  for (std::uint32_t number = 0; number < test::kSimPolicyNum; ++number) {
    run_pulled(GetParam(), number, [&](Rank& at) {
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
        // The scratch holds 2048 bytes of pieces.
        for (const std::size_t numel : {1U, 7U, 130U, 1500U}) check_case(at, numel, dtype, number);
      }
    });
    if (HasFailure()) return;
  }
}

// Once all ranks have gathered a shard, each may do so again when it likes.
TEST_P(PeerTransportRanks, AGatherOfFinalShardsWaitsForNobody) {
  constexpr std::size_t kNumel = 1000;
  for (std::uint32_t number = 0; number < test::kSimPolicyNum; ++number) {
    std::atomic<bool> first_is_through = false;
    run_pulled(GetParam(), number, [&](Rank& at) {
      const auto own = static_cast<std::size_t>(at.rank);
      const std::size_t bytes = kNumel * sizeof(float);
      const Region shard = at.shared(bytes);
      const Region target = at.own(bytes * static_cast<std::size_t>(at.world_size));
      std::vector<float> gathered;
      for (int rank = 0; rank < at.world_size; ++rank) {
        const std::vector<float> part = values_of(rank, kNumel, number);
        gathered.insert(gathered.end(), part.begin(), part.end());
      }
      at.write(shard, values_of(at.rank, kNumel, number), DType::kFloat32);
      at.comm->start_all_gather({shard, target, bytes, "unit"})->wait();
      at.device->synchronize();
      if (at.rank != 0) at.device->run_until([&] { return first_is_through.load(); });
      at.write(target, std::vector<float>(gathered.size(), -1.0F), DType::kFloat32);
      at.device->copy(at.lane, target.data() + own * bytes, shard.data(), bytes);  // the caller's to bring
      at.comm->start_all_gather({shard, target, bytes, "unit", true})->wait();
      EXPECT_EQ(at.read(target, gathered.size(), DType::kFloat32), gathered);
      if (at.rank == 0) first_is_through = true;
    });
    if (HasFailure()) return;
  }
}

// Groups, and a buffer that is written again as soon as it is said to be free, with nobody waiting on the host.
TEST_P(PeerTransportRanks, ManyAreInFlight) {
  constexpr std::size_t kNumel = 40;
  for (std::uint32_t number = 0; number < test::kSimPolicyNum; ++number) {
    run_pulled(GetParam(), number, [&](Rank& at) {
      const auto ranks = static_cast<std::size_t>(at.world_size);
      const Region shard = at.shared(kNumel * 4);
      const Region gradients = at.shared(kNumel * 4 * ranks);
      std::vector<Region> gathered;
      std::vector<Region> reduced;
      for (std::uint32_t step = 0; step < 6; ++step) {
        gathered.push_back(at.own(kNumel * 4 * ranks));
        reduced.push_back(at.own(kNumel * 4));
        at.write(shard, values_of(at.rank, kNumel, step), DType::kFloat32);
        at.write(gradients, values_of(at.rank, kNumel * ranks, 100 + step), DType::kFloat32);
        std::vector<WorkPtr> works;
        {
          const CollectiveGroup group(*at.comm);
          works.push_back(at.comm->start_all_gather({shard, gathered.back(), kNumel * 4, "gather"}));
          works.push_back(
              at.comm->start_reduce_scatter({gradients, reduced.back(), kNumel, DType::kFloat32, "reduce"}));
          works.push_back(at.comm->start_all_gather({shard, gathered.back(), 0, "nothing"}));
        }
        for (const WorkPtr& work : works) {
          work->wait();
          work->wait_source_free();
        }
      }
      for (std::uint32_t step = 0; step < 6; ++step) {
        const std::vector<float> sums = summed(at.world_size, kNumel * ranks, 100 + step, DType::kFloat32);
        EXPECT_EQ(at.read(reduced[step], kNumel, DType::kFloat32),
                  slice(sums, static_cast<std::size_t>(at.rank) * kNumel, kNumel));
        const std::vector<float> all = at.read(gathered[step], kNumel * ranks, DType::kFloat32);
        for (int rank = 0; rank < at.world_size; ++rank) {
          EXPECT_EQ(slice(all, static_cast<std::size_t>(rank) * kNumel, kNumel), values_of(rank, kNumel, step));
        }
      }
    });
    if (HasFailure()) return;
  }
}

TEST(PeerTransport, SourcesMustBeSharedAndLieInTheSamePlace) {
  run_pulled(2, 0, [](Rank& at) {
    const Region full = at.own(512);
    EXPECT_THROW(at.comm->start_all_gather({at.own(256), full, 256, "unit"}), ArgumentError);
    const Region first = at.shared(256);
    const Region second = at.shared(256);
    at.comm->start_all_gather({first, full, 256, "same"})->wait();
    at.comm->barrier("same");
    at.device->synchronize();
  });
  std::array<std::string, 2> errors;
  run_pulled(2, 0, [&](Rank& at) {
    const Region first = at.shared(256);
    const Region second = at.shared(256);
    const Region full = at.own(512);
    at.comm->start_all_gather({at.rank == 0 ? first : second, full, 256, "apart"})->wait();
    try {
      at.comm->barrier("apart");
    } catch (const CommunicationError& error) {
      errors[static_cast<std::size_t>(at.rank)] = error.what();
      at.device->synchronize();
    }
  });
  for (const std::string& error : errors) EXPECT_NE(error.find("in another place"), std::string::npos) << error;
}

TEST(PeerTransport, SmallBuffersShareAnAllocation) {
  run_pulled(2, 0, [](Rank& at) {
    const Region first = at.shared(100);
    const Region second = at.shared(1);
    const Region large = at.shared(std::size_t{3} << 20U);
    EXPECT_EQ(second.data(), first.data() + 256);
    EXPECT_TRUE(large.data() < first.data() || large.data() >= first.data() + (std::size_t{2} << 20U));
    EXPECT_TRUE(std::all_of(second.data(), second.data() + 1, [](std::byte value) { return value == std::byte{0}; }));
  });
}

// Two MiB a block of small buffers, and large ones rounded up to that.
TEST(PeerTransport, WhatAllocationsTakeIsInTheLedger) {
  constexpr std::int64_t kUnit = test::SimPeerLink::kGranularityBytes;
  run_pulled(2, 0, [&](Rank& at) {
    Ledger ledger;
    const auto allocate = [&](std::size_t bytes, BufferRole role) {
      return at.comm->allocate(bytes, role, &ledger, Category::kParameters);
    };
    const auto taken = [&] { return ledger.total(Tier::kDevice).current_bytes; };
    auto small = allocate(1000, BufferRole::kShared);
    EXPECT_EQ(taken(), kUnit);
    auto second = allocate(std::size_t{1} << 20U, BufferRole::kShared);
    EXPECT_EQ(taken(), kUnit);
    auto own = allocate(1000, BufferRole::kPrivate);
    EXPECT_EQ(taken(), kUnit + 1000);
    auto large = allocate((std::size_t{5} << 20U) + 4, BufferRole::kShared);
    EXPECT_EQ(taken(), 4 * kUnit + 1000);
    EXPECT_EQ(ledger.entry(Tier::kDevice, Category::kParameters).current_bytes, 2000 + (6 << 20) + 4);
    large.reset();
    own.reset();
    small.reset();
    EXPECT_EQ(taken(), kUnit);
    EXPECT_EQ(ledger.total(Tier::kDevice).peak_bytes, 4 * kUnit + 1000);
    EXPECT_LT(ledger.entry(Tier::kDevice, Category::kCommunicators).peak_bytes, 2 * kUnit);
  });
}

TEST(PeerFlags, AReleasePassesEveryMeetingUntilAPeerOverwritesIt) {
  std::vector<std::vector<std::uint64_t>> rows(2, std::vector<std::uint64_t>(PeerFlags::row_bytes(2) / 8));
  const std::vector<std::byte*> addresses{reinterpret_cast<std::byte*>(rows[0].data()),
                                          reinterpret_cast<std::byte*>(rows[1].data())};
  const PeerFlags zero(0, addresses);
  const PeerFlags one(1, addresses);
  EXPECT_FALSE(zero.is_up(1, 1));
  one.raise(0, 1);
  EXPECT_TRUE(zero.is_up(1, 1));
  EXPECT_FALSE(zero.is_up(1, 2));
  EXPECT_FALSE(one.is_up(0, 1));
  zero.release();
  EXPECT_TRUE(zero.is_up(1, std::uint64_t{1} << 40U));
  EXPECT_FALSE(one.is_up(0, 1));
  one.raise(0, 2);
  EXPECT_FALSE(zero.is_up(1, 3));
}

}  // namespace
}  // namespace zb
