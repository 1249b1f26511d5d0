// The shm communicator with threads and with forked processes as ranks.
#include "comm/shm_communicator.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cpu_kernels.h"

namespace zb {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

std::string unique_rendezvous() {
  static int number = 0;
  return "test-" + std::to_string(::getpid()) + "-" + std::to_string(number++);
}

ShmOptions options_of(int rank, int world_size, const std::string& rendezvous,
                      std::chrono::milliseconds timeout = 60s) {
  ShmOptions options;
  options.rank = rank;
  options.world_size = world_size;
  options.rendezvous = rendezvous;
  options.timeout = timeout;
  return options;
}

using RankBody = std::function<void(Communicator&)>;

// Runs the body on threads as ranks and returns what each threw.
std::vector<std::exception_ptr> run_threads(int world_size, const RankBody& body,
                                            std::chrono::milliseconds timeout = 60s) {
  const std::string rendezvous = unique_rendezvous();
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(world_size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const auto communicator = make_shm_communicator(options_of(rank, world_size, rendezvous, timeout));
        body(*communicator);
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

void run_ranks(int world_size, const RankBody& body) {
  for (const std::exception_ptr& error : run_threads(world_size, body)) {
    if (error) std::rethrow_exception(error);
  }
}

// The message of the CommunicationError that this call must throw.
std::string communication_error(const std::function<void()>& call) {
  try {
    call();
  } catch (const CommunicationError& error) {
    return error.what();
  }
  return "no CommunicationError";
}

std::string message_of(const std::exception_ptr& error) {
  return communication_error([&] {
    if (error) std::rethrow_exception(error);
  });
}

// Small integers: their sums over ranks are exact in every dtype.
float value_of(int rank, std::size_t index) {
  return static_cast<float>(static_cast<std::size_t>(rank + 1) * (index % 7 + 1));
}

float sum_over_ranks(int world_size, std::size_t index) {
  float sum = 0;
  for (int rank = 0; rank < world_size; ++rank) sum += value_of(rank, index);
  return sum;
}

void write_values(std::byte* data, DType dtype, std::size_t numel, const std::function<float(std::size_t)>& value) {
  std::vector<float> values(numel);
  for (std::size_t i = 0; i < numel; ++i) values[i] = value(i);
  if (numel != 0) cpu_kernels().cast(data, dtype, values.data(), DType::kFloat32, numel);
}

// The first index whose value differs, or -1.
std::ptrdiff_t first_difference(const std::byte* data, DType dtype, std::size_t numel,
                                const std::function<float(std::size_t)>& value) {
  std::vector<float> values(numel);
  if (numel != 0) cpu_kernels().cast(values.data(), DType::kFloat32, data, dtype, numel);
  for (std::size_t i = 0; i < numel; ++i) {
    if (values[i] != value(i)) return static_cast<std::ptrdiff_t>(i);
  }
  return -1;
}

Region shared(Communicator& communicator, std::size_t bytes) {
  return {communicator.allocate(bytes, BufferRole::kShared, nullptr, Category::kStaging), 0};
}

Region local(Communicator& communicator, std::size_t bytes) {
  return {communicator.allocate(bytes, BufferRole::kPrivate, nullptr, Category::kStaging), 0};
}

std::vector<std::byte> exchange_int(Communicator& communicator, int value) {
  std::vector<std::byte> all(sizeof(int) * static_cast<std::size_t>(communicator.world_size()));
  communicator.exchange(std::as_bytes(std::span(&value, 1)), all, "value");
  return all;
}

constexpr DType kDtypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
constexpr std::size_t kNumels[] = {0, 1, 2, 31, 33, 1000, 4097, 70001};
constexpr std::size_t kLargestNumel = 70001;

class Collectives : public testing::TestWithParam<int> {
 protected:
  int world_size() const { return GetParam(); }
  std::size_t ranks() const { return static_cast<std::size_t>(GetParam()); }
};

TEST_P(Collectives, AllGather) {
  run_ranks(world_size(), [&](Communicator& comm) {
    const Region source = shared(comm, kLargestNumel * 4);
    const Region destination = local(comm, kLargestNumel * 4 * ranks());
    for (const std::size_t numel : kNumels) {
      const std::size_t bytes = numel * 4;
      write_values(source.data(), DType::kFloat32, numel, [&](std::size_t i) { return value_of(comm.rank(), i); });
      const WorkPtr work = comm.start_all_gather({source, destination, bytes, "unit"});
      work->wait();
      for (int rank = 0; rank < world_size(); ++rank) {
        const std::byte* slice = destination.data() + bytes * static_cast<std::size_t>(rank);
        EXPECT_EQ(first_difference(slice, DType::kFloat32, numel, [&](std::size_t i) { return value_of(rank, i); }), -1)
            << numel << " elements of rank " << rank;
      }
      work->wait_source_free();
    }
    EXPECT_EQ(comm.counters().calls[0], std::size(kNumels));
  });
}

TEST_P(Collectives, AllGatherInPlaceAtAnyByteSize) {
  run_ranks(world_size(), [&](Communicator& comm) {
    const Region full = shared(comm, 3 + kLargestNumel * ranks());
    for (const std::size_t bytes : kNumels) {
      const Region destination = full.at(3);
      const Region source = destination.at(bytes * static_cast<std::size_t>(comm.rank()));
      if (bytes != 0) std::memset(source.data(), comm.rank() + 1, bytes);
      comm.start_all_gather({source, destination, bytes, "unit"})->wait();
      for (std::size_t i = 0; i < bytes * ranks(); ++i) {
        ASSERT_EQ(static_cast<std::size_t>(destination.data()[i]), i / bytes + 1) << "byte " << i << " of " << bytes;
      }
      comm.barrier("all have looked");
    }
  });
}

TEST_P(Collectives, ReduceScatter) {
  run_ranks(world_size(), [&](Communicator& comm) {
    const Region source = shared(comm, kLargestNumel * 4 * ranks());
    const Region apart = local(comm, kLargestNumel * 4);
    for (const DType dtype : kDtypes) {
      for (const std::size_t numel : kNumels) {
        for (const bool in_place : {false, true}) {
          const std::size_t begin = numel * static_cast<std::size_t>(comm.rank());
          write_values(source.data(), dtype, numel * ranks(), [&](std::size_t i) { return value_of(comm.rank(), i); });
          const Region destination = in_place ? source.at(begin * dtype_bytes(dtype)) : apart;
          const WorkPtr work = comm.start_reduce_scatter({source, destination, numel, dtype, "unit"});
          work->wait();
          EXPECT_EQ(first_difference(destination.data(), dtype, numel,
                                     [&](std::size_t i) { return sum_over_ranks(world_size(), begin + i); }),
                    -1)
              << numel << " " << dtype_name(dtype) << (in_place ? " in place" : "");
          work->wait_source_free();
        }
      }
    }
  });
}

TEST_P(Collectives, AllReduce) {
  run_ranks(world_size(), [&](Communicator& comm) {
    const Region buffer = shared(comm, 64 + kLargestNumel * 4);
    for (const DType dtype : kDtypes) {
      for (const std::size_t numel : kNumels) {
        const Region region = buffer.at(dtype_bytes(dtype));
        write_values(region.data(), dtype, numel, [&](std::size_t i) { return value_of(comm.rank(), i); });
        const WorkPtr work = comm.start_all_reduce({region, numel, dtype, "unit"});
        work->wait();
        EXPECT_EQ(first_difference(region.data(), dtype, numel,
                                   [&](std::size_t i) { return sum_over_ranks(world_size(), i); }),
                  -1)
            << numel << " " << dtype_name(dtype);
        work->wait_source_free();
      }
    }
  });
}

TEST_P(Collectives, BroadcastFromEveryRoot) {
  run_ranks(world_size(), [&](Communicator& comm) {
    const Region buffer = shared(comm, kLargestNumel);
    for (int root = 0; root < world_size(); ++root) {
      for (const std::size_t bytes : kNumels) {
        if (bytes != 0) std::memset(buffer.data(), comm.rank() == root ? root + 1 : 0xff, bytes);
        const WorkPtr work = comm.start_broadcast({buffer, bytes, root, "unit"});
        work->wait();
        const auto is_right = [&](std::byte b) { return b == static_cast<std::byte>(root + 1); };
        EXPECT_TRUE(std::all_of(buffer.data(), buffer.data() + bytes, is_right)) << bytes << " from " << root;
        work->wait_source_free();
      }
    }
  });
}

TEST_P(Collectives, ExchangeOfAnySize) {
  run_ranks(world_size(), [&](Communicator& comm) {
    for (const std::size_t bytes : {0, 1, 8, 32, 33, 1000, 65536, 65537, 200001}) {
      std::vector<std::byte> mine(bytes);
      for (std::size_t i = 0; i < bytes; ++i)
        mine[i] = static_cast<std::byte>(i * 7 + static_cast<std::size_t>(comm.rank()));
      std::vector<std::byte> all(bytes * ranks());
      comm.exchange(mine, all, "message");
      for (std::size_t i = 0; i < all.size(); ++i) {
        ASSERT_EQ(all[i], static_cast<std::byte>(i % bytes * 7 + i / bytes)) << "byte " << i << " of " << bytes;
      }
    }
  });
}

// Each rank starts a batch before it waits for any, sleeps at odd moments, and reuses its sources: more operations than
// the ring holds are outstanding.
TEST_P(Collectives, ManyOutstandingOperations) {
  constexpr std::size_t kNumel = 257;
  constexpr int kBatch = 300;
  run_ranks(world_size(), [&](Communicator& comm) {
    const std::size_t bytes = kNumel * 4;
    const Region sources = shared(comm, bytes * kBatch);
    const Region gathered = local(comm, bytes * ranks() * kBatch);
    const Region sums = shared(comm, bytes * kBatch);
    for (int round = 0; round < 3; ++round) {
      const auto value = [&](int rank, int batch, std::size_t i) {
        return value_of(rank, i + static_cast<std::size_t>(batch + round));
      };
      std::vector<WorkPtr> gathers;
      std::vector<WorkPtr> reductions;
      for (int batch = 0; batch < kBatch; ++batch) {
        const std::size_t at = bytes * static_cast<std::size_t>(batch);
        for (const Region& region : {sources.at(at), sums.at(at)}) {
          write_values(region.data(), DType::kFloat32, kNumel,
                       [&](std::size_t i) { return value(comm.rank(), batch, i); });
        }
        gathers.push_back(comm.start_all_gather({sources.at(at), gathered.at(at * ranks()), bytes, "gather"}));
        reductions.push_back(comm.start_all_reduce({sums.at(at), kNumel, DType::kFloat32, "sum"}));
        if (batch % 50 == 10 * comm.rank()) std::this_thread::sleep_for(1ms);
        if (batch % 40 == comm.rank()) comm.progress();
      }
      while (!gathers.back()->test()) std::this_thread::yield();
      EXPECT_TRUE(gathers.front()->test()) << "operations end in the order of their start";
      for (int batch = 0; batch < kBatch; ++batch) {
        const auto index = static_cast<std::size_t>(batch);
        reductions[index]->wait();
        for (int rank = 0; rank < world_size(); ++rank) {
          const std::byte* slice = gathered.data() + bytes * (index * ranks() + static_cast<std::size_t>(rank));
          ASSERT_EQ(
              first_difference(slice, DType::kFloat32, kNumel, [&](std::size_t i) { return value(rank, batch, i); }),
              -1);
        }
        ASSERT_EQ(first_difference(sums.data() + bytes * index, DType::kFloat32, kNumel,
                                   [&](std::size_t i) {
                                     return sum_over_ranks(world_size(), i + static_cast<std::size_t>(batch + round));
                                   }),
                  -1);
      }
      for (const WorkPtr& work : gathers) work->wait_source_free();
      for (const WorkPtr& work : reductions) work->wait_source_free();
    }
  });
}

TEST_P(Collectives, BuffersAreZeroPageAlignedAndCounted) {
  run_ranks(world_size(), [&](Communicator& comm) {
    Ledger ledger;
    for (const BufferRole role : {BufferRole::kShared, BufferRole::kPrivate}) {
      auto buffer = comm.allocate(10'001, role, &ledger, Category::kGradients);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer->data()) % 4096, 0U);
      EXPECT_TRUE(std::all_of(buffer->data(), buffer->data() + 10'001, [](std::byte b) { return b == std::byte{0}; }));
      EXPECT_EQ(ledger.entry(Tier::kDevice, Category::kGradients).current_bytes, 10'001);
      buffer.reset();
      EXPECT_EQ(ledger.entry(Tier::kDevice, Category::kGradients).current_bytes, 0);
    }
    EXPECT_EQ(comm.allocate(0, BufferRole::kShared, nullptr, Category::kMaster)->bytes(), 0U);
  });
}

TEST_P(Collectives, TooLargeAllocationIsAnErrorOnAllRanksAndNoMore) {
  run_ranks(world_size(), [&](Communicator& comm) {
    constexpr std::size_t kHuge = std::size_t{1} << 46;
    EXPECT_THROW(comm.allocate(kHuge, BufferRole::kShared, nullptr, Category::kMaster), OutOfMemoryError);
    EXPECT_THROW(comm.allocate(kHuge, BufferRole::kPrivate, nullptr, Category::kMaster), OutOfMemoryError);
    exchange_int(comm, 1);
    EXPECT_EQ(shared(comm, 100).buffer->bytes(), 100U);
  });
}

TEST_P(Collectives, WrongArgumentsAreNamed) {
  run_ranks(world_size(), [&](Communicator& comm) {
    const Region source = shared(comm, 400 * ranks());
    const Region destination = local(comm, 400 * ranks());
    EXPECT_THROW(comm.start_all_gather({destination, source, 400, ""}), ArgumentError) << "private source";
    EXPECT_THROW(comm.start_all_gather({source, destination.at(1), 400, ""}), ArgumentError) << "too long";
    EXPECT_THROW(comm.start_all_gather({{}, destination, 400, ""}), ArgumentError) << "no buffer";
    EXPECT_THROW(comm.start_reduce_scatter({source.at(2), destination, 10, DType::kFloat32, ""}), ArgumentError);
    EXPECT_THROW(comm.start_reduce_scatter({source, source.at(1 + 400 * ranks() - 400), 100, DType::kFloat32, ""}),
                 ArgumentError);
    EXPECT_THROW(comm.start_all_reduce({destination, 100, DType::kFloat32, ""}), ArgumentError);
    EXPECT_THROW(comm.start_broadcast({source, 100, world_size(), ""}), ArgumentError);
    EXPECT_THROW(comm.start_reduce_scatter({source, destination, SIZE_MAX / 2, DType::kFloat32, ""}), ArgumentError);
    if (world_size() > 1) {
      EXPECT_THROW(comm.start_all_gather({source.at(2), source, 100, ""}), ArgumentError) << "overlap";
    }
    std::byte one{};
    EXPECT_THROW(comm.exchange({&one, 1}, {}, ""), ArgumentError);
    exchange_int(comm, 1);  // nothing was started
  });
}

TEST_P(Collectives, AbortReachesEveryRank) {
  const auto errors = run_threads(world_size(), [&](Communicator& comm) {
    if (comm.rank() == world_size() - 1) comm.abort("the disk is full");
    for (;;) comm.barrier("forever");
  });
  for (const std::exception_ptr& error : errors) {
    EXPECT_NE(message_of(error).find("the disk is full"), std::string::npos) << message_of(error);
  }
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, Collectives, testing::Values(1, 2, 3, 4, 5));

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
      [](Communicator& comm, Region a, Region) { comm.start_broadcast({a, 100, comm.rank(), "root"}); },
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

TEST(ShmFaults, RankThatLeavesIsNamed) {
  const auto errors = run_threads(3, [](Communicator& comm) {
    const Region buffer = shared(comm, 400);
    if (comm.rank() == 1) return;
    comm.start_all_reduce({buffer, 100, DType::kFloat32, "h.3"})->wait();
  });
  EXPECT_EQ(message_of(errors[1]), "no CommunicationError");
  expect_same_error({errors[0], errors[2]}, {"rank 1 left during all_reduce of 'h.3'"});
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

// Lines of a /proc file that hold the text.
int lines_with(const std::string& path, const std::string& text) {
  std::ifstream file(path);
  int number = 0;
  for (std::string line; std::getline(file, line);) number += line.find(text) != std::string::npos ? 1 : 0;
  return number;
}

int open_descriptors() {
  int number = 0;
  for (int i = 0; i < 1024; ++i) number += ::access(("/proc/self/fd/" + std::to_string(i)).c_str(), F_OK) == 0 ? 1 : 0;
  return number;
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
