// Faults of ranks on the shm communicator, rendezvous, and what must not stay behind; with threads as ranks.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <exception>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/interrupts.h"
#include "fork_support.h"
#include "shm_support.h"

namespace zb {
namespace {

using namespace test::shm;
using Clock = std::chrono::steady_clock;

void expect_same_error(const std::vector<std::exception_ptr>& errors, const std::vector<std::string>& parts) {
  for (const std::exception_ptr& error : errors) {
    EXPECT_EQ(message_of(error), message_of(errors[0]));
    for (const std::string& part : parts) {
      EXPECT_NE(message_of(error).find(part), std::string::npos) << part << " in: " << message_of(error);
    }
  }
}

TEST(ShmFaults, DifferentCollectives) {
  expect_same_error(run_threads(3,
                                [](Communicator& comm) {
                                  const Region buffer = shared(comm, 1200);
                                  const Region apart = local(comm, 1200);
                                  if (comm.rank() == 1) {
                                    comm.start_all_gather({buffer, apart, 400, "h.7"})->wait();
                                  } else {
                                    comm.start_reduce_scatter({buffer, apart, 100, DType::kFloat32, "h.3"})->wait();
                                  }
                                  comm.barrier("after");
                                }),
                    {"all_gather of 'h.7'", "reduce_scatter of 'h.3'", "rank 1", "400 bytes"});
}

TEST(ShmFaults, DifferentSizesDtypesRootsAndBuffers) {
  const std::vector<std::function<void(Communicator&, Region, Region)>> calls{
      [](Communicator& comm, Region a, Region) {
        comm.start_all_reduce({a, comm.rank() == 1 ? 99U : 100U, DType::kFloat32, "size"})->wait();
      },
      [](Communicator& comm, Region a, Region) {
        const DType dtype = comm.rank() == 1 ? DType::kFloat16 : DType::kBFloat16;
        comm.start_all_reduce({a, 100, dtype, "dtype"})->wait();
      },
      [](Communicator& comm, Region a, Region) {
        comm.start_broadcast({a, 100, comm.rank(), "root"});
        comm.barrier("after");  // each is through with its own
      },
      [](Communicator& comm, Region a, Region b) {
        comm.start_all_reduce({comm.rank() == 1 ? a : b, 100, DType::kFloat32, "buffer"})->wait();
      },
      [](Communicator& comm, Region, Region) { shared(comm, comm.rank() == 1 ? 1000 : 2000); },
  };
  for (const auto& call : calls) {
    expect_same_error(run_threads(2,
                                  [&](Communicator& comm) {
                                    const Region a = shared(comm, 400);
                                    const Region b = shared(comm, 400);
                                    call(comm, a, b);
                                    ADD_FAILURE() << "data was moved";
                                    comm.barrier("after");
                                  }),
                      {"all ranks must make the same calls"});
  }
}

TEST(ShmFaults, StuckRankRaisesEverywhereWithOneCause) {
  std::vector<std::string> later(3);
  std::atomic<int> given_up_num{0};
  const auto errors = run_threads(
      3,
      [&](Communicator& comm) {
        const Region buffer = shared(comm, 400);
        comm.barrier("together");
        try {
          // The stuck rank comes back when the others have given up.
          while (comm.rank() == 2 && given_up_num < 2) std::this_thread::sleep_for(1ms);
          comm.start_all_reduce({buffer, 100, DType::kFloat32, "h.3"})->wait();
        } catch (const CommunicationError&) {
          ++given_up_num;
          later[static_cast<std::size_t>(comm.rank())] = communication_error([&] { comm.barrier("later"); });
          throw;
        }
      },
      1s);
  expect_same_error(errors, {"waited 1.00 s for rank 2 in all_reduce of 'h.3'"});
  for (const std::string& text : later) EXPECT_EQ(text, message_of(errors[0]));
}

thread_local bool has_signal = false;

void raise_for_signal() {
  if (std::exchange(has_signal, false)) throw Interrupted("Planted", std::make_exception_ptr(0));
}

TEST(ShmFaults, ASignalEndsTheWaitOfItsRankAndTellsTheOthers) {
  set_signal_handlers(raise_for_signal);
  std::atomic<bool> is_gone{false};
  const auto errors = run_threads(
      3,
      [&](Communicator& comm) {
        const Region buffer = shared(comm, 400);
        comm.barrier("together");
        has_signal = comm.rank() == 1;
        while (comm.rank() == 2 && !is_gone) std::this_thread::sleep_for(1ms);
        try {
          comm.start_all_reduce({buffer, 100, DType::kFloat32, "h.3"})->wait();
        } catch (const Interrupted& interrupt) {
          EXPECT_STREQ(interrupt.what(), "interrupted by Planted");
          EXPECT_EQ(comm.rank(), 1);
          is_gone = true;
          comm.barrier("later");
        }
      },
      60s);
  set_signal_handlers(nullptr);
  expect_same_error(errors, {"rank 1 was interrupted by Planted while it waited for all_reduce of 'h.3'"});
}

TEST(ShmFaults, RankThatLeavesIsNamed) {
  const auto errors = run_threads(3, [](Communicator& comm) {
    const Region buffer = shared(comm, 400);
    if (comm.rank() == 1) return;
    comm.start_all_reduce({buffer, 100, DType::kFloat32, "h.3"})->wait();
  });
  EXPECT_EQ(message_of(errors[1]), "no CommunicationError");
  expect_same_error({errors[0], errors[2]}, {"rank 1 left during all_reduce of 'h.3'"});
}

TEST(ShmFaults, RankThatStoppedIsNamedLongBeforeTheTimeout) {
  std::atomic<int> given_up_num{0};
  const auto errors = run_threads(3, [&](Communicator& comm) {
    comm.barrier("together");
    if (comm.rank() == 1) {
      comm.stop("raised Planted", 1);
      while (given_up_num < 2) std::this_thread::sleep_for(1ms);
    }
    const Clock::time_point began = Clock::now();
    try {
      comm.barrier("h.3");
    } catch (const CommunicationError&) {
      ++given_up_num;
      EXPECT_LT(Clock::now() - began, 30s);
      throw;
    }
  });
  expect_same_error(errors, {"rank 1 raised Planted and did not come to barrier of 'h.3'"});
}

TEST(ShmFaults, RankThatGoesOnIsWaitedFor) {
  run_ranks(3, [](Communicator& comm) {
    comm.barrier("together");
    if (comm.rank() == 1) {
      comm.stop("raised Planted", 1);
      comm.go_on(1);
      std::this_thread::sleep_for(2 * kReturnTime);
    }
    comm.barrier("h.3");
  });
}

TEST(ShmFaults, RanksThatStoppedAlikeWaitForEachOther) {
  run_ranks(3, [](Communicator& comm) {
    comm.stop("raised Planted", 1);
    if (comm.rank() == 1) std::this_thread::sleep_for(2 * kReturnTime);
    comm.go_on(1);
    comm.barrier("h.3");
  });
}

TEST(ShmFaults, RankThatLeavesAfterItsPartHarmsNobody) {
  run_ranks(4, [](Communicator& comm) {
    const Region source = shared(comm, 400);
    const Region destination = local(comm, 1600);
    std::memset(source.data(), comm.rank() + 1, 400);
    if (comm.rank() != 0) std::this_thread::sleep_for(std::chrono::milliseconds(5 * comm.rank()));
    comm.start_all_gather({source, destination, 400, "last"})->wait();
    for (std::size_t i = 0; i < 1600; ++i) ASSERT_EQ(static_cast<std::size_t>(destination.data()[i]), i / 400 + 1);
  });
}

// Two ranks find the same error after an exchange: the later one must not hear of the earlier one's instead.
TEST(ShmFaults, MessagesThatAllHaveSentArriveAfterAnAbort) {
  const auto errors = run_threads(3, [](Communicator& comm) {
    std::array<int, 3> all{};
    const int mine = comm.rank() + 1;
    const auto of_all = std::as_writable_bytes(std::span(all));
    const auto expect_all = [&] { EXPECT_EQ(all, (std::array{1, 2, 3})); };
    const WorkPtr work = comm.start_exchange(std::as_bytes(std::span(&mine, 1)), of_all, "facts");
    if (comm.rank() == 1) {
      work->wait(Lane::kCompute);
      expect_all();
      comm.abort("no memory");
    } else {
      while (!comm.poisoned()) std::this_thread::sleep_for(1ms);
      if (comm.rank() == 0) {
        work->wait(Lane::kCompute);
      } else {
        EXPECT_TRUE(work->test());
      }
      expect_all();
    }
    comm.barrier("next");
  });
  for (const auto& error : errors) EXPECT_EQ(message_of(error), "rank 1 aborted: no memory");
}

// Peers may have let go of what a collective of data reads.
TEST(ShmFaults, AnAbortEndsCollectivesOfDataAndWhatComesAfterThem) {
  run_ranks(2, [](Communicator& comm) {
    const auto buffer = comm.allocate(64, BufferRole::kShared, nullptr, Category::kStaging);
    const WorkPtr gather =
        comm.start_all_gather({{buffer, static_cast<std::size_t>(comm.rank()) * 32}, {buffer, 0}, 32, "h.0"});
    std::array<int, 2> all{};
    const int mine = comm.rank();
    const WorkPtr work =
        comm.start_exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)), "facts");
    if (comm.rank() == 1) {
      work->wait(Lane::kCompute);
      comm.abort("no memory");
      return;
    }
    while (!comm.poisoned()) std::this_thread::sleep_for(1ms);
    EXPECT_EQ(communication_error([&] { static_cast<void>(work->test()); }), "rank 1 aborted: no memory");
    EXPECT_EQ(communication_error([&] { gather->wait(Lane::kCompute); }), "rank 1 aborted: no memory");
  });
}

