// Destinations in which a rank's own part is the shard itself: which page goes where, and gathers into them.
#include "comm/peer_splice.h"

#include <gtest/gtest.h>

#include <cstring>

#include "comm/spliced_slot.h"
#include "common/page.h"
#include "sim/sim_pulled_ranks.h"

namespace zb {
namespace {

using namespace test::pulled;

TEST(SplicedLayout, TheOwnPartBeginsWithAPageAndEveryByteHasOne) {
  constexpr std::size_t kPage = 64;
  for (int world_size = 1; world_size <= 8; ++world_size) {
    for (int rank = 0; rank < world_size; ++rank) {
      for (std::size_t shard_bytes = 1; shard_bytes <= 3 * kPage; ++shard_bytes) {
        const SplicedLayout layout = spliced_layout(shard_bytes, true, rank, world_size, kPage);
        const std::size_t slice = layout.begin_bytes + static_cast<std::size_t>(rank) * shard_bytes;
        EXPECT_LT(layout.begin_bytes, kPage);
        EXPECT_EQ(slice, layout.before_num * kPage);
        EXPECT_GE(layout.own_num * kPage, shard_bytes);
        EXPECT_LT(layout.own_num * kPage, shard_bytes + kPage);
        const std::size_t end = layout.begin_bytes + static_cast<std::size_t>(world_size) * shard_bytes;
        const std::size_t pages = layout.before_num + layout.own_num + layout.after_num;
        EXPECT_GE(pages * kPage, end);
        EXPECT_TRUE(layout.after_num == 0 || pages * kPage < end + kPage);
      }
    }
  }
}

TEST(SplicedLayout, WithoutAnOwnPartAllOfItIsTheSlots) {
  const SplicedLayout layout = spliced_layout(100, false, 1, 3, 64);
  EXPECT_EQ(layout.begin_bytes, 0U);
  EXPECT_EQ(layout.own_num, 0U);
  EXPECT_EQ(layout.before_num + layout.after_num, 5U);
}

class SplicedRanks : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Pulled, SplicedRanks, testing::Values(2, 3, 5));

Region alone(const Rank& at, std::size_t bytes) {
  return {at.comm->allocate(bytes, BufferRole::kSharedAlone, nullptr, Category::kParameters)};
}

std::vector<float> gathered(int world_size, std::size_t numel, std::uint32_t seed) {
  std::vector<float> all;
  for (int rank = 0; rank < world_size; ++rank) {
    const std::vector<float> part = values_of(rank, numel, seed);
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

// Two units take turns in one slot, of one and of two parts, with a meeting and without.
TEST_P(SplicedRanks, GathersFindTheOwnPartInPlace) {
  constexpr DType kDtype = DType::kFloat32;
  for (std::uint32_t number = 0; number < test::kSimPolicyNum; ++number) {
    run_pulled(GetParam(), number, [&](Rank& at) {
      ASSERT_TRUE(at.comm->splices());
      Ledger ledger;
      const auto slot = at.comm->make_spliced_slot(&ledger, Category::kGatherSlots);
      const std::vector<std::vector<std::size_t>> units{{page_bytes() / 4}, {64, 3 * page_bytes() / 4 + 64, 128}};
      std::vector<std::vector<SplicedPart>> parts;
      for (const std::vector<std::size_t>& unit : units) {
        parts.emplace_back();
        for (const std::size_t numel : unit) {
          parts.back().push_back({alone(at, numel * sizeof(float)), numel * sizeof(float)});
        }
      }
      parts[1][2].own = {};  // not spliced
      const Region apart = at.shared(parts[1][2].shard_bytes);
      for (std::uint32_t round = 0; round < 4; ++round) {
        const std::uint32_t seed = number * 100 + round;
        for (std::size_t unit = 0; unit < units.size(); ++unit) {
          const std::vector<Region> destinations = slot->destinations(parts[unit]);
          std::vector<WorkPtr> works;
          for (std::size_t index = 0; index < units[unit].size(); ++index) {
            const bool is_spliced = static_cast<bool>(parts[unit][index].own);
            const Region source = is_spliced ? parts[unit][index].own : apart;
            const std::size_t numel = units[unit][index];
            const std::uint32_t of_part = seed + 17 * static_cast<std::uint32_t>(unit * 8 + index);
            at.write(source, values_of(at.rank, numel, of_part), kDtype);
            works.push_back(at.comm->start_all_gather({.source = source,
                                                       .destination = destinations[index],
                                                       .shard_bytes = numel * sizeof(float),
                                                       .label = "unit",
                                                       .holds_own_part = is_spliced}));
          }
          for (const WorkPtr& work : works) work->wait();
          for (std::size_t index = 0; index < units[unit].size(); ++index) {
            const std::size_t numel = units[unit][index];
            const std::uint32_t of_part = seed + 17 * static_cast<std::uint32_t>(unit * 8 + index);
            EXPECT_EQ(at.read(destinations[index], numel * static_cast<std::size_t>(at.world_size), kDtype),
                      gathered(at.world_size, numel, of_part));
          }
        }
      }
      const std::int64_t bytes = ledger.entry(Tier::kDevice, Category::kGatherSlots).current_bytes;
      EXPECT_GT(bytes, 0);
      EXPECT_EQ(bytes % static_cast<std::int64_t>(page_bytes()), 0);
    });
  }
}

// What a destination costs is what it has beyond the own part, and the ends of its pages.
TEST_P(SplicedRanks, TheSlotHoldsTheOthersPartsAlone) {
  run_pulled(GetParam(), 0, [](Rank& at) {
    const std::size_t shard_bytes = 16 * page_bytes();
    Ledger ledger;
    const auto slot = at.comm->make_spliced_slot(&ledger, Category::kGatherSlots);
    const SplicedPart part{alone(at, shard_bytes), shard_bytes};
    slot->destinations({&part, 1});
    EXPECT_EQ(ledger.entry(Tier::kDevice, Category::kGatherSlots).current_bytes,
              static_cast<std::int64_t>(shard_bytes * static_cast<std::size_t>(at.world_size - 1)));
  });
}

TEST_P(SplicedRanks, OnlyWholeBuffersOfTheRoleCanBeSpliced) {
  run_pulled(GetParam(), 0, [](Rank& at) {
    const auto slot = at.comm->make_spliced_slot(nullptr, Category::kGatherSlots);
    const Region good = alone(at, 512);
    for (const Region& bad : {at.shared(512), at.own(512), good.at(256)}) {
      const SplicedPart part{bad, 256};
      EXPECT_THROW(slot->destinations({&part, 1}), ArgumentError);
    }
  });
}

// The compute lane writes to a shard that a gather still shows to it through the destination.
TEST(SplicedRaces, AWriteToTheShardRacesWithReadsOfTheDestination) {
  std::string findings;
  run_pulled(
      2, 0,
      [](Rank& at) {
        const auto slot = at.comm->make_spliced_slot(nullptr, Category::kGatherSlots);
        const SplicedPart part{alone(at, 256), 256};
        const Region destination = slot->destinations({&part, 1}).front();
        const Lane other = at.lane == Lane::kGather ? Lane::kReduce : Lane::kGather;
        at.device->put_in(other, "write", {{part.own.data(), 256, true}}, [] {});
        at.device->put_in(Lane::kCompute, "read", {{destination.data(), 512, false}}, [] {});
      },
      [&](const std::string& finding) { findings += finding; });
  EXPECT_NE(findings.find("nothing orders that behind"), std::string::npos) << findings;
}

}  // namespace
}  // namespace zb
