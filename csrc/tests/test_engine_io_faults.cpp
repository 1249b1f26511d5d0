// The engine with its state in files of which one rank's fail, at the line to the kernel: that rank raises what failed,
// the others learn of it and of the reason, and no file stays. Transfers that are only short change no bit.
#include <atomic>
#include <cerrno>
#include <memory>
#include <string>

#include "engine_steps.h"
#include "engine_support.h"
#include "host_stores.h"
#include "io_support.h"

namespace zb {
namespace {

using test::FaultySystem;
using test::Folder;
using test::message_of;
using test::run_ranks;
using test::same_on_all;
using test::ToyOptions;
using test::ToyRank;
using test::try_ranks;
using test::Values;
using test::walk;

// The last rank's files go through `faulty`, the others' through the kernel.
struct Disk {
  Folder folder;
  FaultySystem faulty;
  std::atomic<bool> is_bad{false};
  int rank_num = 1;
  std::atomic<int> store_num{0};

  auto make_store(const IoEngineOptions& engine) {
    return [this, engine](Ledger* ledger, const DeviceParts& parts) {
      HostStoreOptions options = test::small_chunks(parts);
      options.paged = PagedStateOptions{.directories = {folder.path()}, .engine = engine, .checksums = true};
      if (++store_num % rank_num == 0) options.system = &faulty;
      return make_host_store(ledger, parts, options);
    };
  }
};

constexpr IoEngineOptions kThreads{.kind = IoEngineKind::kThreads, .block_bytes = 4096, .depth = 1};

class EngineIoFaults : public test::StageTest {
 protected:
  ToyOptions options_on(Disk& disk, const IoEngineOptions& engine = kThreads) const {
    ToyOptions with = options();
    disk.rank_num = world_size();
    with.make_store = disk.make_store(engine);
    with.keep_parameter_shards = true;
    return with;
  }

  // In every group of ranks one raised an IoError, and the others were told of it.
  void expect_one_and_all(const std::vector<std::exception_ptr>& errors, int error_number, const std::string& text) {
    const auto ranks = static_cast<std::size_t>(world_size());
    for (std::size_t group = 0; group < errors.size(); group += ranks) {
      std::string own;
      for (std::size_t i = group; i < group + ranks; ++i) {
        try {
          ASSERT_NE(errors[i], nullptr) << "rank " << i - group << " trained on";
          std::rethrow_exception(errors[i]);
        } catch (const IoError& error) {
          EXPECT_TRUE(own.empty()) << "two ranks raised";
          own = error.what();
          EXPECT_EQ(error.code().value(), error_number) << own;
        } catch (const CommunicationError&) {
        }
      }
      EXPECT_NE(own.find(text), std::string::npos) << own;
      for (std::size_t i = group; i < group + ranks; ++i) {
        EXPECT_NE(message_of(errors[i]).find(own), std::string::npos) << message_of(errors[i]);
      }
    }
  }
};

INSTANTIATE_TEST_SUITE_P(OnCpu, EngineIoFaults, test::on_cpu(testing::Range(1, 4)), test::stage_test_name);
INSTANTIATE_TEST_SUITE_P(InSim, EngineIoFaults, test::in_sim(testing::Values(2), 2), test::stage_test_name);

TEST_P(EngineIoFaults, ADeviceThatFailsEndsEveryRankWithItsReason) {
  for (const auto& [number, cure] : {std::pair{EIO, "another path"}, {ENOSPC, "free space"}, {EFBIG, "ulimit -f"}}) {
    for (const Direction bad : {Direction::kRead, Direction::kWrite}) {
      Disk disk;
      disk.faulty.transfer_fault = [&, number = number](Direction direction, std::uint64_t, std::size_t) -> ssize_t {
        return disk.is_bad && direction == bad ? -number : 0;
      };
      const ToyOptions with = options_on(disk);
      std::atomic<int> trained_num{0};
      const auto errors = try_ranks(with, [&](ToyRank& toy) {
        toy.train();
        toy.train();
        if (++trained_num % world_size() == 0) disk.is_bad = true;
        for (int step = 0; step < 5; ++step) toy.train();
        toy.state(FullState::kExpAvg);
      });
      expect_one_and_all(errors, number, disk.folder.path());
      expect_one_and_all(errors, number, cure);
      EXPECT_EQ(disk.folder.file_num(), 0U);
      if (HasFailure()) return;
    }
  }
}

// What failed once fails for good, with the same words.
TEST_P(EngineIoFaults, LaterCallsRaiseTheSame) {
  Disk disk;
  disk.faulty.transfer_fault = [&](Direction, std::uint64_t, std::size_t) -> ssize_t { return disk.is_bad ? -EIO : 0; };
  try_ranks(options_on(disk), [&](ToyRank& toy) {
    toy.train();
    disk.is_bad = true;
    std::string first;
    for (int step = 0; step < 5 && first.empty(); ++step) first = test::error_text([&] { toy.train(); });
    EXPECT_NE(first.find("failed"), std::string::npos) << first;
    EXPECT_EQ(test::error_text([&] { toy.engine().begin_forward(true); }), first);
    EXPECT_EQ(test::error_text([&] { toy.engine().gather({1}); }), first);
  });
}

TEST_P(EngineIoFaults, APathThatDoesNotServeEndsEveryRankAtTheStart) {
  struct Case {
    bool direct_refused;
    int fallocate_error;
    int error_number;
    const char* cure;
  };
  for (const Case& at_start :
       {Case{true, 0, EINVAL, "choose another path or allow the fallback"},
        Case{false, ENOSPC, ENOSPC, "free some or give another path"},
        Case{false, EDQUOT, EDQUOT, "free some or give another path"}, Case{false, EFBIG, EFBIG, "ulimit -f"},
        Case{false, EOPNOTSUPP, EOPNOTSUPP, "a file system with fallocate"}}) {
    Disk disk;
    disk.faulty.direct_refused = at_start.direct_refused;
    disk.faulty.fallocate_error = at_start.fallocate_error;
    const auto errors = try_ranks(options_on(disk), [](ToyRank&) {});
    expect_one_and_all(errors, at_start.error_number, disk.folder.path());
    expect_one_and_all(errors, at_start.error_number, at_start.cure);
    EXPECT_EQ(disk.folder.file_num(), 0U);
    if (HasFailure()) return;
  }
}

TEST_P(EngineIoFaults, ShortAndInterruptedTransfersChangeNoBit) {
  const ToyOptions on_device = options();
  const Values expected = same_on_all(on_device, [&](ToyRank& toy) { return walk(toy, on_device); });
  Disk disk;
  std::atomic<unsigned> calls{0};
  disk.faulty.transfer_fault = [&](Direction, std::uint64_t, std::size_t bytes) -> ssize_t {
    switch (++calls % 4) {
      case 0:
        return -EINTR;
      case 1:
        return static_cast<ssize_t>(std::min<std::size_t>(bytes, 512));
      case 2:
        return static_cast<ssize_t>(std::min<std::size_t>(bytes, 1536));
      default:
        return 0;
    }
  };
  IoEngineOptions engine = kThreads;
  engine.allow_fallback = true;  // tmpfs and others take no transfers of sectors
  ToyOptions with = options_on(disk, engine);
  EXPECT_EQ(same_on_all(with, [&](ToyRank& toy) { return walk(toy, with); }), expected);
  EXPECT_GT(calls, 100U);
}

}  // namespace
}  // namespace zb