TEST(ShmFaults, WorkOutlivesItsCommunicator) {
  const std::string rendezvous = unique_rendezvous();
  std::thread other([&] {
    const auto comm = make_shm_communicator(options_of(1, 2, rendezvous));
    const Region buffer = shared(*comm, 400);
    const WorkPtr work = comm->start_all_reduce({buffer, 100, DType::kFloat32, "h.3"});
    EXPECT_NE(communication_error([&] { work->wait(); }).find("rank 0 left during all_reduce of 'h.3'"),
              std::string::npos);
  });
  auto comm = make_shm_communicator(options_of(0, 2, rendezvous));
  const Region buffer = shared(*comm, 400);
  const WorkPtr work = comm->start_all_reduce({buffer, 100, DType::kFloat32, "h.3"});
  comm.reset();
  EXPECT_THROW(work->wait(), StateError);
  EXPECT_THROW(work->test(), StateError);
  buffer.data()[399] = std::byte{1};
  other.join();
}

TEST(ShmFaults, FinishedWorkOutlivesItsCommunicator) {
  std::vector<WorkPtr> works(2);
  run_ranks(2, [&](Communicator& comm) {
    WorkPtr& work = works[static_cast<std::size_t>(comm.rank())];
    work = comm.start_all_reduce({shared(comm, 400), 100, DType::kFloat32, "h.3"});
    work->wait();
  });
  for (const WorkPtr& work : works) {
    EXPECT_TRUE(work->test());
    EXPECT_NO_THROW(work->wait());
    EXPECT_THROW(work->wait_source_free(), StateError);
    EXPECT_THROW(static_cast<void>(work->test_source_free()), StateError);
  }
}

