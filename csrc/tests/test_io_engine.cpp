// The I/O engines: the kernel's io_uring, an emulated one, and threads; right bytes whatever the order, errors with
// path, offset and size.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "common/error.h"
#include "fork_support.h"
#include "io/io_engine.h"
#include "io_support.h"
#include "memory/host_buffer.h"

namespace zb {
namespace {

using test::EmulatedRings;
using test::error_text;
using test::FaultySystem;
using test::fill_random;
using test::Folder;

enum class Subject { kKernelRing, kEmulatedRing, kThreads };

class File {
 public:
  File(const std::string& folder, const std::string& name, std::size_t bytes) : path_(folder + "/" + name) {
    fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    EXPECT_EQ(::ftruncate(fd_, static_cast<off_t>(bytes)), 0);
  }
  ~File() { ::close(fd_); }
  IoFile handle() const { return {fd_, path_}; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int fd_;
};

class IoEngineTest : public testing::TestWithParam<Subject> {
 protected:
  void SetUp() override {
    if (GetParam() == Subject::kKernelRing && !test::kernel_has_io_uring()) GTEST_SKIP() << "no io_uring here";
  }
  FaultySystem& system() { return system_; }
  std::unique_ptr<IoEngine> make(std::vector<IoFile> files, std::size_t block_bytes, std::size_t depth,
                                 std::span<std::byte> memory = {}) {
    const IoEngineOptions options{
        .kind = GetParam() == Subject::kThreads ? IoEngineKind::kThreads : IoEngineKind::kIoUring,
        .block_bytes = block_bytes,
        .depth = depth};
    const std::span<std::byte> memories[] = {memory};
    return make_io_engine(options, std::move(files), std::span(memories).first(memory.empty() ? 0 : 1), used());
  }
  System& used() { return GetParam() == Subject::kKernelRing ? kernel_system() : system_; }
  bool injects() const { return GetParam() != Subject::kKernelRing; }

