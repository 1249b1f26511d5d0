// The pager against a plain model in memory, with every engine; what it reads and writes; what stays resident.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <numeric>
#include <optional>
#include <thread>

#include "common/error.h"
#include "fork_support.h"
#include "io/pager.h"
#include "io_support.h"
#include "memory/host_buffer.h"

namespace zb {
namespace {

using test::EmulatedRings;
using test::error_text;
using test::FaultySystem;
using test::fill_random;
using test::Folder;

struct Layout {
  std::size_t chunk_num = 9;
  std::size_t chunk_bytes = 40000;
  std::size_t memory_frames = 3;
  std::size_t frame_num = 3;
  IoEngineOptions engine{.block_bytes = 8192, .depth = 4};
  bool checksums = false;
  std::vector<std::size_t> sizes = {};  // of chunks; all chunk_bytes where empty
};

// A pager with all that it stands on.
class Paged {
 public:
  Paged(const Layout& layout, std::vector<std::string> directories, System& system)
      : plan_(plan_pager(layout.chunk_num, layout.memory_frames, layout.frame_num)),
        space_({.directories = std::move(directories),
                .owner = "test",
                .slot_bytes = layout.chunk_bytes,
                .slot_num = plan_.swapped_num()},
               system),
        memory_(plan_.memory_frames() * space_.slot_bytes(), "a test"),
        engine_(make_io_engine(layout.engine, space_.files(), {}, system)),
        pager_(std::in_place, plan_,
               layout.sizes.empty() ? std::vector<std::size_t>(layout.chunk_num, layout.chunk_bytes) : layout.sizes,
               space_, *engine_, std::span(memory_.data(), memory_.bytes()),
               PagerOptions{.checksums = layout.checksums}) {}

  Pager* operator->() { return &*pager_; }
  SwapSpace& space() { return space_; }
  const PagerPlan& plan() const { return plan_; }

