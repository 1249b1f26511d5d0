// Swap files: names, locks, what a crash leaves and who removes it, paths and disks that do not serve.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/wait.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>

#include "common/error.h"
#include "io/pager.h"
#include "io/swap_file.h"
#include "io/swap_space.h"
#include "io_support.h"
#include "memory/host_buffer.h"

namespace zb {
namespace {

using test::error_text;
using test::FaultySystem;
using test::Folder;

constexpr std::uint64_t kMiB = 1 << 20;

SwapFileSpec spec_in(const std::string& directory, std::uint64_t bytes = kMiB) {
  return {.directory = directory, .owner = "rank3", .bytes = bytes};
}

TEST(SwapFile, IsReservedNamedAndRemoved) {
  const Folder folder;
  {
    const SwapFile file(spec_in(folder.path()));
    const std::string name = std::filesystem::path(file.path()).filename();
    EXPECT_NE(name.find("zerobench-swap."), std::string::npos);
    EXPECT_NE(name.find(".rank3.pid" + std::to_string(getpid())), std::string::npos) << name;
    struct stat facts{};
    ASSERT_EQ(::stat(file.path().c_str(), &facts), 0);
    EXPECT_EQ(facts.st_size, static_cast<off_t>(kMiB));
    EXPECT_GE(facts.st_blocks * 512, static_cast<off_t>(kMiB));  // held on the disk, not only as a size
    EXPECT_EQ(facts.st_mode & 0777, 0600U);
    const SwapFile other(spec_in(folder.path()));  // of the same rank, beside it
    EXPECT_EQ(folder.file_num(), 2U);
  }
  EXPECT_EQ(folder.file_num(), 0U);
}

std::atomic<int> signals_num{0};

// Reserves as tmpfs does, which gives up where a signal comes, while one comes.
class InterruptedSystem : public System {
 public:
  int fallocate(int fd, std::uint64_t bytes) override {
    const int before = signals_num;
    pthread_kill(pthread_self(), SIGUSR1);
    return signals_num > before ? -EINTR : System::fallocate(fd, bytes);
  }
};

TEST(SwapFile, ASignalDoesNotEndItsReservation) {
  struct sigaction counted{};
  counted.sa_handler = [](int) { ++signals_num; };
  struct sigaction before{};
  sigaction(SIGUSR1, &counted, &before);
  const Folder folder;
  InterruptedSystem system;
  EXPECT_EQ(error_text([&] { const SwapFile file(spec_in(folder.path()), system); }), "");
  EXPECT_EQ(signals_num, 1) << "a signal was lost";
  sigaction(SIGUSR1, &before, nullptr);
}

TEST(SwapFile, AForkedChildRemovesNothing) {
  const Folder folder;
  auto file = std::make_unique<SwapFile>(spec_in(folder.path()));
  const pid_t child = fork();
  if (child == 0) {
    file.reset();
    _exit(0);
  }
  waitpid(child, nullptr, 0);
  EXPECT_EQ(folder.file_num(), 1U);
}

// A process that makes a swap file in the folder and pages through it until it is killed.
pid_t start_swapping(const std::string& directory) {
  const pid_t child = fork();
  if (child != 0) return child;
  const PagerPlan plan = plan_pager(16, 2, 2);
  SwapSpace space({.directories = {directory}, .owner = "victim", .slot_bytes = 65536, .slot_num = 16});
  const HostBuffer memory(plan.memory_frames() * space.slot_bytes(), "a test");
  const auto engine = make_io_engine({.allow_fallback = true, .block_bytes = 16384}, space.files());
  Pager pager(plan, std::vector<std::size_t>(16, 65536), space, *engine, {memory.data(), memory.bytes()});
  for (std::size_t i = 0;; ++i) {
    pager.acquire(i % 16);
    pager.release(i % 16, Change::kDirty);
    if (i == 40) std::ofstream(directory + "/running") << "yes";
  }
}

void wait_for(const std::string& path) {
  for (int i = 0; i < 10000 && !std::filesystem::exists(path); ++i) usleep(1000);
  ASSERT_TRUE(std::filesystem::exists(path));
  std::filesystem::remove(path);
}

TEST(SwapFile, WhatAKilledProcessLeavesGoesWithTheNextStart) {
  const Folder folder;
  const pid_t victim = start_swapping(folder.path());
  wait_for(folder.path() + "/running");
  {
    const SwapFile neighbour(spec_in(folder.path()));  // two runs on one path
    EXPECT_EQ(folder.file_num(), 2U);
    EXPECT_EQ(::kill(victim, 0), 0);
  }
  EXPECT_EQ(folder.file_num(), 1U) << "a file in use was removed";
  ::kill(victim, SIGKILL);
  waitpid(victim, nullptr, 0);
  ASSERT_EQ(folder.file_num(), 1U);
  const SwapFile next(spec_in(folder.path()));
  EXPECT_EQ(folder.file_num(), 1U);
  EXPECT_TRUE(std::filesystem::exists(next.path()));
}

// As a killed process's ring does, which the kernel takes apart some time after the process is gone.
TEST(SwapFile, ALockThatOutlivesItsOwnerIsWaitedFor) {
  const Folder folder;
  std::string name;
  {
    const SwapFile own(spec_in(folder.path()));
    name = std::filesystem::path(own.path()).filename();
  }
  const pid_t child = fork();
  if (child == 0) _exit(0);
  waitpid(child, nullptr, 0);
  name.replace(name.find(".pid"), name.find(".", name.find(".pid") + 1) - name.find(".pid"),
               ".pid" + std::to_string(child));
  const std::string path = folder.path() + "/" + name;
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT, 0600);
  ASSERT_EQ(::flock(fd, LOCK_EX), 0);
  std::thread ring([fd] {
    usleep(100000);
    ::close(fd);
  });
  EXPECT_EQ(remove_stale_swap_files(folder.path()), 1U);
  ring.join();
  EXPECT_EQ(folder.file_num(), 0U);
}

TEST(SwapFile, OnlySwapFilesAreRemoved) {
  const Folder folder;
  for (const char* name : {"zerobench-swap.mine", "other.tmp", "zerobench-swap.a.rank0.pid1.0-0.tmp"}) {
    std::ofstream(folder.path() + "/" + name) << "x";
  }
  std::filesystem::create_symlink(folder.path() + "/other.tmp", folder.path() + "/zerobench-swap.link.tmp");
  EXPECT_EQ(remove_stale_swap_files(folder.path()), 1U);
  EXPECT_EQ(folder.file_num(), 3U);
}

// NFS: not every server passes locks on, so a lock that can be had tells nothing of another host's run.
class SharedDisk : public System {
 public:
  std::int64_t file_system_type(const char* /*directory*/) override { return 0x6969; }
};

TEST(SwapFile, FilesOfOtherHostsAreLeftAloneWhereHostsMayShareTheDisk) {
  const Folder folder;
  const std::string mine = [&] {
    const SwapFile file(spec_in(folder.path()));
    return file.path();
  }();
  std::ofstream(mine) << "x";  // as a killed run leaves it
  const std::string theirs = folder.path() + "/zerobench-swap.another-host.rank0.pid1.0-0.tmp";
  std::ofstream(theirs) << "x";
  SharedDisk shared;
  EXPECT_EQ(remove_stale_swap_files(folder.path(), shared), 1U);
  EXPECT_FALSE(std::filesystem::exists(mine));
  EXPECT_TRUE(std::filesystem::exists(theirs));
  EXPECT_EQ(remove_stale_swap_files(folder.path()), 1U);  // a disk of this host's own
}

// Another run that cleans up between our open and our lock takes the file away; we must notice and make another.
class Racing : public FaultySystem {
 public:
  int flock(int fd, int operation) override {
    if (operation == LOCK_EX && !raced_) {
      raced_ = true;
      EXPECT_EQ(remove_stale_swap_files(directory_), 1U);
    }
    return FaultySystem::flock(fd, operation);
  }
  explicit Racing(std::string directory) : directory_(std::move(directory)) {}