TEST(ShmFaults, AnExchangeWhoseHandleIsGoneWritesNothing) {
  run_ranks(2, [](Communicator& comm) {
    std::array<int, 2> all{-1, -1};
    const int mine = comm.rank();
    comm.start_exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)), "facts");
    comm.barrier("behind it");
    EXPECT_EQ(all, (std::array{-1, -1}));
  });
}

// The peer's collectives lie where those of the operation to blame have lain.
TEST(ShmFaults, WhatDiffersIsNamedWhereAPeerIsFarAhead) {
  std::atomic<bool> is_ahead = false;
  const auto errors = run_threads(2, [&](Communicator& comm) {
    const Region source = shared(comm, 400);
    const Region destination = local(comm, 800);
    for (int i = 0; i < 150; ++i) comm.barrier("together");
    comm.start_broadcast({source, 4, comm.rank(), "h.7"});  // needs no peer, so the next one notices
    while (comm.rank() == 0 && !is_ahead) std::this_thread::sleep_for(1ms);
    WorkPtr work;
    for (std::size_t i = 0; i < (comm.rank() == 0 ? 1 : 200); ++i) {
      work = comm.start_all_gather({source, destination, 4 + i, "ahead"});
    }
    is_ahead = true;
    work->wait();
  });
  expect_same_error(errors, {"broadcast of 'h.7'", "root 0", "root 1"});
}