 private:
  PagerPlan plan_;
  SwapSpace space_;
  HostBuffer memory_;
  std::unique_ptr<IoEngine> engine_;
  std::optional<Pager> pager_;
};

std::vector<std::size_t> in_order(std::size_t num) {
  std::vector<std::size_t> order(num);
  std::iota(order.begin(), order.end(), 0);
  return order;
}

// Random acquisitions, in and out of the order, several held at once; every byte compared with a model.
void run_random(Paged& paged, const Layout& layout, unsigned seed, int operation_num) {
  std::mt19937 random(seed);
  std::vector<std::vector<std::byte>> model;
  for (std::size_t i = 0; i < layout.chunk_num; ++i) {
    model.emplace_back(layout.sizes.empty() ? layout.chunk_bytes : layout.sizes[i]);
  }
  std::map<std::size_t, std::span<std::byte>> held;
  std::size_t turn = 0;
  const auto release = [&](std::size_t chunk, Change change) {
    if (change == Change::kDirty) {
      fill_random(held[chunk].first(std::min<std::size_t>(held[chunk].size(), 64)), random());
      held[chunk].back() = static_cast<std::byte>(random());
      std::memcpy(model[chunk].data(), held[chunk].data(), held[chunk].size());
    }
    paged->release(chunk, change);
    held.erase(chunk);
  };
  for (int operation = 0; operation < operation_num; ++operation) {
    if (random() % 50 == 0) {
      std::vector<std::size_t> order = in_order(layout.chunk_num);
      if (random() % 2 == 0) std::shuffle(order.begin(), order.end(), random);
      order.resize(random() % (order.size() + 1));
      if (random() % 2 == 0) order.insert(order.end(), order.rbegin(), order.rend());  // there and back
      paged->set_order(order);
    }
    if (random() % 40 == 0) paged->flush();
    while (held.size() >= layout.frame_num || (!held.empty() && random() % 2 == 0)) {
      release(held.begin()->first, random() % 3 == 0 ? Change::kClean : Change::kDirty);
    }
    const std::size_t chunk = random() % 4 == 0 ? random() % layout.chunk_num : turn++ % layout.chunk_num;
    if (held.contains(chunk)) continue;
    const bool overwrites = random() % 5 == 0;
    const std::span<std::byte> memory = paged->acquire(chunk, overwrites ? Content::kOverwritten : Content::kKept);
    held[chunk] = memory;
    ASSERT_EQ(memory.size(), model[chunk].size());
    if (overwrites) {
      fill_random(memory, random());
      release(chunk, Change::kDirty);
    } else {
      ASSERT_EQ(std::memcmp(memory.data(), model[chunk].data(), memory.size()), 0) << "chunk " << chunk;
    }
  }
  while (!held.empty()) release(held.begin()->first, Change::kClean);
  paged->flush();
}

TEST(Pager, HoldsWhatAModelHolds) {
  for (unsigned seed = 0; seed < 24; ++seed) {
    std::mt19937 random(seed);
    const Folder a;
    const Folder b;
    const Folder c;
    std::vector<std::string> directories{a.path(), b.path(), c.path()};
    directories.resize(1 + seed % 3);
    Layout layout{.chunk_num = 1 + random() % 14,
                  .chunk_bytes = 1 + random() % 70000,
                  .memory_frames = random() % 8,
                  .frame_num = 1 + random() % 4,
                  .checksums = seed % 2 == 0};
    for (std::size_t i = 0; i < layout.chunk_num && seed % 4 == 1; ++i) {
      layout.sizes.push_back(1 + random() % layout.chunk_bytes);
    }
    EmulatedRings emulated(seed);
    System* systems[] = {&emulated, &kernel_system()};
    System* system = systems[random() % 2];
    layout.engine.kind = random() % 3 == 0 ? IoEngineKind::kThreads : IoEngineKind::kIoUring;
    layout.engine.allow_fallback = true;
    if (system == &emulated) {
      const auto mutex = std::make_shared<std::mutex>();
      emulated.transfer_fault = [mutex, draw = std::mt19937(seed)](Direction, std::uint64_t, std::size_t) mutable {
        const std::lock_guard lock(*mutex);
        return draw() % 4 == 0 ? static_cast<ssize_t>(4096) : ssize_t{draw() % 9 == 0 ? -EINTR : 0};
      };
    }
    Paged paged(layout, directories, *system);
    run_random(paged, layout, seed, 200);
    if (testing::Test::HasFatalFailure()) FAIL() << "seed " << seed;
  }
}

// Flushed after every chunk, the caller finds each transfer over: frames are free for what is read ahead, and in the
// first step, in which chunks have never been written, for nothing else.
TEST(Pager, ReadsAndWritesNoMoreThanNeeded) {
  for (const bool flushes : {false, true}) {
    const Folder folder;
    const Layout layout{.chunk_num = 8, .chunk_bytes = 8192, .memory_frames = 5, .frame_num = 2};
    Paged paged(layout, {folder.path()}, kernel_system());
    ASSERT_EQ(paged.plan().resident_num, 3U);
    paged->set_order(in_order(8));
    for (int step = 0; step < 4; ++step) {
      for (std::size_t chunk = 0; chunk < 8; ++chunk) {
        paged->acquire(chunk);
        paged->release(chunk, Change::kDirty);
        if (flushes) paged->flush();
      }
      paged->flush();
      // Five chunks swap; at the end of a step up to two of the next are on their way.
      const auto swapped = static_cast<std::uint64_t>(5 * 8192);
      EXPECT_EQ(paged->stats().written_bytes, swapped * static_cast<std::uint64_t>(step + 1));
      EXPECT_LE(paged->stats().read_bytes, swapped * static_cast<std::uint64_t>(step) + 2 * 8192);
      EXPECT_GE(paged->stats().read_bytes, swapped * static_cast<std::uint64_t>(step));
    }
  }
}

TEST(Pager, ReadsAheadWhileTheCallerIsElsewhere) {
  const Folder folder;
  std::atomic<int> reads{0};
  FaultySystem system;
  system.transfer_fault = [&](Direction direction, std::uint64_t, std::size_t) -> ssize_t {
    reads += direction == Direction::kRead ? 1 : 0;
    return 0;
  };
  Layout layout{.chunk_num = 6, .chunk_bytes = 4096, .memory_frames = 3, .frame_num = 3};
  layout.engine = {.kind = IoEngineKind::kThreads, .block_bytes = 4096, .depth = 1};
  Paged paged(layout, {folder.path()}, system);
  paged->set_order(in_order(6));
  for (std::size_t chunk = 0; chunk < 3; ++chunk) {
    paged->acquire(chunk);
    paged->release(chunk, Change::kDirty);
  }
  for (std::size_t chunk = 3; chunk < 6; ++chunk) paged->acquire(chunk);  // held together, they take all frames
  for (std::size_t chunk = 3; chunk < 6; ++chunk) paged->release(chunk, Change::kDirty);
  // Nobody calls: frames that have been written take the next chunks by themselves.
  for (int i = 0; i < 5000 && reads < 3; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(reads, 3);
  paged->flush();  // the last one may still be under way
  const double waited_s = paged->stats().wait_s;
  for (std::size_t chunk = 0; chunk < 3; ++chunk) paged->acquire(chunk);
  EXPECT_EQ(paged->stats().wait_s, waited_s);
}

TEST(Pager, WhatFitsNeverTouchesTheDisk) {
  const Folder folder;
  const Layout layout{.chunk_num = 5, .memory_frames = 5};
  Paged paged(layout, {folder.path()}, kernel_system());
  run_random(paged, {.chunk_num = 5, .frame_num = 5}, 3, 200);
  EXPECT_EQ(paged->stats().written_bytes + paged->stats().read_bytes, 0U);
}

TEST(Pager, PlansSpreadWhatStays) {
  const PagerPlan plan = plan_pager(12, 6, 2);
  EXPECT_EQ(plan.resident_num, 4U);
  EXPECT_EQ(plan.memory_frames(), 6U);
  std::vector<std::size_t> resident;
  for (std::size_t i = 0; i < 12; ++i) {
    if (plan.is_resident(i)) resident.push_back(i);
  }
  EXPECT_EQ(resident, (std::vector<std::size_t>{2, 5, 8, 11}));
  for (std::size_t chunk_num = 1; chunk_num < 20; ++chunk_num) {
    for (std::size_t frames = 0; frames < 24; ++frames) {
      const PagerPlan any = plan_pager(chunk_num, frames, 3);
      std::size_t num = 0;
      for (std::size_t i = 0; i < chunk_num; ++i) num += any.is_resident(i) ? 1 : 0;
      EXPECT_EQ(num, any.resident_num);
      EXPECT_LE(any.memory_frames(), std::max(frames, std::size_t{3}));
      EXPECT_TRUE(any.swapped_num() == 0 || any.frame_num == 3);
    }
  }
}

TEST(Pager, WrongUseIsAnError) {
  const Folder folder;
  const Layout layout{.chunk_num = 4, .memory_frames = 2, .frame_num = 2};
  Paged paged(layout, {folder.path()}, kernel_system());
  EXPECT_THROW(paged->acquire(4), ArgumentError);
  EXPECT_THROW(paged->release(0, Change::kClean), StateError);
  EXPECT_THROW(paged->set_order({4}), ArgumentError);
  paged->acquire(0);
  EXPECT_THROW(paged->acquire(0), StateError);
  paged->acquire(1, Content::kOverwritten);
  EXPECT_THROW(paged->release(1, Change::kClean), StateError);
  const std::string text = error_text([&] { paged->acquire(2); });
  EXPECT_NE(text.find("all 2 frames are held"), std::string::npos) << text;
  paged->release(1, Change::kDirty);
  paged->acquire(2);
}

TEST(Pager, AFailedWriteSurfacesAtFlushAndAtEveryAcquire) {
  for (const IoEngineKind kind : {IoEngineKind::kIoUring, IoEngineKind::kThreads}) {
    const Folder folder;
    EmulatedRings system;
    std::atomic<bool> bad{false};
    system.transfer_fault = [&](Direction direction, std::uint64_t offset, std::size_t) -> ssize_t {
      return bad && direction == Direction::kWrite && offset >= 8192 ? -ENOSPC : 0;
    };
    Layout layout{.chunk_num = 4, .chunk_bytes = 8192, .memory_frames = 2, .frame_num = 2};
    layout.engine.kind = kind;
    Paged paged(layout, {folder.path()}, system);
    paged->set_order(in_order(4));
    bad = true;
    paged->acquire(1);
    paged->release(1, Change::kDirty);
    try {
      paged->flush();
      FAIL() << "no error";
    } catch (const IoError& error) {
      EXPECT_EQ(error.code().value(), ENOSPC);
      EXPECT_NE(std::string(error.what()).find(folder.path()), std::string::npos) << error.what();
    }
    bad = false;
    EXPECT_THROW(paged->acquire(0), IoError);
    EXPECT_THROW(paged->flush(), IoError);
  }
}

TEST(Pager, AFailedReadAheadSurfacesAtTheNextAcquire) {
  const Folder folder;
  FaultySystem system;
  std::atomic<bool> bad{false};
  system.transfer_fault = [&](Direction direction, std::uint64_t, std::size_t) -> ssize_t {
    return bad && direction == Direction::kRead ? -EIO : 0;
  };
  Layout layout{.chunk_num = 6, .memory_frames = 3, .frame_num = 3};
  layout.engine.kind = IoEngineKind::kThreads;
  Paged paged(layout, {folder.path()}, system);
  bad = true;
  for (std::size_t chunk = 0; chunk < 6; ++chunk) {
    paged->acquire(chunk);
    paged->release(chunk, Change::kDirty);
  }
  paged->set_order(in_order(6));
  EXPECT_THROW(
      {
        for (std::size_t chunk = 0; chunk < 6; ++chunk) {
          paged->acquire(chunk);
          paged->release(chunk, Change::kClean);
        }
      },
      IoError);
}

TEST(Pager, ACorruptedSlotIsFoundByItsChecksum) {
  for (const bool checksums : {true, false}) {
    const Folder folder;
    const Layout layout{.chunk_num = 4, .memory_frames = 1, .frame_num = 1, .checksums = checksums};
    Paged paged(layout, {folder.path()}, kernel_system());
    for (std::size_t chunk = 0; chunk < 4; ++chunk) {
      fill_random(paged->acquire(chunk), chunk);
      paged->release(chunk, Change::kDirty);
    }
    paged->flush();
    const int fd = ::open(paged.space().files()[0].path.c_str(), O_RDWR | O_CLOEXEC);
    char value = 0;
    const auto at = static_cast<off_t>(2 * paged.space().slot_bytes() + 39999);
    ASSERT_EQ(::pread(fd, &value, 1, at), 1);
    value = static_cast<char>(value ^ 1);
    ASSERT_EQ(::pwrite(fd, &value, 1, at), 1);
    ASSERT_EQ(::fsync(fd), 0);
    ::close(fd);
    paged->acquire(1);
    paged->release(1, Change::kClean);
    const std::string text = error_text([&] { paged->acquire(2); });
    EXPECT_EQ(text.find("chunk 2") != std::string::npos && text.find("corrupted") != std::string::npos, checksums)
        << text;
    EXPECT_EQ(error_text([&] { paged->flush(); }).empty(), !checksums);
    EXPECT_EQ(error_text([&] { paged->acquire(2); }) == text, checksums);  // or it is held
  }
}

#if !defined(__SANITIZE_THREAD__)
TEST(Pager, AForkedChildLetsGoOfItAndItsParentGoesOn) {
  for (const IoEngineKind kind : {IoEngineKind::kIoUring, IoEngineKind::kThreads}) {
    const Folder folder;
    EmulatedRings system;
    std::atomic<bool> blocks{false};
    system.transfer_fault = [&](Direction, std::uint64_t, std::size_t) -> ssize_t {
      while (blocks) std::this_thread::yield();
      return 0;
    };
    const Layout layout{.engine = {.kind = kind, .block_bytes = 8192, .depth = 4}};
    auto paged = std::make_unique<Paged>(layout, std::vector{folder.path()}, system);
    const auto fill = [&](std::uint64_t seed) {
      for (std::size_t chunk = 0; chunk < layout.chunk_num; ++chunk) {
        fill_random((*paged)->acquire(chunk), seed + chunk);
        (*paged)->release(chunk, Change::kDirty);
      }
      (*paged)->flush();
    };
    const auto expect_filled = [&](std::uint64_t seed) {
      std::vector<std::byte> expected(layout.chunk_bytes);
      for (std::size_t chunk = 0; chunk < layout.chunk_num; ++chunk) {
        fill_random(expected, seed + chunk);
        EXPECT_EQ(std::memcmp((*paged)->acquire(chunk).data(), expected.data(), expected.size()), 0) << chunk;
        (*paged)->release(chunk, Change::kClean);
      }
    };
    const auto let_go = [&] {
      paged.reset();
      return true;
    };
    fill(1);
    EXPECT_TRUE(test::holds_in_child(let_go));
    expect_filled(1);
    // A write is under way, and a thread waits for its end.
    fill_random((*paged)->acquire(0), 1);
    blocks = true;
    (*paged)->release(0, Change::kDirty);
    std::thread waiter([&] { (*paged)->flush(); });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_TRUE(test::holds_in_child(let_go));
    blocks = false;
    waiter.join();
    expect_filled(1);
    fill(100);
    EXPECT_TRUE(test::holds_in_child(let_go));
    expect_filled(100);
    EXPECT_EQ(folder.file_num(), 1U);
  }
}
#endif

}  // namespace
}  // namespace zb