  EmulatedRings system_;
  Folder folder_;
};

std::string subject_name(const testing::TestParamInfo<Subject>& subject) {
  constexpr std::array<const char*, 3> kNames{"KernelRing", "EmulatedRing", "Threads"};
  return kNames[static_cast<std::size_t>(subject.param)];
}

INSTANTIATE_TEST_SUITE_P(All, IoEngineTest,
                         testing::Values(Subject::kKernelRing, Subject::kEmulatedRing, Subject::kThreads),
                         subject_name);

TEST_P(IoEngineTest, WhatWasWrittenIsRead) {
  constexpr std::size_t kBytes = 1 << 20;
  for (const std::size_t block_bytes : {4096, 12288, 1 << 20}) {
    for (const std::size_t depth : {1, 3, 16}) {
      const File a(folder_.path(), "a", kBytes);
      const File b(folder_.path(), "b", kBytes);
      const HostBuffer memory(4 * kBytes, "a test");
      const std::span<std::byte> out{memory.data(), 2 * kBytes};
      const std::span<std::byte> in{memory.data() + 2 * kBytes, 2 * kBytes};
      fill_random(out, block_bytes + depth);
      const auto engine = make({a.handle(), b.handle()}, block_bytes, depth, {memory.data(), memory.bytes()});
      const IoTransfer writes[] = {{Direction::kWrite, 0, 0, out.data(), kBytes},
                                   {Direction::kWrite, 1, 0, out.data() + kBytes, kBytes}};
      engine->wait(engine->start(writes));
      const IoTransfer reads[] = {{Direction::kRead, 0, 0, in.data(), kBytes},
                                  {Direction::kRead, 1, 0, in.data() + kBytes, kBytes}};
      engine->wait(engine->start(reads));
      ASSERT_EQ(std::memcmp(in.data(), out.data(), in.size()), 0) << block_bytes << " " << depth;
    }
  }
}

TEST_P(IoEngineTest, ManyOperationsFromManyThreadsAllEnd) {
  constexpr std::size_t kPiece = 8192;
  constexpr std::size_t kPieceNum = 64;
  constexpr std::size_t kThreadNum = 4;
  const File file(folder_.path(), "many", kPiece * kPieceNum * kThreadNum);
  const HostBuffer memory(2 * kPiece * kPieceNum * kThreadNum, "a test");
  const std::size_t half = memory.bytes() / 2;
  fill_random({memory.data(), half}, 5);
  std::atomic<int> callbacks{0};
  {
    const auto engine = make({file.handle()}, 4096, 7, {memory.data(), memory.bytes()});
    std::vector<std::thread> threads;
    for (std::size_t thread = 0; thread < kThreadNum; ++thread) {
      threads.emplace_back([&, thread] {
        std::vector<IoTicket> tickets;
        for (std::size_t i = 0; i < kPieceNum; ++i) {
          const std::size_t at = (thread * kPieceNum + i) * kPiece;
          const IoTransfer write{Direction::kWrite, 0, at, memory.data() + at, kPiece};
          tickets.push_back(engine->start({&write, 1}, [&](const IoFailurePtr& failure) {
            EXPECT_FALSE(failure);
            ++callbacks;
          }));
        }
        for (std::size_t i = 0; i < kPieceNum; ++i) {
          engine->wait(tickets[i]);
          const std::size_t at = (thread * kPieceNum + i) * kPiece;
          const IoTransfer read{Direction::kRead, 0, at, memory.data() + half + at, kPiece};
          engine->start({&read, 1});  // the engine's end waits for it
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  EXPECT_EQ(callbacks, kPieceNum * kThreadNum);
  EXPECT_EQ(std::memcmp(memory.data(), memory.data() + half, half), 0);
}

TEST_P(IoEngineTest, AnOperationMayBeStartedWhenAnotherEnds) {
  const File file(folder_.path(), "chain", 1 << 16);
  const HostBuffer memory(1 << 16, "a test");
  const auto engine = make({file.handle()}, 4096, 2);
  std::atomic<int> left{20};
  std::atomic<bool> ended{false};
  IoCallback next = [&](const IoFailurePtr& failure) {
    EXPECT_FALSE(failure);
    if (--left == 0) {
      ended = true;
      return;
    }
    const IoTransfer read{Direction::kRead, 0, 0, memory.data(), 1 << 16};
    engine->start({&read, 1}, next);
  };
  const IoTransfer read{Direction::kRead, 0, 0, memory.data(), 1 << 16};
  engine->start({&read, 1}, next);
  while (!ended) std::this_thread::yield();
}

TEST_P(IoEngineTest, ReadingPastTheEndNamesFileOffsetAndBytes) {
  const File file(folder_.path(), "short", 8192);
  const HostBuffer memory(16384, "a test");
  const auto engine = make({file.handle()}, 4096, 4);
  const IoTransfer read{Direction::kRead, 0, 4096, memory.data(), 12288};
  const std::string text = error_text([&] { engine->wait(engine->start({&read, 1})); });
  EXPECT_NE(text.find("read of 4096 bytes at offset"), std::string::npos) << text;
  EXPECT_NE(text.find(file.path()), std::string::npos) << text;
  const IoTransfer good{Direction::kRead, 0, 0, memory.data(), 8192};
  engine->wait(engine->start({&good, 1}));  // one failed operation harms no other
}

TEST_P(IoEngineTest, ShortAndInterruptedTransfersAreContinued) {
  if (!injects()) GTEST_SKIP() << "the kernel's own ring takes no faults";
  constexpr std::size_t kBytes = 1 << 18;
  std::mutex mutex;
  std::mt19937 random(3);
  system().transfer_fault = [&](Direction, std::uint64_t, std::size_t) -> ssize_t {
    const std::lock_guard lock(mutex);
    switch (random() % 4) {
      case 0:
        return -EINTR;
      case 1:
        return -EAGAIN;
      default:
        return 1 + static_cast<ssize_t>(random() % 9000);
    }
  };
  const File file(folder_.path(), "pieces", kBytes);
  const HostBuffer memory(2 * kBytes, "a test");
  fill_random({memory.data(), kBytes}, 8);
  const auto engine = make({file.handle()}, 16384, 5, {memory.data(), memory.bytes()});
  const IoTransfer write{Direction::kWrite, 0, 0, memory.data(), kBytes};
  engine->wait(engine->start({&write, 1}));
  const IoTransfer read{Direction::kRead, 0, 0, memory.data() + kBytes, kBytes};
  engine->wait(engine->start({&read, 1}));
  EXPECT_EQ(std::memcmp(memory.data(), memory.data() + kBytes, kBytes), 0);
}

TEST_P(IoEngineTest, AFailedTransferIsAnErrorOfItsOperationAlone) {
  if (!injects()) GTEST_SKIP() << "the kernel's own ring takes no faults";
  system().transfer_fault = [](Direction direction, std::uint64_t offset, std::size_t) -> ssize_t {
    return direction == Direction::kWrite && offset == 8192 ? -EIO : 0;
  };
  const File file(folder_.path(), "bad", 1 << 16);
  const HostBuffer memory(1 << 16, "a test");
  const auto engine = make({file.handle()}, 4096, 3);
  IoFailurePtr seen;
  const IoTransfer bad{Direction::kWrite, 0, 0, memory.data(), 1 << 16};
  const IoTransfer good{Direction::kWrite, 0, 1 << 15, memory.data(), 1 << 14};
  const IoTicket failing = engine->start({&bad, 1}, [&](const IoFailurePtr& failure) { seen = failure; });
  engine->wait(engine->start({&good, 1}));
  try {
    engine->wait(failing);
    FAIL() << "no error";
  } catch (const IoError& error) {
    EXPECT_EQ(error.code().value(), EIO);
    EXPECT_EQ(error.path(), file.path());
    EXPECT_NE(std::string(error.what()).find("write of 4096 bytes at offset 8192"), std::string::npos) << error.what();
  }
  EXPECT_TRUE(seen);
}

TEST_P(IoEngineTest, TransfersThatNeverMoveAByteEndInAnError) {
  if (!injects()) GTEST_SKIP() << "the kernel's own ring takes no faults";
  const File file(folder_.path(), "stuck", 1 << 16);
  const HostBuffer memory(4096, "a test");
  const auto engine = make({file.handle()}, 4096, 3);
  const IoTransfer write{Direction::kWrite, 0, 0, memory.data(), 4096};
  for (const ssize_t fault : {ssize_t{-EAGAIN}, ssize_t{100}}) {
    system().transfer_fault = [fault](Direction, std::uint64_t, std::size_t) { return fault; };
    EXPECT_THROW(engine->wait(engine->start({&write, 1})), IoError);
  }
}

TEST_P(IoEngineTest, AnyNumberOfShortTransfersThatMoveSomethingIsFine) {
  if (!injects()) GTEST_SKIP() << "the kernel's own ring takes no faults";
  constexpr std::size_t kBytes = std::size_t{1} << 17;
  const File file(folder_.path(), "slow", kBytes);
  const HostBuffer memory(kBytes, "a test");
  const auto engine = make({file.handle()}, kBytes, 1);
  system().transfer_fault = [](Direction, std::uint64_t, std::size_t) { return ssize_t{512}; };
  const IoTransfer write{Direction::kWrite, 0, 0, memory.data(), kBytes};
  EXPECT_NO_THROW(engine->wait(engine->start({&write, 1})));
}

TEST_P(IoEngineTest, WrongRequestsAreRefused) {
  const File file(folder_.path(), "f", 4096);
  const HostBuffer memory(4096, "a test");
  const auto engine = make({file.handle()}, 4096, 1);
  const IoTransfer other{Direction::kRead, 1, 0, memory.data(), 4096};
  EXPECT_THROW(engine->start({&other, 1}), ArgumentError);
  EXPECT_THROW(engine->start({}), ArgumentError);
  EXPECT_THROW(make({file.handle()}, 4096, 0), ArgumentError);
}

TEST(IoEngineChoice, ARefusedRingIsAnErrorOrAFallbackThatSaysSo) {
  FaultySystem system;
  system.ring_error = EPERM;
  const std::string text = error_text([&] { make_io_engine({}, {}, {}, system); });
  EXPECT_NE(text.find("io_uring is not usable here"), std::string::npos) << text;
  const auto engine = make_io_engine({.allow_fallback = true}, {}, {}, system);
  EXPECT_EQ(engine->kind(), IoEngineKind::kThreads);
  EXPECT_NE(engine->note().find("Operation not permitted"), std::string::npos) << engine->note();
  EXPECT_EQ(make_io_engine({.kind = IoEngineKind::kThreads}, {}, {}, system)->note(), "");
}

TEST(IoEngineChoice, TooLittleLockedMemoryIsAnErrorOrPlainMemory) {
  EmulatedRings system;
  system.no_locked_memory = true;
  const Folder folder;
  const File file(folder.path(), "f", 4096);
  const HostBuffer memory(4096, "a test");
  const std::span<std::byte> memories[] = {{memory.data(), memory.bytes()}};
  const std::string text = error_text([&] { make_io_engine({}, {file.handle()}, memories, system); });
  EXPECT_NE(text.find("ulimit -l) to at least 2048 KiB more"), std::string::npos) << text;
  EXPECT_NE(text.find("4096 bytes of memory: it counts as up to 2.0 MiB"), std::string::npos) << text;
  const auto engine = make_io_engine({.allow_fallback = true}, {file.handle()}, memories, system);
  EXPECT_EQ(engine->kind(), IoEngineKind::kIoUring);
  EXPECT_NE(engine->note().find("plain memory"), std::string::npos) << engine->note();
  const IoTransfer read{Direction::kRead, 0, 0, memory.data(), 4096};
  engine->wait(engine->start({&read, 1}));
}

// Whole, and once, however many spans lie in it.
TEST(IoEngineChoice, ARefusalNamesWhatHugePagesMayCost) {
  EmulatedRings system;
  system.no_locked_memory = true;
  const HostBuffer memory(std::size_t{8} << 20U, "a test");  // begins on a huge page
  const std::size_t mib = std::size_t{1} << 20U;
  const std::span<std::byte> memories[] = {{memory.data() + mib, 2 * mib},
                                           {memory.data(), 4096},
                                           {memory.data() + 2 * mib, 4096},
                                           {memory.data() + 6 * mib, 4096}};
  const std::string text = error_text([&] { make_io_engine({}, {}, memories, system); });
  EXPECT_NE(text.find("counts as up to 6.0 MiB"), std::string::npos) << text;
  EXPECT_NE(text.find("at least 6144 KiB more"), std::string::npos) << text;
}

TEST(IoEngineChoice, NamesGoBothWays) {
  EXPECT_EQ(io_engine_from_name("io_uring"), IoEngineKind::kIoUring);
  EXPECT_EQ(io_engine_from_name(io_engine_name(IoEngineKind::kThreads)), IoEngineKind::kThreads);
  EXPECT_THROW(io_engine_from_name("aio"), ArgumentError);
}

TEST(UringEngine, ABusyKernelIsAskedAgain) {
  EmulatedRings system;
  std::atomic<int> calls{0};
  system.enter_fault = [&] {
    return std::vector<int>{0, -EAGAIN, -EINTR, -EBUSY}[static_cast<std::size_t>(calls++ % 4)];
  };
  const Folder folder;
  const File file(folder.path(), "f", 1 << 16);
  const HostBuffer memory(1 << 16, "a test");
  const auto engine = make_io_engine({.block_bytes = 4096, .depth = 3}, {file.handle()}, {}, system);
  const IoTransfer write{Direction::kWrite, 0, 0, memory.data(), 1 << 16};
  engine->wait(engine->start({&write, 1}));
}

TEST(UringEngine, ADeadRingFailsWhatRunsAndWhatComes) {
  EmulatedRings system;
  std::atomic<bool> dead{false};
  system.enter_fault = [&] { return dead ? -EBADF : 0; };
  const Folder folder;
  const File file(folder.path(), "f", 1 << 16);
  const HostBuffer memory(1 << 16, "a test");
  const auto engine = make_io_engine({.block_bytes = 4096, .depth = 3}, {file.handle()}, {}, system);
  const IoTransfer write{Direction::kWrite, 0, 0, memory.data(), 1 << 16};
  engine->wait(engine->start({&write, 1}));
  dead = true;
  EXPECT_THROW(engine->wait(engine->start({&write, 1})), IoError);
  EXPECT_THROW(engine->start({&write, 1}), IoError);
}

TEST(UringEngine, MemoryBeyondOneRegisteredPieceIsReached) {
  // Two registered pieces side by side, as memory above the kernel's 1 GiB limit is: a block may not leave its piece.
  EmulatedRings system;
  const Folder folder;
  const File file(folder.path(), "f", 1 << 16);
  const HostBuffer memory(1 << 17, "a test");
  fill_random({memory.data(), 1 << 16}, 4);
  const std::span<std::byte> memories[] = {{memory.data(), 12288}, {memory.data() + 12288, (1 << 17) - 12288}};
  const auto engine = make_io_engine({.block_bytes = 8192, .depth = 3}, {file.handle()}, memories, system);
  const IoTransfer write{Direction::kWrite, 0, 0, memory.data(), 1 << 16};
  engine->wait(engine->start({&write, 1}));
  const IoTransfer read{Direction::kRead, 0, 0, memory.data() + (1 << 16), 1 << 16};
  engine->wait(engine->start({&read, 1}));
  EXPECT_EQ(std::memcmp(memory.data(), memory.data() + (1 << 16), 1 << 16), 0);
}

TEST(Ring, ARequestHasNoMoreBytesThanItsLengthCanSay) {
  EmulatedRings system;
  const Ring ring(system, 2);
  const HostBuffer memory(4096, "a test");  // not registered, and nothing of it is touched
  for (const std::size_t bytes : {std::size_t{1} << 32, (std::size_t{1} << 32) + 4096}) {
    const std::size_t reached = ring.reach(memory.data(), bytes);
    EXPECT_EQ(reached, static_cast<std::uint32_t>(reached));
    EXPECT_GE(reached, std::size_t{1} << 30);
  }
}

#if !defined(__SANITIZE_THREAD__)
TEST_P(IoEngineTest, AForkedChildLetsGoOfItAndItsParentGoesOn) {
  constexpr std::size_t kBytes = 1 << 16;
  const File file(folder_.path(), "forked", kBytes);
  const HostBuffer memory(2 * kBytes, "a test");
  const std::span<std::byte> out{memory.data(), kBytes};
  const std::span<std::byte> in{memory.data() + kBytes, kBytes};
  auto engine = make({file.handle()}, 4096, 4, {memory.data(), memory.bytes()});
  const IoTransfer write{Direction::kWrite, 0, 0, out.data(), kBytes};
  const IoTransfer read{Direction::kRead, 0, 0, in.data(), kBytes};
  for (std::uint64_t round = 0; round < 3; ++round) {
    fill_random(out, round);
    engine->wait(engine->start({&write, 1}));
    engine->wait(engine->start({&read, 1}));
    EXPECT_EQ(std::memcmp(in.data(), out.data(), kBytes), 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // now the threads wait for transfers
    EXPECT_TRUE(test::holds_in_child([&] {
      const bool refused = !error_text([&] { engine->start({&write, 1}); }).empty();
      engine.reset();
      return refused;
    }));
  }
}

TEST(Ring, AForkedChildUnregistersNothingOfItsParent) {
  if (!test::kernel_has_io_uring()) GTEST_SKIP() << "no io_uring here";
  const Folder folder;
  const File file(folder.path(), "forked", 8192);
  const HostBuffer memory(8192, "a test");
  fill_random({memory.data(), 4096}, 3);
  auto ring = std::make_unique<Ring>(kernel_system(), 2);
  ring->register_files(std::array{file.handle().fd});
  ASSERT_TRUE(ring->register_memory(std::array{std::span(memory.data(), memory.bytes())}));
  EXPECT_TRUE(test::holds_in_child([&] {
    ring.reset();
    return true;
  }));
  const auto result_of = [&](Direction direction, std::byte* at) {
    ring->prepare(direction, 0, 0, at, 4096, 7);
    ring->submit(1);
    std::uint64_t tag = 0;
    std::int32_t result = 0;
    while (!ring->next(tag, result)) ring->submit(1);
    return result;
  };
  EXPECT_EQ(result_of(Direction::kWrite, memory.data()), 4096);
  EXPECT_EQ(result_of(Direction::kRead, memory.data() + 4096), 4096);
  EXPECT_EQ(std::memcmp(memory.data(), memory.data() + 4096, 4096), 0);
}
#endif

}  // namespace
}  // namespace zb