// What one communicator allocated may be the source of another of the same ranks.
TEST(ShmTwoCommunicators, ShareBuffers) {
  const std::string rendezvous = unique_rendezvous();
  run_ranks(3, [&](Communicator& reductions) {
    const auto gathers = make_shm_communicator(options_of(reductions.rank(), 3, rendezvous));
    for (int i = 0; i < 20; ++i) {
      const Region full = shared(i % 2 == 0 ? reductions : *gathers, 1200);
      const Region own = full.at(400 * static_cast<std::size_t>(reductions.rank()));
      write_values(full.data(), DType::kFloat32, 300, [&](std::size_t k) { return value_of(reductions.rank(), k); });
      reductions.start_reduce_scatter({full, own, 100, DType::kFloat32, "reduce"})->wait();
      gathers->start_all_gather({own, full, 400, "gather"})->wait();
      EXPECT_EQ(first_difference(full.data(), DType::kFloat32, 300, [](std::size_t k) { return sum_over_ranks(3, k); }),
                -1);
    }
  });
}

// Rank 0 waits for the peers to read its reduction's source before it starts the gather that they wait for.
TEST(ShmTwoCommunicators, OneIsServedWhileTheOtherBlocks) {
  const std::string rendezvous = unique_rendezvous();
  const auto errors = run_threads(
      3,
      [&](Communicator& reductions) {
        const auto gathers = make_shm_communicator(options_of(reductions.rank(), 3, rendezvous, 5s));
        gathers->serve_while_blocked(reductions);
        const Region source = shared(reductions, 1200);
        const Region destination = local(reductions, 1200);
        const WorkPtr reduction = reductions.start_reduce_scatter({source, destination, 100, DType::kFloat32, "r"});
        if (reductions.rank() == 0) reduction->wait_source_free();
        gathers->start_all_gather({source, destination, 400, "g"})->wait();
        reduction->wait();
        gathers->barrier("end");
      },
      5s);
  for (const std::exception_ptr& error : errors) EXPECT_EQ(message_of(error), "no CommunicationError");
}

// What it would write to may be gone by the time that the peers come.
TEST(ShmTwoCommunicators, AnExchangeThatRaisedWritesNothingLater) {
  const std::string rendezvous = unique_rendezvous();
  std::atomic<bool> has_raised = false;
  std::atomic<bool> has_come = false;
  run_ranks(2, [&](Communicator& reductions) {
    const auto gathers = make_shm_communicator(options_of(reductions.rank(), 2, rendezvous, 5s));
    gathers->serve_while_blocked(reductions);
    std::array<int, 2> all{-1, -1};
    const int mine = reductions.rank() + 1;
    const auto exchange = [&] {
      gathers->exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)), "facts");
    };
    if (reductions.rank() == 1) {
      reductions.abort("no memory");
      while (!has_raised) std::this_thread::sleep_for(1ms);
      exchange();
      has_come = true;
      EXPECT_EQ(all, (std::array{1, 2}));
      return;
    }
    EXPECT_EQ(communication_error(exchange), "rank 1 aborted: no memory");
    all = {-1, -1};
    has_raised = true;
    while (!has_come) std::this_thread::sleep_for(1ms);
    gathers->progress();
    EXPECT_EQ(all, (std::array{-1, -1}));
  });
}