 private:
  std::string directory_;
  bool raced_ = false;
};

TEST(SwapFile, AFileRemovedBeforeItsLockIsMadeAgain) {
  const Folder folder;
  Racing system(folder.path());
  const SwapFile file(spec_in(folder.path()), system);
  EXPECT_TRUE(std::filesystem::exists(file.path()));
}

TEST(SwapFile, ManyStartsAtOnceDisturbNoneOfThem) {
  const Folder folder;
  std::vector<std::thread> threads;
  std::atomic<int> lost{0};
  for (int i = 0; i < 6; ++i) {
    threads.emplace_back([&] {
      for (int turn = 0; turn < 40; ++turn) {
        const SwapFile file(spec_in(folder.path(), 4096));
        lost += std::filesystem::exists(file.path()) ? 0 : 1;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(lost, 0);
  EXPECT_EQ(folder.file_num(), 0U);
}

TEST(SwapFile, PathsThatDoNotServeAreNamed) {
  const Folder folder;
  const std::string missing = folder.path() + "/nowhere";
  std::string text = error_text([&] { SwapFile(spec_in(missing)); });
  EXPECT_NE(text.find(missing), std::string::npos);
  EXPECT_NE(text.find("No such file or directory"), std::string::npos) << text;
  text = error_text([&] { SwapFile(spec_in("/sys/kernel")); });  // refuses root too
  EXPECT_NE(text.find("/sys/kernel"), std::string::npos) << text;
  EXPECT_NE(text.find("writable"), std::string::npos) << text;
}

TEST(SwapFile, TooLargeAFileSaysWhatIsMissing) {
  const Folder folder;
  const std::uint64_t bytes = std::uint64_t{1} << 50;
  try {
    SwapFile(spec_in(folder.path(), bytes));
    FAIL() << "no error";
  } catch (const IoError& error) {
    EXPECT_EQ(error.code().value(), ENOSPC);
    EXPECT_EQ(error.path(), folder.path());
    EXPECT_NE(std::string(error.what()).find("1048576.0 GiB are needed"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("too little"), std::string::npos) << error.what();
  }
  FaultySystem system;
  system.fallocate_error = ENOSPC;  // another run took the space meanwhile
  EXPECT_NE(error_text([&] { SwapFile(spec_in(folder.path()), system); }).find("not enough space"), std::string::npos);
  system.fallocate_error = EOPNOTSUPP;
  EXPECT_NE(error_text([&] { SwapFile(spec_in(folder.path()), system); }).find("fallocate"), std::string::npos);
  EXPECT_EQ(folder.file_num(), 0U);
}

TEST(SwapFile, ARefusedDirectIsAnErrorOrAFallbackThatSaysSo) {
  const Folder folder;
  FaultySystem system;
  system.direct_refused = true;
  const std::string text = error_text([&] { SwapFile(spec_in(folder.path()), system); });
  EXPECT_NE(text.find("refuses O_DIRECT"), std::string::npos) << text;
  EXPECT_EQ(folder.file_num(), 0U);
  SwapFileSpec spec = spec_in(folder.path());
  spec.allow_fallback = true;
  const SwapFile file(spec, system);
  EXPECT_FALSE(file.direct());
  EXPECT_NE(file.note().find("buffered"), std::string::npos);
}

TEST(SwapSpace, SlotsNeverOverlapAndUseEveryPath) {
  const Folder folder;
  for (const std::size_t path_num : {1, 2, 3}) {
    for (const std::size_t slot_bytes : {1, 4096, 10000, 100000}) {
      const SwapSpace space({.directories = std::vector<std::string>(path_num, folder.path()),
                             .owner = "t",
                             .slot_bytes = slot_bytes,
                             .slot_num = 5});
      EXPECT_GE(space.slot_bytes(), slot_bytes);
      const HostBuffer memory(space.slot_bytes(), "a test");
      std::map<std::pair<std::size_t, std::uint64_t>, std::size_t> taken;
      for (std::size_t slot = 0; slot < 5; ++slot) {
        for (std::size_t bytes = 4096; bytes <= space.slot_bytes(); bytes += 4096) {
          std::size_t sum = 0;
          for (const IoTransfer& transfer : space.transfers(Direction::kRead, slot, {memory.data(), bytes})) {
            EXPECT_EQ(transfer.memory, memory.data() + sum);
            EXPECT_EQ((transfer.offset | transfer.bytes) % 4096, 0U);
            EXPECT_LE(transfer.offset + transfer.bytes, space.file_bytes());
            sum += transfer.bytes;
            for (std::size_t at = 0; at < transfer.bytes; at += 4096) {
              const auto [place, is_new] = taken.try_emplace({transfer.file, transfer.offset + at}, slot);
              EXPECT_EQ(place->second, slot);
            }
          }
          EXPECT_EQ(sum, bytes);
        }
      }
    }
  }
}

// A small file system of its own; mounting needs rights that not every machine gives.
class SmallDisk {
 public:
  explicit SmallDisk(std::size_t bytes) {
    const std::string options = "size=" + std::to_string(bytes);
    mounted_ = ::mount("tmpfs", folder_.path().c_str(), "tmpfs", 0, options.c_str()) == 0;
  }
  ~SmallDisk() {
    if (mounted_) ::umount2(folder_.path().c_str(), MNT_DETACH);
  }
  bool mounted() const { return mounted_; }
  const std::string& path() const { return folder_.path(); }

 private:
  Folder folder_;
  bool mounted_ = false;
};

TEST(SmallDisk, FullAtTheStartSaysWhatIsMissing) {
  const SmallDisk disk(4 * kMiB);
  if (!disk.mounted()) GTEST_SKIP() << "no right to mount";
  const SwapFile first({.directory = disk.path(), .owner = "a", .bytes = 3 * kMiB, .allow_fallback = true});
  try {
    SwapFile({.directory = disk.path(), .owner = "b", .bytes = 3 * kMiB, .allow_fallback = true});
    FAIL() << "no error";
  } catch (const IoError& error) {
    EXPECT_EQ(error.code().value(), ENOSPC);
    EXPECT_NE(std::string(error.what()).find(disk.path()), std::string::npos) << error.what();
  }
  EXPECT_TRUE(std::filesystem::exists(first.path()));
}

TEST(SmallDisk, FullInTheMiddleIsAnErrorOfThePager) {
  const SmallDisk disk(4 * kMiB);
  if (!disk.mounted()) GTEST_SKIP() << "no right to mount";
  const PagerPlan plan = plan_pager(16, 2, 2);
  const SwapSpace space(
      {.directories = {disk.path()}, .owner = "t", .slot_bytes = 65536, .slot_num = 16, .allow_fallback = true});
  const HostBuffer memory(plan.memory_frames() * space.slot_bytes(), "a test");
  const auto engine = make_io_engine({.allow_fallback = true}, space.files());
  Pager pager(plan, std::vector<std::size_t>(16, 65536), space, *engine, {memory.data(), memory.bytes()});
  // What was reserved is taken away, and the disk filled, behind our back.
  ASSERT_EQ(::fallocate(space.files()[0].fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                        static_cast<off_t>(space.file_bytes())),
            0);
  std::ofstream(disk.path() + "/filler") << std::string(4 * kMiB, 'x');
  try {
    for (std::size_t chunk = 0; chunk < 16; ++chunk) {
      pager.acquire(chunk);
      pager.release(chunk, Change::kDirty);
    }
    pager.flush();
    FAIL() << "no error";
  } catch (const IoError& error) {
    EXPECT_EQ(error.code().value(), ENOSPC);
    EXPECT_NE(std::string(error.what()).find("write of "), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find(disk.path()), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace zb
