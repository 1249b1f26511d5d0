// Communicators in a lane: with threads and forked processes as ranks, and threads as lanes.
#include "comm/lane_communicator.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <exception>
#include <functional>
#include <thread>

#include "comm/collective_history.h"
#include "comm/shm_communicator.h"
#include "comm/solo_communicator.h"
#include "comm/solo_transport.h"
#include "lane_support.h"

namespace zb {
namespace {

using namespace std::chrono_literals;
using test::HostTransport;
using test::StuckTransport;
using test::ThreadDevice;
using Clock = std::chrono::steady_clock;

std::string unique_rendezvous() {
  static int number = 0;
  return "lane-" + std::to_string(::getpid()) + "-" + std::to_string(number++);
}

std::unique_ptr<Communicator> host_communicator(int rank, int world_size, const std::string& rendezvous) {
  return make_shm_communicator({.rank = rank, .world_size = world_size, .rendezvous = rendezvous, .timeout = 30s});
}

using RankBody = std::function<void(int rank, std::unique_ptr<Communicator> control)>;

// Threads as ranks; rethrows what the first failed one threw.
void run_ranks(int world_size, const RankBody& body) {
  const std::string rendezvous = unique_rendezvous();
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(world_size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank, host_communicator(rank, world_size, rendezvous + "-control"));
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

std::string communication_error(const std::function<void()>& call) {
  try {
    call();
  } catch (const CommunicationError& error) {
    return error.what();
  }
  return "no CommunicationError";
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

LaneOptions options_of(std::shared_ptr<Device> device, std::unique_ptr<LaneTransport> transport,
                       std::unique_ptr<Communicator> control, std::chrono::milliseconds timeout = 30s) {
  LaneOptions options;
  options.kind = "test";
  options.timeout = timeout;
  options.device = std::move(device);
  options.transport = std::move(transport);
  options.control = std::move(control);
  return options;
}

std::unique_ptr<Communicator> solo(const std::shared_ptr<Device>& device) {
  return make_lane_communicator(
      options_of(device, std::make_unique<SoloTransport>(device, Lane::kGather), make_solo_communicator()));
}

// A communicator whose operations never end by themselves.
std::unique_ptr<Communicator> stuck(std::unique_ptr<Communicator> control, std::chrono::milliseconds timeout = 30s,
                                    const std::string& failure = "", PeerProcesses processes = {}) {
  const auto device = std::make_shared<ThreadDevice>();
  auto transport = std::make_unique<StuckTransport>(device, Lane::kGather);
  if (!failure.empty()) transport->fail_when_used(failure);
  LaneOptions options = options_of(device, std::move(transport), std::move(control), timeout);
  options.processes = std::move(processes);
  return make_lane_communicator(std::move(options));
}

// Collectives of real data between two ranks whose lanes are threads.
void run_lanes(const std::function<void(Communicator&, ThreadDevice&)>& body) {
  const std::string rendezvous = unique_rendezvous();
  run_ranks(2, [&](int rank, std::unique_ptr<Communicator> control) {
    const auto device = std::make_shared<ThreadDevice>();
    auto transport =
        std::make_unique<HostTransport>(device, Lane::kGather, host_communicator(rank, 2, rendezvous + "-data"));
    const auto comm = make_lane_communicator(options_of(device, std::move(transport), std::move(control)));
    body(*comm, *device);
    comm->barrier("end");
  });
}

Region region(Communicator& comm, std::size_t bytes, Ledger* ledger = nullptr) {
  return {comm.allocate(bytes, BufferRole::kPrivate, ledger, Category::kStaging), 0};
}

float* floats(const Region& region) { return reinterpret_cast<float*>(region.data()); }

AllGather gather_of(const Region& full, int rank, std::size_t shard_bytes, std::string_view label) {
  return {full.at(static_cast<std::size_t>(rank) * shard_bytes), full, shard_bytes, label};
}

std::string raised_by(Communicator& comm, std::chrono::milliseconds within = 10s) {
  const Clock::time_point deadline = Clock::now() + within;
  while (!comm.poisoned() && Clock::now() < deadline) std::this_thread::sleep_for(5ms);
  return communication_error([&] { comm.progress(); });
}

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
    const auto device = make_cpu_device();
    auto transport = std::make_unique<SoloTransport>(device, Lane::kGather);
    const auto comm = make_lane_communicator(options_of(device, std::move(transport), std::move(control)));
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
    const auto device = make_cpu_device();
    auto transport = std::make_unique<SoloTransport>(device, Lane::kGather);
    const auto comm = make_lane_communicator(options_of(device, std::move(transport), std::move(control)));
    const Region buffer = region(*comm, 64);
    comm->start_broadcast({buffer, 64, 1, "h.3"});
    if (rank == 0) comm->start_reduce_scatter({buffer, buffer, 2, DType::kBFloat16, "h.4"});
    std::vector<std::byte> all(8);
    const std::string text = communication_error([&] { comm->exchange(std::span(all).first(4), all, "order"); });
    EXPECT_TRUE(contains(text, "rank 0 reduce_scatter of 'h.4' (4 bytes, bfloat16), rank 1 nothing more")) << text;
  });
}

TEST(LaneFaults, AStalledOperationEndsAtTheTimeoutOnAllRanks) {
  run_ranks(2, [](int rank, std::unique_ptr<Communicator> control) {
    const auto comm = stuck(std::move(control), 400ms);
    const Region full = region(*comm, 8);
    if (rank == 0) comm->start_all_gather(gather_of(full, 0, 4, "h.3"));
    const std::string text = raised_by(*comm);
    EXPECT_TRUE(contains(text, "rank 0 waited 0.40 s for all_gather of 'h.3'")) << text;
    EXPECT_EQ(contains(text, "rank 0 aborted"), rank == 1) << text;
  });
}

TEST(LaneFaults, AnErrorOfTheTransportNamesTheOperation) {
  run_ranks(2, [](int rank, std::unique_ptr<Communicator> control) {
    const auto comm = stuck(std::move(control), 30s, rank == 0 ? "a link broke" : "");
    Region full;
    WorkPtr work;
    std::string text = communication_error([&] {
      full = region(*comm, 8);
      work = comm->start_all_gather(gather_of(full, rank, 4, "h.3"));
    });
    if (work) text = raised_by(*comm);
    EXPECT_TRUE(contains(text, "all_gather of 'h.3' failed on rank 0: a link broke")) << text;
    if (!work) {  // a peer that begins when all is over
      EXPECT_EQ(rank, 1);
      return;
    }
    EXPECT_THROW(work->wait(), CommunicationError);
    EXPECT_THROW(static_cast<void>(work->test()), CommunicationError);
  });
}

TEST(LaneFaults, AbortFromAnotherThreadWakesWhoExchanges) {
  run_ranks(2, [](int rank, std::unique_ptr<Communicator> control) {
    const auto comm = stuck(std::move(control));
    std::thread other([&] {
      std::this_thread::sleep_for(50ms);
      if (rank == 0) comm->abort("no more");
      if (rank == 0) comm->abort("really");
    });
    std::vector<std::byte> all(8);
    const std::string text =
        rank == 0 ? communication_error([&] { comm->exchange(std::span(all).first(4), all, "x"); }) : raised_by(*comm);
    EXPECT_TRUE(contains(text, "rank 0 aborted: no more")) << text;
    other.join();
  });
}

TEST(LaneFaults, ClosingWaitsForWhatIsUnderWay) {
  run_lanes([](Communicator& comm, ThreadDevice& device) {
    const Region full = region(comm, 8);
    device.put(Lane::kGather, [] { std::this_thread::sleep_for(100ms); });
    comm.start_all_gather(gather_of(full, comm.rank(), 4, "h.0"));
  });  // HostTransport's memory is gone after this: a lane still at work would be found by the sanitizers
}

TEST(LaneFaults, ClosingEndsWhatCannotEnd) {
  run_ranks(2, [](int rank, std::unique_ptr<Communicator> control) {
    const Clock::time_point begin = Clock::now();
    {
      const auto comm = stuck(std::move(control), 300ms);
      const Region full = region(*comm, 8);
      comm->start_all_gather(gather_of(full, rank, 4, "h.3"));
    }
    EXPECT_LT(Clock::now() - begin, 5s);
  });
}

// Two processes; the child's status is checked.
void run_processes(const std::function<void(std::unique_ptr<Communicator>, PeerProcesses)>& parent,
                   const std::function<void(std::unique_ptr<Communicator>)>& child) {
  const std::string rendezvous = unique_rendezvous();
  const auto meet = [&](int rank) {
    auto control = host_communicator(rank, 2, rendezvous);
    const ProcessIdentity mine = ProcessIdentity::own();
    std::array<ProcessIdentity, 2> all;
    control->exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)), "processes");
    PeerProcesses processes(rank, all);
    control->barrier("watched");
    return std::pair(std::move(control), std::move(processes));
  };
  const pid_t pid = ::fork();
  if (pid == 0) {
    child(meet(1).first);
    ::_exit(0);
  }
  auto [control, processes] = meet(0);
  parent(std::move(control), std::move(processes));
  ::kill(pid, SIGKILL);
  ::waitpid(pid, nullptr, 0);
}