TEST(ShmTwoCommunicators, OnlyThoseOfTheSameRanksAreServed) {
  run_ranks(2, [](Communicator& comm) {
    const auto solo = make_shm_communicator({});
    EXPECT_THROW(comm.serve_while_blocked(*solo), ArgumentError);
    EXPECT_THROW(comm.serve_while_blocked(comm), ArgumentError);
  });
}

TEST(ShmOrder, SourceThatIsStillToBeWrittenIsRefused) {
  run_ranks(3, [](Communicator& comm) {
    const Region full = shared(comm, 1200);
    const Region own = full.at(400 * static_cast<std::size_t>(comm.rank()));
    comm.barrier("together");
    const WorkPtr reduction = comm.start_reduce_scatter({full, own, 100, DType::kFloat32, "h.3"});
    EXPECT_THROW(comm.start_all_gather({own, full, 400, "h.3"}), StateError);
    reduction->wait();
    // A gather in place writes the slices of others only, so its source may be read again at once.
    const WorkPtr first = comm.start_all_gather({own, full, 400, "h.3"});
    const WorkPtr second = comm.start_all_gather({own, full, 400, "h.3"});
    EXPECT_THROW(comm.start_all_reduce({full, 300, DType::kFloat32, "h.3"}), StateError);
    second->wait();
    EXPECT_TRUE(first->test());
    comm.barrier("end");
  });
}

TEST(ShmFaults, BufferOfAnotherWorldIsRefused) {
  run_ranks(2, [](Communicator& comm) {
    const auto solo = make_shm_communicator({});
    const Region foreign = shared(*solo, 400);
    EXPECT_THROW(comm.start_all_reduce({foreign, 100, DType::kFloat32, ""}), ArgumentError);
  });
}

TEST(ShmRendezvous, MissingRankIsNamed) {
  const auto begin = Clock::now();
  const std::string text =
      communication_error([] { make_shm_communicator(options_of(0, 3, unique_rendezvous(), 200ms)); });
  EXPECT_NE(text.find("rank(s) 1, 2"), std::string::npos) << text;
  EXPECT_NE(communication_error([] {
              make_shm_communicator(options_of(1, 2, unique_rendezvous(), 200ms));
            }).find("found no rank 0"),
            std::string::npos);
  EXPECT_GE(Clock::now() - begin, 400ms);
}

TEST(ShmRendezvous, DisagreementIsAnErrorOnAllRanks) {
  struct Case {
    std::vector<std::pair<int, int>> rank_and_world_size;
    std::string part;
  };
  for (const Case& c :
       {Case{{{0, 2}, {1, 3}, {2, 3}}, "world_size 3"}, Case{{{0, 3}, {1, 3}, {1, 3}}, "two processes"}}) {
    const std::string rendezvous = unique_rendezvous();
    std::vector<std::string> texts(3);
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < 3; ++i) {
      threads.emplace_back([&, i] {
        const auto [rank, world_size] = c.rank_and_world_size[i];
        texts[i] = communication_error([&] { make_shm_communicator(options_of(rank, world_size, rendezvous, 20s)); });
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::string& text : texts) EXPECT_NE(text.find(c.part), std::string::npos) << text;
  }
}

TEST(ShmRendezvous, ARankThatConnectsAfterADisagreementHearsOfIt) {
  const std::string rendezvous = unique_rendezvous();
  const auto connect = [&](int rank, int world_size) {
    return communication_error([&] { make_shm_communicator(options_of(rank, world_size, rendezvous, 3s)); });
  };
  std::string of_rank1;
  std::string of_rank2;
  std::thread rank1([&] { of_rank1 = connect(1, 2); });
  std::thread rank2([&] {
    std::this_thread::sleep_for(300ms);
    of_rank2 = connect(2, 3);
  });
  const std::string of_rank0 = connect(0, 3);
  rank1.join();
  rank2.join();
  for (const std::string& text : {of_rank0, of_rank1, of_rank2}) {
    EXPECT_NE(text.find("rank 1 was started with world_size 2"), std::string::npos) << text;
  }
}

// Whether `body` fails for it where this process may open `more` files than it has open.
template <typename Body>
bool lacks_files(rlim_t more, const Body& body) {
  const int next = ::dup(STDERR_FILENO);
  ::close(next);
  rlimit before{};
  EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit few{static_cast<rlim_t>(next) + more, before.rlim_max};
  EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  try {
    body();
  } catch (const IoError& error) {
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);  // sanitizers open files too
    return error.code().value() == EMFILE;
  }
  return false;
}

