// Communicators in a lane: collectives, groups, connecting, and ranks that start different collectives.
#include "comm/lane_communicator.h"

#include <gtest/gtest.h>

#include <cstring>
#include <span>

#include "lane_communicators.h"
#include "rank_threads.h"

namespace zb {
namespace {

using namespace test::lanes;
using test::communication_error;
using test::ThreadDevice;

TEST(LaneSolo, CopiesInTheLaneAndCountsWithoutTraffic) {
  const auto device = std::make_shared<ThreadDevice>();
  const auto comm = solo(device);
  Ledger ledger;
  const Region source = region(*comm, 12, &ledger);
  const Region destination = region(*comm, 12, &ledger);
  EXPECT_EQ(ledger.total(Tier::kDevice).current_bytes, 24);
  EXPECT_TRUE(source.buffer->is_on_device());
  for (int i = 0; i < 3; ++i) floats(source)[i] = 2.0F + static_cast<float>(i);
  comm->start_all_gather({source, destination, 12, "unit"})->wait();
  device->synchronize(device->mark(Lane::kCompute));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(floats(destination)[i], 2.0F + static_cast<float>(i));
  floats(source)[0] = 7.0F;
  comm->start_reduce_scatter({source, destination, 3, DType::kFloat32, "unit"})->wait();
  comm->start_all_reduce({source, 3, DType::kFloat32, "unit"})->wait();
  comm->start_broadcast({source, 12, 0, "unit"})->wait();
  device->synchronize(device->mark(Lane::kCompute));
  EXPECT_EQ(floats(destination)[0], 7.0F);
  EXPECT_EQ(floats(source)[0], 7.0F);
  const CommunicationCounters& counters = comm->counters();
  for (const Collective kind : {Collective::kAllGather, Collective::kReduceScatter, Collective::kAllReduce}) {
    EXPECT_EQ(counters.calls[static_cast<std::size_t>(kind)], 1U);
    EXPECT_EQ(counters.bytes[static_cast<std::size_t>(kind)], 0U);
  }
  std::vector<std::byte> all(4);
  const int mine = 17;
  comm->exchange(std::as_bytes(std::span(&mine, 1)), all, "value");
  EXPECT_EQ(std::memcmp(all.data(), &mine, 4), 0);
}

TEST(LaneSolo, RefusesWhatDoesNotFit) {
  const auto comm = solo(make_cpu_device());
  const Region buffer = region(*comm, 16);
  EXPECT_THROW(comm->start_all_gather({buffer, buffer.at(4), 16, "unit"}), ArgumentError);
  EXPECT_THROW(comm->start_all_gather({buffer, {}, 16, "unit"}), ArgumentError);
  EXPECT_THROW(comm->start_all_reduce({buffer.at(2), 2, DType::kFloat32, "unit"}), ArgumentError);
  EXPECT_THROW(comm->start_broadcast({buffer, 16, 1, "unit"}), ArgumentError);
  comm->abort("enough");
  comm->abort("and again");
  EXPECT_EQ(communication_error([&] { comm->start_broadcast({buffer, 16, 0, "unit"}); }), "rank 0 aborted: enough");
}

TEST(LaneSolo, KeepsNothingOfWhatHasEnded) {
  const auto device = std::make_shared<ThreadDevice>();
  const auto comm = solo(device);
  const Region buffer = region(*comm, 16);
  for (int i = 0; i < 10; ++i) comm->start_all_gather({buffer, buffer, 16, "unit"})->wait();
  {
    const CollectiveGroup group(*comm);
    for (int i = 0; i < 10; ++i) comm->start_all_gather({buffer, buffer, 16, "unit"});
  }
  device->synchronize();
  EXPECT_EQ(device->living_marks(), 0);
}

TEST(LaneSolo, AGroupGoesInWhenItEnds) {
  const auto device = std::make_shared<ThreadDevice>();
  const auto comm = solo(device);
  const Region source = region(*comm, 4);
  const Region destination = region(*comm, 4);
  floats(source)[0] = 3.0F;
  WorkPtr work;
  {
    const CollectiveGroup group(*comm);
    work = comm->start_all_gather({source, destination, 4, "unit"});
    EXPECT_FALSE(work->test());
    EXPECT_THROW(work->wait(), StateError);
    EXPECT_THROW(comm->begin_group(), StateError);
    device->synchronize();
    EXPECT_EQ(floats(destination)[0], 0.0F);
  }
  EXPECT_TRUE(work->test());
  work->wait();
  device->synchronize(device->mark(Lane::kCompute));
  EXPECT_EQ(floats(destination)[0], 3.0F);
  EXPECT_THROW(comm->end_group(), StateError);
}

TEST(Lanes, EveryCollectiveIsExactAndCounted) {
  run_lanes([](Communicator& comm, ThreadDevice& device) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    const Region full = region(comm, 2 * 5 * 4);
    const Region shard = region(comm, 5 * 4);
    for (std::size_t i = 0; i < 10; ++i) floats(full)[i] = static_cast<float>((rank + 1) * i);
    comm.start_reduce_scatter({full, shard, 5, DType::kFloat32, "h.0"})->wait();
    device.synchronize(device.mark(Lane::kCompute));
    for (std::size_t i = 0; i < 5; ++i) EXPECT_EQ(floats(shard)[i], static_cast<float>(3 * (5 * rank + i)));
    {
      const CollectiveGroup group(comm);
      comm.start_all_gather({shard, full, 20, "h.0"});
      comm.start_all_reduce({shard, 5, DType::kFloat32, "h.0"})->test();
    }
    device.synchronize();
    for (std::size_t i = 0; i < 10; ++i) EXPECT_EQ(floats(full)[i], static_cast<float>(3 * i));
    for (std::size_t i = 0; i < 5; ++i) EXPECT_EQ(floats(shard)[i], static_cast<float>(3 * (5 + 2 * i)));
    if (rank == 1) floats(full)[0] = 8.0F;
    comm.start_broadcast({full, 40, 1, "h.0"})->wait();
    device.synchronize(device.mark(Lane::kCompute));
    EXPECT_EQ(floats(full)[0], 8.0F);
    const auto& bytes = comm.counters().bytes;
    EXPECT_EQ(bytes[static_cast<std::size_t>(Collective::kReduceScatter)], 20U);
    EXPECT_EQ(bytes[static_cast<std::size_t>(Collective::kAllGather)], 20U);
    EXPECT_EQ(bytes[static_cast<std::size_t>(Collective::kAllReduce)], 20U);
    EXPECT_EQ(bytes[static_cast<std::size_t>(Collective::kBroadcast)], 40U);
  });
}

TEST(Lanes, WaitHoldsBackTheReadersLaneAndNotTheCaller) {
  run_lanes([](Communicator& comm, ThreadDevice& device) {
    const Region full = region(comm, 8);
    floats(full)[comm.rank()] = 1.0F + static_cast<float>(comm.rank());
    const auto gate = std::make_shared<test::Gate>();
    device.put(Lane::kGather, [gate] { gate->pass(); });
    const WorkPtr work = comm.start_all_gather(gather_of(full, comm.rank(), 4, "h.0"));
    EXPECT_TRUE(work->test());
    work->wait();
    float seen[2] = {};
    device.copy(Lane::kCompute, seen, full.data(), 8);
    const MarkPtr read = device.mark(Lane::kCompute);
    work->wait(Lane::kGather);  // its own lane runs in order
    std::this_thread::sleep_for(20ms);
    EXPECT_FALSE(device.has_passed(read));
    gate->open();
    device.synchronize(read);
    EXPECT_EQ(seen[0], 1.0F);
    EXPECT_EQ(seen[1], 2.0F);
  });
}

TEST(LaneConnection, ALoneRankIsNotConnected) {
  LaneOptions options = options_of(make_cpu_device(), nullptr, make_solo_communicator());
  const auto comm = make_connected_communicator(std::move(options), [](LaneOptions&) { ADD_FAILURE(); });
  const Region source = region(*comm, 4);
  const Region destination = region(*comm, 4);
  floats(source)[0] = 3.0F;
  comm->start_all_gather({source, destination, 4, "unit"})->wait();
  EXPECT_EQ(floats(destination)[0], 3.0F);
}

TEST(LaneConnection, ARankThatCannotConnectTellsItsPeers) {
  run_ranks(2, [](int rank, std::unique_ptr<Communicator> control) {
    const auto connect = [rank](LaneOptions& unconnected) {
      if (rank == 1) throw ArgumentError("no way there");
      unconnected.control->barrier("connected");
    };
    LaneOptions options = options_of(make_cpu_device(), nullptr, std::move(control));
    if (rank == 1) {
      EXPECT_THROW(make_connected_communicator(std::move(options), connect), ArgumentError);
      return;
    }
    const std::string text = communication_error([&] { make_connected_communicator(std::move(options), connect); });
    EXPECT_TRUE(contains(text, "no way there")) << text;
  });
}

TEST(LaneMismatch, TheNextExchangeNamesTheFirstOperationThatDiffers) {
  std::vector<std::string> texts(3);
  run_ranks(3, [&](int rank, std::unique_ptr<Communicator> control) {
    const auto comm = solo(make_cpu_device(), std::move(control));
    const Region full = region(*comm, 3 * 64);
    for (int i = 0; i < 100; ++i) comm->start_all_gather(gather_of(full, rank, 64, "h." + std::to_string(i)));
    comm->barrier("equal so far");
    comm->start_all_gather(gather_of(full, rank, rank == 2 ? 32 : 64, "h.3"));
    comm->start_all_reduce({full, 8, DType::kFloat32, "h.4"});
    texts[static_cast<std::size_t>(rank)] = communication_error([&] { comm->barrier("here"); });
    EXPECT_EQ(communication_error([&] { comm->progress(); }), texts[static_cast<std::size_t>(rank)]);
  });
  for (const std::string& text : texts) {
    EXPECT_TRUE(contains(text, "rank 0 all_gather of 'h.3' (64 bytes), rank 2 all_gather of 'h.3' (32 bytes)")) << text;
  }
}

TEST(LaneMismatch, AnOperationThatOneRankLeftOutIsNamed) {
  run_ranks(2, [](int rank, std::unique_ptr<Communicator> control) {
    const auto comm = solo(make_cpu_device(), std::move(control));
    const Region buffer = region(*comm, 64);
    comm->start_broadcast({buffer, 64, 1, "h.3"});
    if (rank == 0) comm->start_reduce_scatter({buffer, buffer, 2, DType::kBFloat16, "h.4"});
    std::vector<std::byte> all(8);
    const std::string text = communication_error([&] { comm->exchange(std::span(all).first(4), all, "order"); });
    EXPECT_TRUE(contains(text, "rank 0 reduce_scatter of 'h.4' (4 bytes, bfloat16), rank 1 nothing more")) << text;
  });
}

TEST(LaneMismatch, ADtypeOrARootOfOneRankAloneIsNamed) {
  run_ranks(2, [](int rank, std::unique_ptr<Communicator> control) {
    const auto comm = solo(make_cpu_device(), std::move(control));
    const Region buffer = region(*comm, 64);
    comm->start_reduce_scatter({buffer, buffer.at(32), 2, rank == 0 ? DType::kBFloat16 : DType::kFloat16, "h.4"});
    const std::string text = communication_error([&] { comm->barrier("step"); });
    EXPECT_TRUE(contains(text, "(4 bytes, bfloat16), rank 1 reduce_scatter of 'h.4' (4 bytes, float16)")) << text;
  });
  run_ranks(2, [](int rank, std::unique_ptr<Communicator> control) {
    const auto comm = solo(make_cpu_device(), std::move(control));
    const Region buffer = region(*comm, 64);
    comm->start_broadcast({buffer, 64, rank, "h.3"});
    const std::string text = communication_error([&] { comm->barrier("step"); });
    EXPECT_TRUE(contains(text, "(64 bytes, root 0), rank 1 broadcast of 'h.3' (64 bytes, root 1)")) << text;
  });
}

TEST(LaneCommunicator, TakesNoPushesWhereItsTransportTakesNone) {
  const auto comm = solo(std::make_shared<ThreadDevice>());
  const Region buffer = region(*comm, 64);
  EXPECT_FALSE(comm->takes_pushes());
  EXPECT_THROW(comm->push({buffer, 16, DType::kFloat32, "unit", {}, 0}), ArgumentError);
  EXPECT_THROW(comm->start_reduce_scatter({buffer, buffer, 16, DType::kFloat32, "unit", true}), ArgumentError);
  comm->start_reduce_scatter({buffer, buffer, 16, DType::kFloat32, "unit"})->wait();  // nobody is poisoned by it
}

}  // namespace
}  // namespace zb
