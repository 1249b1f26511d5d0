// The collectives of the shm communicator, with threads as ranks.
#include "comm/shm_communicator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "shm_support.h"

namespace zb {
namespace {

using namespace test::shm;

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

// 2^24 and then ones, of which each alone is lost in float; added to each other first they would not be.
TEST_P(Collectives, SumsAreRoundedInTheOrderOfRanks) {
  run_ranks(world_size(), [&](Communicator& comm) {
    constexpr std::size_t kNumel = 1000;
    const float mine = comm.rank() == 0 ? 16777216.0F : 1.0F;
    const auto expected = [](std::size_t) { return 16777216.0F; };
    const Region source = shared(comm, kNumel * 4 * ranks());
    const Region slice = local(comm, kNumel * 4);
    write_values(source.data(), DType::kFloat32, kNumel * ranks(), [&](std::size_t) { return mine; });
    const WorkPtr scattered = comm.start_reduce_scatter({source, slice, kNumel, DType::kFloat32, "unit"});
    scattered->wait();
    EXPECT_EQ(first_difference(slice.data(), DType::kFloat32, kNumel, expected), -1);
    scattered->wait_source_free();
    write_values(source.data(), DType::kFloat32, kNumel, [&](std::size_t) { return mine; });
    const WorkPtr reduced = comm.start_all_reduce({source, kNumel, DType::kFloat32, "unit"});
    reduced->wait();
    EXPECT_EQ(first_difference(source.data(), DType::kFloat32, kNumel, expected), -1);
    reduced->wait_source_free();
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

}  // namespace
}  // namespace zb