TEST(ShmRendezvous, ARankThatMayOpenTooFewFilesSaysSo) {
  const std::string rendezvous = unique_rendezvous();
  std::string of_peer;
  std::thread peer(
      [&] { of_peer = communication_error([&] { make_shm_communicator(options_of(1, 2, rendezvous, 5s)); }); });
  EXPECT_TRUE(test::holds_in_child([&] {
    return lacks_files(1, [&] { make_shm_communicator(options_of(0, 2, rendezvous, 5s)); });  // one to listen
  }));
  peer.join();
  EXPECT_NE(of_peer.find("rank 0 died or left while ranks connected"), std::string::npos) << of_peer;
}

#if !defined(__SANITIZE_ADDRESS__)
// The sanitizer of undefined behaviour opens files to look at an exception, too.
TEST(ShmFaults, ARankThatMayOpenTooFewFilesForAnAllocationTellsTheOthers) {
  const std::string rendezvous = unique_rendezvous();
  std::string of_peer;
  std::thread peer([&] {
    const auto comm = make_shm_communicator(options_of(0, 2, rendezvous));
    of_peer = communication_error([&] { shared(*comm, 400); });
  });
  EXPECT_TRUE(test::holds_in_child([&] {
    const auto comm = make_shm_communicator(options_of(1, 2, rendezvous));
    return lacks_files(0, [&] { shared(*comm, 400); });
  }));
  peer.join();
  EXPECT_NE(of_peer.find("ulimit -n"), std::string::npos) << of_peer;
}
#endif

TEST(ShmRendezvous, OneNameServesOneCommunicatorAfterAnother) {
  const std::string rendezvous = unique_rendezvous() + std::string(300, 'x');
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      std::vector<std::unique_ptr<Communicator>> alive;
      for (int i = 0; i < 10; ++i) {
        alive.push_back(make_shm_communicator(options_of(rank, 3, rendezvous)));
        exchange_int(*alive.back(), rank);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(ShmRendezvous, OptionsAreChecked) {
  EXPECT_THROW(make_shm_communicator(options_of(0, 0, "x")), ArgumentError);
  EXPECT_THROW(make_shm_communicator(options_of(2, 2, "x")), ArgumentError);
  EXPECT_THROW(make_shm_communicator(options_of(0, 2, "")), ArgumentError);
  EXPECT_THROW(make_shm_communicator(options_of(0, 2, "x", 0ms)), ArgumentError);
}

TEST(ShmLeftovers, NothingStaysOpenOrMapped) {
  const int descriptors = open_descriptors();
  run_ranks(3, [](Communicator& comm) {
    const Region buffer = shared(comm, 1 << 20);
    comm.start_all_reduce({buffer, 1000, DType::kFloat32, "sum"})->wait();
  });
  run_threads(3, [](Communicator& comm) {
    const Region buffer = shared(comm, 1 << 20);
    if (comm.rank() == 1) throw StateError("a failing rank");
    comm.barrier("never");
  });
  EXPECT_EQ(open_descriptors(), descriptors);
  EXPECT_EQ(lines_with("/proc/self/maps", "memfd:zerobench"), 0);
  EXPECT_EQ(lines_with("/proc/net/unix", "test-" + std::to_string(::getpid())), 0);
}

}  // namespace
}  // namespace zb
