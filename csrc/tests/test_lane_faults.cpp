// Communicators in a lane whose operations fail or never end, and whose peers die: with threads and forked processes as
// ranks.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <span>
#include <thread>

#include "comm/solo_transport.h"
#include "fork_support.h"
#include "lane_communicators.h"
#include "rank_threads.h"

namespace zb {
namespace {

using namespace test::lanes;
using test::communication_error;
using test::StuckTransport;
using test::ThreadDevice;
using test::unique_rendezvous;
using Clock = std::chrono::steady_clock;

TEST(LaneFaults, AStalledOperationEndsAtTheTimeoutOnAllRanks) {
  run_ranks(2, [](int rank, std::unique_ptr<Communicator> control) {
    const auto comm = stuck(std::move(control), 400ms);
    const Region full = region(*comm, 8);
    if (rank == 0) comm->start_all_gather(gather_of(full, 0, 4, "h.3"));
    const std::string text = raised_by(*comm);
    EXPECT_TRUE(contains(text, "rank 0 waited 0.40 s for rank 1 in all_gather of 'h.3'")) << text;
    EXPECT_EQ(contains(text, "rank 0 aborted"), rank == 1) << text;
    EXPECT_TRUE(rank == 1 || comm->poisoned()->rank() == 1);
  });
}

// What rank 0 of `world_size` raises, whose lane waits in an all_gather while `others` do what they do.
std::string raised_while(int world_size, const std::function<void(Communicator&)>& others) {
  std::string text;
  run_ranks(world_size, [&](int rank, std::unique_ptr<Communicator> control) {
    const auto comm = stuck(std::move(control), 60s);
    const Region full = region(*comm, 64);
    if (rank != 0) {
      others(*comm);
      return;
    }
    comm->start_all_gather(gather_of(full, 0, 4, "h.3"));
    text = raised_by(*comm);
    EXPECT_EQ(comm->poisoned()->rank(), world_size - 1);
  });
  return text;
}

TEST(LaneFaults, APeerThatStoppedIsNamedLongBeforeTheTimeout) {
  const std::string text = raised_while(2, [](Communicator& comm) {
    comm.stop("raised Planted", 1);
    EXPECT_TRUE(contains(raised_by(comm), "rank 0 aborted: rank 1 raised Planted"));
  });
  EXPECT_EQ(text, "rank 1 raised Planted and did not come to all_gather of 'h.3' (noticed by rank 0)");
}

TEST(LaneFaults, APeerThatStoppedIsNamedRatherThanOneThatIsSilent) {
  const std::string text = raised_while(3, [](Communicator& comm) {
    if (comm.rank() == 2) comm.stop("raised Planted", 1);
    static_cast<void>(raised_by(comm));
  });
  EXPECT_EQ(text, "rank 2 raised Planted and did not come to all_gather of 'h.3' (noticed by rank 0)");
}

TEST(LaneFaults, APeerThatLeftIsNamedLongBeforeTheTimeout) {
  EXPECT_EQ(raised_while(2, [](Communicator&) {}), "rank 1 left during all_gather of 'h.3' (noticed by rank 0)");
}

// Nobody gives up while rank 0's lane waits in `waiting` and rank 1 does `other`, and rank 0 ends it.
void expect_patience(const std::function<void(Communicator&, const Region&)>& waiting,
                     const std::function<void(Communicator&, const Region&)>& other) {
  run_ranks(2, [&](int rank, std::unique_ptr<Communicator> control) {
    const auto comm = stuck(std::move(control), 60s);
    const Region full = region(*comm, 8);
    (rank == 0 ? waiting : other)(*comm, full);
    if (rank == 0) {
      std::this_thread::sleep_for(3 * kReturnTime);
      comm->abort("it has waited");
    }
    EXPECT_TRUE(contains(raised_by(*comm), "rank 0 aborted: it has waited"));
  });
}

void start_gather(Communicator& comm, const Region& full) {
  comm.start_all_gather(gather_of(full, comm.rank(), 4, "h.3"));
}

TEST(LaneFaults, APeerThatStoppedAfterItPutTheOperationInIsWaitedFor) {
  expect_patience(start_gather, [](Communicator& comm, const Region& full) {
    start_gather(comm, full);
    comm.stop("raised Planted", 1);
  });
}

TEST(LaneFaults, APeerThatGoesOnIsWaitedFor) {
  expect_patience(start_gather, [](Communicator& comm, const Region&) {
    comm.stop("raised Planted", 1);
    comm.go_on(1);
  });
}

TEST(LaneFaults, RanksThatStoppedAlikeWaitForEachOther) {
  const auto stop = [](Communicator& comm, const Region&) { comm.stop("raised Planted", 1); };
  expect_patience(
      [&](Communicator& comm, const Region& full) {
        stop(comm, full);
        start_gather(comm, full);
      },
      stop);
}

TEST(LaneFaults, AGatherOfFinalShardsWaitsForNoPeer) {
  expect_patience(
      [](Communicator& comm, const Region& full) {
        AllGather gather = gather_of(full, 0, 4, "h.3");
        gather.is_final = true;
        comm.start_all_gather(gather);
      },
      [](Communicator& comm, const Region&) { comm.stop("raised Planted", 1); });
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

TEST(LaneFaults, AnAbortIsRepeatedUntilTheLaneHasEnded) {
  run_ranks(2, [](int rank, std::unique_ptr<Communicator> control) {
    const auto device = std::make_shared<ThreadDevice>();
    auto transport = std::make_unique<StuckTransport>(device, Lane::kGather);
    transport->need_aborts(3);
    const auto comm = make_lane_communicator(options_of(device, std::move(transport), std::move(control), 100ms));
    const Region full = region(*comm, 8);
    comm->start_all_gather(gather_of(full, rank, 4, "h.3"));
    device->synchronize(device->mark(Lane::kGather));
    EXPECT_TRUE(contains(raised_by(*comm), "waited 0.10 s for all_gather of 'h.3'"));
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

#if !defined(__SANITIZE_THREAD__)
// In the child a new thread may have the stack, and so the handle, that the watchdog has in the parent.
TEST(LaneProcesses, AForkedChildLeavesItsThreadsAndItsParentAlone) {
  run_processes(
      [](std::unique_ptr<Communicator> control, PeerProcesses processes) {
        auto comm = stuck(std::move(control), 60s, "", std::move(processes));
        EXPECT_TRUE(test::holds_in_child([&] {
          std::atomic<bool> go = false;
          std::thread own([&] {
            while (!go) std::this_thread::yield();
          });
          comm.reset();
          go = true;
          own.join();
          return true;
        }));
        const Region full = region(*comm, 8);
        const WorkPtr work = comm->start_all_gather(gather_of(full, 0, 4, "h.3"));
        EXPECT_EQ(raised_by(*comm), "rank 1 died during all_gather of 'h.3' (noticed by rank 0)");
      },
      [](std::unique_ptr<Communicator>) {
        std::this_thread::sleep_for(300ms);
        ::raise(SIGKILL);
      });
}
#endif

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
