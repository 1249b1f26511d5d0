#include "common/thread_pool.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "common/cpu_features.h"
#include "common/error.h"

namespace zb {
namespace {

struct Piece {
  std::size_t begin;
  std::size_t end;
  std::thread::id thread;
};

std::vector<Piece> pieces_of(ThreadPool& pool, std::size_t numel, std::size_t grain_numel) {
  std::mutex mutex;
  std::vector<Piece> pieces;
  pool.parallel_for(numel, grain_numel, [&](std::size_t begin, std::size_t end) {
    const std::lock_guard lock(mutex);
    pieces.push_back({begin, end, std::this_thread::get_id()});
  });
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
  return pieces;
}

TEST(ThreadPool, PiecesCoverTheRangeOnceInWholeGrains) {
  for (const std::size_t thread_num : {1, 2, 3, 5, 8}) {
    ThreadPool pool(thread_num);
    EXPECT_EQ(pool.thread_num(), thread_num);
    for (const std::size_t grain : {1, 7, 64}) {
      for (const std::size_t numel : {0, 1, 6, 7, 8, 63, 64, 65, 100, 1000, 4097}) {
        const std::vector<Piece> pieces = pieces_of(pool, numel, grain);
        ASSERT_EQ(pieces.size(), std::min(thread_num, (numel + grain - 1) / grain));
        std::size_t cursor = 0;
        std::size_t longest = 0;
        std::size_t shortest = numel;
        for (const Piece& piece : pieces) {
          ASSERT_EQ(piece.begin, cursor);
          ASSERT_LT(piece.begin, piece.end);
          if (piece.end != numel) {
            ASSERT_EQ((piece.end - piece.begin) % grain, 0U);
          }
          longest = std::max(longest, piece.end - piece.begin);
          shortest = std::min(shortest, piece.end - piece.begin);
          cursor = piece.end;
        }
        ASSERT_EQ(cursor, numel);
        ASSERT_LT(longest - shortest, 2 * grain);
      }
    }
  }
}

TEST(ThreadPool, TheCallerRunsTheFirstPieceAndEachPieceHasItsThread) {
  ThreadPool pool(4);
  const std::vector<Piece> first = pieces_of(pool, 400, 1);
  const std::vector<Piece> second = pieces_of(pool, 800, 1);
  ASSERT_EQ(first.size(), 4U);
  EXPECT_EQ(first[0].thread, std::this_thread::get_id());
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(first[i].thread, second[i].thread);
    for (std::size_t j = 0; j < i; ++j) EXPECT_NE(first[i].thread, first[j].thread);
  }
}

TEST(ThreadPool, ManyLoopsSeeEachOthersWrites) {
  ThreadPool pool(3);
  std::vector<long> values(301, 0);
  for (int round = 0; round < 3000; ++round) {
    pool.parallel_for(values.size(), 1, [&](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i) values[i] += 1;
    });
    if (round % 1000 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // let the threads fall asleep
    std::rotate(values.begin(), values.begin() + 1, values.end());  // written by the caller between loops
  }
  EXPECT_EQ(std::accumulate(values.begin(), values.end(), 0L), 3000L * 301L);
}

TEST(ThreadPool, ErrorsArriveAfterAllPiecesEnded) {
  ThreadPool pool(4);
  for (const std::size_t thrower : {0, 1, 3}) {
    std::atomic<int> ended{0};
    const auto body = [&](std::size_t begin, std::size_t) {
      if (begin == thrower * 10) throw std::out_of_range("piece " + std::to_string(thrower));
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      ended.fetch_add(1);
    };
    EXPECT_THROW(pool.parallel_for(40, 1, body), std::out_of_range);
    EXPECT_EQ(ended.load(), 3);
  }
  EXPECT_EQ(pieces_of(pool, 40, 1).size(), 4U);  // and the pool goes on
}

TEST(ThreadPool, OneLoopAtATime) {
  ThreadPool pool(2);
  EXPECT_THROW(pool.parallel_for(
                   2, 1, [&](std::size_t, std::size_t) { pool.parallel_for(2, 1, [](std::size_t, std::size_t) {}); }),
               StateError);
  EXPECT_EQ(pieces_of(pool, 2, 1).size(), 2U);
}

TEST(ThreadPool, RejectsWhatCannotBe) {
  EXPECT_THROW(ThreadPool(0), ArgumentError);
  EXPECT_THROW(ThreadPool(3, {0, 1}), ArgumentError);
  EXPECT_THROW(ThreadPool(2, {0, -1}), ArgumentError);
  EXPECT_THROW(ThreadPool(2, {0, 100000}), ArgumentError);
  ThreadPool pool(2);
  EXPECT_THROW(pool.parallel_for(10, 0, [](std::size_t, std::size_t) {}), ArgumentError);
}

TEST(ThreadPool, PinsWorkersAndLeavesTheCallerAlone) {
  const std::vector<int> before = allowed_cpus();
  const int wanted = before.back();
  ThreadPool pool(2, {before.front(), wanted});
  std::vector<int> of_worker;
  pool.parallel_for(2, 1, [&](std::size_t begin, std::size_t) {
    if (begin == 1) of_worker = allowed_cpus();
  });
  EXPECT_EQ(of_worker, std::vector<int>{wanted});
  EXPECT_EQ(allowed_cpus(), before);
}

#if !defined(__SANITIZE_THREAD__)
TEST(ThreadPool, AForkedChildGetsAnErrorNotAHang) {
  ThreadPool pool(2);
  EXPECT_EQ(pieces_of(pool, 2, 1).size(), 2U);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);
    try {
      pool.parallel_for(2, 1, [](std::size_t, std::size_t) {});
    } catch (const StateError&) {
      _exit(7);
    }
    _exit(1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 7);
}
#endif

TEST(CpuFeatures, TheEnvironmentNamesTheInstructionSet) {
  const char* set_before = getenv("ZEROBENCH_ISA");
  const std::string before = set_before == nullptr ? "" : set_before;
  unsetenv("ZEROBENCH_ISA");
  EXPECT_EQ(available_isas().front(), Isa::kScalar);
  EXPECT_EQ(best_isa(), available_isas().back());
  for (const Isa isa : available_isas()) {
    setenv("ZEROBENCH_ISA", std::string(isa_name(isa)).c_str(), 1);
    EXPECT_EQ(best_isa(), isa);
  }
  for (const char* wrong : {"sse9", "AVX2", "scalar "}) {
    setenv("ZEROBENCH_ISA", wrong, 1);
    EXPECT_THROW(best_isa(), ArgumentError);
  }
  if (before.empty()) {
    unsetenv("ZEROBENCH_ISA");
  } else {
    setenv("ZEROBENCH_ISA", before.c_str(), 1);
  }
}

}  // namespace
}  // namespace zb