TEST(LaneProcesses, ADeadRankIsNamedWithTheOperationThatWaitsForIt) {
  run_processes(
      [](std::unique_ptr<Communicator> control, PeerProcesses processes) {
        EXPECT_FALSE(processes.dead());
        const auto comm = stuck(std::move(control), 60s, "", std::move(processes));
        const Region full = region(*comm, 8);
        const WorkPtr work = comm->start_all_gather(gather_of(full, 0, 4, "h.3"));
        EXPECT_EQ(raised_by(*comm), "rank 1 died during all_gather of 'h.3' (noticed by rank 0)");
        EXPECT_EQ(comm->poisoned()->rank(), 1);
      },
      [](std::unique_ptr<Communicator>) {
        std::this_thread::sleep_for(300ms);
        ::raise(SIGKILL);
      });
}

// What NCCL is where a peer has broken its connections.
class BrokenTransport final : public LaneTransport {
 public:
  std::shared_ptr<std::byte> allocate(std::size_t bytes, BufferRole, std::string_view what) override {
    return make_cpu_device()->allocate(bytes, what);
  }
  void put_in(std::span<const LaneCall>) override { throw NcclError("connection closed", 6); }
};

TEST(LaneProcesses, ADeadRankExplainsWhatTheTransportSays) {
  run_processes(
      [](std::unique_ptr<Communicator> control, PeerProcesses processes) {
        LaneOptions options = options_of(make_cpu_device(), std::make_unique<BrokenTransport>(), std::move(control));
        options.processes = std::move(processes);
        const auto comm = make_lane_communicator(std::move(options));
        const Region full = region(*comm, 8);
        EXPECT_EQ(communication_error([&] { comm->start_all_gather(gather_of(full, 0, 4, "h.3")); }),
                  "rank 1 died during all_gather of 'h.3' (noticed by rank 0)");
      },
      [](std::unique_ptr<Communicator>) {
        std::this_thread::sleep_for(700ms);
        ::raise(SIGKILL);
      });
}

TEST(LaneProcesses, ARankThatHasFinishedMayGo) {
  run_processes(
      [](std::unique_ptr<Communicator> control, PeerProcesses processes) {
        const auto device = make_cpu_device();
        LaneOptions options =
            options_of(device, std::make_unique<SoloTransport>(device, Lane::kGather), std::move(control));
        options.processes = std::move(processes);
        const auto comm = make_lane_communicator(std::move(options));
        const Region full = region(*comm, 8);
        comm->start_all_gather(gather_of(full, 0, 4, "h.3"))->wait();
        std::this_thread::sleep_for(1s);
        EXPECT_FALSE(comm->poisoned());
        const std::string text = communication_error([&] { comm->barrier("alone"); });
        EXPECT_TRUE(contains(text, "rank 1 ")) << text;
      },
      [](std::unique_ptr<Communicator>) {});
}

}  // namespace
}  // namespace zb
