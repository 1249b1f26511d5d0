// The shm communicator with forked processes as ranks, some of which are killed.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "shm_support.h"

namespace zb {
namespace {

using namespace test::shm;

// Ranks as forked processes. A rank's exit status is 0, or 1 when its body threw or a check in it failed.
class Processes {
 public:
  Processes(int world_size, const RankBody& body, std::chrono::milliseconds timeout = 60s)
      : rendezvous_(unique_rendezvous()) {
    for (int rank = 0; rank < world_size; ++rank) {
      const pid_t pid = ::fork();
      if (pid == 0) ::_exit(run(options_of(rank, world_size, rendezvous_, timeout), body));
      pids_.push_back(pid);
    }
  }
  ~Processes() {
    for (const pid_t pid : pids_) {
      if (pid == 0) continue;
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
  }

  void kill(int rank) { ::kill(pids_[static_cast<std::size_t>(rank)], SIGKILL); }
  int exit_status(int rank) {
    int status = 0;
    ::waitpid(std::exchange(pids_[static_cast<std::size_t>(rank)], 0), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  }
  const std::string& rendezvous() const { return rendezvous_; }

 private:
  static int run(const ShmOptions& options, const RankBody& body) {
    try {
      const auto communicator = make_shm_communicator(options);
      body(*communicator);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %d: %s\n", options.rank, error.what());
      return 1;
    }
    return testing::Test::HasFailure() ? 1 : 0;
  }

  std::string rendezvous_;
  std::vector<pid_t> pids_;
};

// Tells the parent through a pipe, so that it acts at the right moment.
class Signal {
 public:
  Signal() { EXPECT_EQ(::pipe(ends_), 0); }
  ~Signal() {
    ::close(ends_[0]);
    ::close(ends_[1]);
  }
  void give() { EXPECT_EQ(::write(ends_[1], "x", 1), 1); }
  void await(int number) {
    char byte;
    for (int i = 0; i < number; ++i) EXPECT_EQ(::read(ends_[0], &byte, 1), 1);
  }

 private:
  int ends_[2];
};

TEST(ShmProcesses, Collectives) {
  Processes processes(4, [](Communicator& comm) {
    const Region buffer = shared(comm, 4 * kLargestNumel);
    const Region sum = local(comm, 4 * kLargestNumel);
    for (int i = 0; i < 20; ++i) {
      write_values(buffer.data(), DType::kFloat32, kLargestNumel,
                   [&](std::size_t k) { return value_of(comm.rank(), k); });
      comm.start_all_reduce({buffer, kLargestNumel, DType::kFloat32, "sum"})->wait();
      ASSERT_EQ(first_difference(buffer.data(), DType::kFloat32, kLargestNumel,
                                 [&](std::size_t k) { return sum_over_ranks(4, k); }),
                -1);
      comm.barrier("all have looked");
    }
  });
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(processes.exit_status(rank), 0);
}

TEST(ShmProcesses, KilledRankIsNoticedInTheMiddleOfACollective) {
  for (const int victim : {0, 2}) {
    Signal ready;
    Processes processes(3, [&](Communicator& comm) {
      const Region buffer = shared(comm, 4000);
      comm.barrier("ready");
      ready.give();
      if (comm.rank() == victim) ::pause();
      const std::string text = communication_error([&] {
        comm.start_reduce_scatter(
                {buffer, buffer.at(400 * static_cast<std::size_t>(comm.rank())), 100, DType::kFloat32, "h.3"})
            ->wait();
      });
      EXPECT_EQ(text.find("rank " + std::to_string(victim) + " died during reduce_scatter of 'h.3'"), 0U) << text;
    });
    ready.await(3);
    std::this_thread::sleep_for(50ms);
    processes.kill(victim);
    for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(processes.exit_status(rank), rank == victim ? 1000 + SIGKILL : 0);
  }
}

TEST(ShmProcesses, KilledRankIsNoticedWhileOthersAllocate) {
  Signal ready;
  Processes processes(3, [&](Communicator& comm) {
    ready.give();
    if (comm.rank() == 0) ::pause();
    const std::string text = communication_error([&] { shared(comm, 4000); });
    EXPECT_NE(text.find("rank 0 died during allocate"), std::string::npos) << text;
  });
  ready.await(3);
  processes.kill(0);
  for (int rank = 1; rank < 3; ++rank) EXPECT_EQ(processes.exit_status(rank), 0);
}

TEST(ShmProcesses, NothingIsLeftWhenAllAreKilled) {
  Signal ready;
  Processes processes(3, [&](Communicator& comm) {
    const Region buffer = shared(comm, 1 << 20);
    ready.give();
    for (;;) comm.start_all_reduce({buffer, 1 << 18, DType::kFloat32, "sum"})->wait();
  });
  ready.await(3);
  for (int rank = 0; rank < 3; ++rank) processes.kill(rank);
  for (int rank = 0; rank < 3; ++rank) processes.exit_status(rank);
  EXPECT_EQ(lines_with("/proc/net/unix", processes.rendezvous()), 0);
  EXPECT_EQ(lines_with("/proc/self/maps", "memfd:zerobench"), 0);
}

TEST(ShmProcesses, ForkedChildLeavesItsParentAlone) {
  Processes processes(2, [](Communicator& comm) {
    const Region buffer = shared(comm, 400);
    const pid_t child = ::fork();
    if (child == 0) {
      bool refused = false;
      try {
        comm.start_all_reduce({buffer, 100, DType::kFloat32, "child"});
      } catch (const StateError&) {
        refused = true;
      }
      comm.abort("a child's word");
      std::unique_ptr<Communicator>(&comm).reset();
      ::_exit(refused ? 0 : 1);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
    for (int i = 0; i < 10; ++i) comm.start_all_reduce({buffer, 100, DType::kFloat32, "parent"})->wait();
    comm.barrier("end");
  });
  for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(processes.exit_status(rank), 0);
}

}  // namespace
}  // namespace zb
