// Links that are pretended: what collectives cost on them, and when they have come.
#include "comm/paced_link.h"

#include <gtest/gtest.h>

#include <chrono>

#include "comm/paced_communicator.h"
#include "shm_support.h"

namespace zb {
namespace {

using namespace test::shm;

constexpr std::uint64_t kMiB = 1U << 20;

void expect_cost(WireCost found, std::uint64_t bytes, std::uint32_t rounds) {
  EXPECT_EQ(found.bytes, bytes);
  EXPECT_EQ(found.rounds, rounds);
}

TEST(WireCost, OfARing) {
  expect_cost(wire_cost(Algorithms::kRing, Collective::kAllGather, 4 * kMiB, 4), 3 * kMiB, 3);
  expect_cost(wire_cost(Algorithms::kRing, Collective::kReduceScatter, 4 * kMiB, 4), 3 * kMiB, 3);
  expect_cost(wire_cost(Algorithms::kRing, Collective::kAllReduce, 4 * kMiB, 4), 6 * kMiB, 6);
  expect_cost(wire_cost(Algorithms::kRing, Collective::kBroadcast, 4 * kMiB, 4), 4 * kMiB, 3);
}

TEST(WireCost, OfGloo) {
  expect_cost(wire_cost(Algorithms::kGloo, Collective::kAllGather, 4 * kMiB, 4), 3 * kMiB, 3);
  expect_cost(wire_cost(Algorithms::kGloo, Collective::kReduceScatter, 4 * kMiB, 4), 6 * kMiB, 6);
  expect_cost(wire_cost(Algorithms::kGloo, Collective::kBroadcast, 4 * kMiB, 5), 12 * kMiB, 3);
  expect_cost(wire_cost(Algorithms::kGloo, Collective::kBarrier, 0, 4), 0, 2);
}

TEST(WireCost, OfOneRankIsNothing) {
  for (const Collective collective :
       {Collective::kAllGather, Collective::kAllReduce, Collective::kBroadcast, Collective::kBarrier}) {
    expect_cost(wire_cost(Algorithms::kRing, collective, kMiB, 1), 0, 0);
    expect_cost(wire_cost(Algorithms::kGloo, collective, kMiB, 1), 0, 0);
  }
}

TEST(PacedLink, WhatIsSentWaitsForWhatWasSentBefore) {
  PacedLink link({1e6, 1ms});
  const PacedLink::Time start{1h};
  EXPECT_EQ(link.arrival({1000, 1}, start) - start, 2ms);
  EXPECT_EQ(link.arrival({1000, 1}, start) - start, 3ms);
  EXPECT_EQ(link.arrival({1000, 1}, start + 10ms) - start, 12ms);
}

TEST(PacedLink, OperationsComeInTheirOrder) {
  PacedLink link({1e6, 1ms});
  const PacedLink::Time start{1h};
  EXPECT_EQ(link.arrival({0, 5}, start) - start, 5ms);
  EXPECT_EQ(link.arrival({0, 1}, start) - start, 5ms);
}

TEST(PacedLink, SpeedsThatCannotBeAreRefused) {
  EXPECT_THROW(link_speed(0, 0), ArgumentError);
  EXPECT_THROW(link_speed(1e6, -1), ArgumentError);
}

TEST(PacedCommunicator, GivesTheSameAndTakesTheTimeOfTheLink) {
  const std::string rendezvous = unique_rendezvous();
  test::rethrow_first(test::run_rank_threads(2, [&](int rank) {
    auto link = std::make_shared<PacedLink>(LinkSpeed{1e6, 0ms});
    const auto comm = make_paced_communicator(make_shm_communicator(options_of(rank, 2, rendezvous)), Algorithms::kRing,
                                              std::move(link));
    const Region source = shared(*comm, 20'000);
    const Region destination = local(*comm, 40'000);
    write_values(source.data(), DType::kFloat32, 5000, [&](std::size_t i) { return value_of(rank, i); });
    comm->barrier("filled");
    const auto began = std::chrono::steady_clock::now();
    const WorkPtr work = comm->start_all_gather({source, destination, 20'000, "unit"});
    EXPECT_FALSE(work->test());
    work->wait();
    EXPECT_GE(std::chrono::steady_clock::now() - began, 20ms);
    for (int other = 0; other < 2; ++other) {
      EXPECT_EQ(first_difference(destination.data() + 20'000 * other, DType::kFloat32, 5000,
                                 [&](std::size_t i) { return value_of(other, i); }),
                -1);
    }
    work->wait_source_free();
    EXPECT_EQ(comm->counters().bytes[0], 20'000U);
  }));
}

}  // namespace
}  // namespace zb
