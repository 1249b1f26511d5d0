// The raw loops move every byte they claim, and say where a transfer failed.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cerrno>
#include <set>

#include "common/error.h"
#include "fork_support.h"
#include "io/raw_io.h"
#include "io/swap_file.h"
#include "io_support.h"
#include "memory/host_buffer.h"

namespace zb {
namespace {

using test::EmulatedRings;
using test::error_text;
using test::Folder;

TEST(RawIo, TouchesEveryBlockOnceInEachDirection) {
  for (const IoEngineKind kind : {IoEngineKind::kIoUring, IoEngineKind::kThreads}) {
    for (const IoMode mode : {IoMode::kRead, IoMode::kWrite, IoMode::kBoth}) {
      EmulatedRings system;
      const Folder folder;
      const SwapFile a({.directory = folder.path(), .owner = "a", .bytes = 40960});
      const SwapFile b({.directory = folder.path(), .owner = "b", .bytes = 40960});
      std::mutex mutex;
      std::multiset<std::pair<bool, std::uint64_t>> seen;
      system.transfer_fault = [&](Direction direction, std::uint64_t offset, std::size_t bytes) -> ssize_t {
        const std::lock_guard lock(mutex);
        for (std::size_t at = 0; at < bytes; at += 4096) seen.insert({direction == Direction::kRead, offset + at});
        return 0;
      };
      const HostBuffer memory(3 * 12288, "a test");
      const IoFile files[] = {{a.fd(), a.path()}, {b.fd(), b.path()}};
      EXPECT_GT(time_raw_io({kind, 12288, 3}, mode, files, 0, 40960, {memory.data(), memory.bytes()}, system), 0.0);
      for (std::uint64_t offset = 0; offset < 40960; offset += 4096) {
        EXPECT_EQ(seen.count({true, offset}), mode == IoMode::kWrite ? 0U : 2U);
        EXPECT_EQ(seen.count({false, offset}), mode == IoMode::kRead ? 0U : 2U);
      }
    }
  }
}

TEST(RawIo, AFailedTransferIsAnErrorWithItsPath) {
  for (const IoEngineKind kind : {IoEngineKind::kIoUring, IoEngineKind::kThreads}) {
    EmulatedRings system;
    system.transfer_fault = [](Direction, std::uint64_t offset, std::size_t) -> ssize_t {
      return offset == 8192 ? -EIO : 0;
    };
    const Folder folder;
    const SwapFile file({.directory = folder.path(), .owner = "a", .bytes = 40960});
    const IoFile files[] = {{file.fd(), file.path()}};
    const HostBuffer memory(2 * 4096, "a test");
    try {
      time_raw_io({kind, 4096, 2}, IoMode::kWrite, files, 0, 40960, {memory.data(), memory.bytes()}, system);
      FAIL() << "no error";
    } catch (const IoError& error) {
      EXPECT_EQ(error.path(), file.path());
      EXPECT_NE(std::string(error.what()).find("offset 8192"), std::string::npos) << error.what();
    }
  }
}

#if !defined(__SANITIZE_THREAD__)
// In a child, whose limit may be lowered and which gives up what root may do beyond it.
TEST(RawIo, AThreadThatCannotBeStartedIsAnError) {
  const Folder folder;
  const SwapFile file({.directory = folder.path(), .owner = "a", .bytes = 40960});
  const IoFile files[] = {{file.fd(), file.path()}};
  const HostBuffer memory(8 * 4096, "a test");
  EXPECT_TRUE(test::holds_in_child([&] {
    constexpr uid_t kNobody = 65534;
    const rlimit few{3, 3};  // this thread and, of a user with no others, two more
    if (setrlimit(RLIMIT_NPROC, &few) != 0 || (geteuid() == 0 && setuid(kNobody) != 0)) return false;
    const std::string raw = error_text([&] {
      time_raw_io({IoEngineKind::kThreads, 4096, 8}, IoMode::kWrite, files, 0, 40960, {memory.data(), memory.bytes()},
                  kernel_system());
    });
    const std::string engine = error_text(
        [&] { make_io_engine({.kind = IoEngineKind::kThreads, .block_bytes = 4096, .depth = 8}, {files[0]}); });
    return raw.starts_with("a thread for I/O could not be started") && engine == raw;
  }));
}
#endif

}  // namespace
}  // namespace zb
