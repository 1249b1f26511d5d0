#include "partition/flat_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>

#include "common/error.h"

namespace zb {
namespace {

std::vector<ParameterSpan> random_spans(std::mt19937& random) {
  std::vector<ParameterSpan> spans;
  const std::size_t span_num = random() % 12;
  for (std::size_t i = 0; i < span_num; ++i) {
    const std::size_t numel = random() % 4 == 0 ? random() % 3 : random() % 200;  // empty and scalar ones too
    spans.push_back({std::string("p") + std::to_string(i), numel, static_cast<int>(random() % 3)});
  }
  return spans;
}

// What each element of the buffer is: 0 for padding, one more than its span otherwise.
std::vector<std::size_t> owners(const FlatLayout& layout) {
  std::vector<std::size_t> owner(layout.padded_numel(), 0);
  for (std::size_t s = 0; s < layout.spans().size(); ++s) {
    const ParameterSpan& span = layout.spans()[s];
    EXPECT_LE(span.offset_numel + span.numel, layout.padded_numel());
    for (std::size_t i = 0; i < span.numel; ++i) {
      EXPECT_EQ(owner[span.offset_numel + i], 0U) << "two spans share element " << span.offset_numel + i;
      owner[span.offset_numel + i] = s + 1;
    }
  }
  return owner;
}

class RandomLayouts : public testing::TestWithParam<std::size_t> {
 protected:
  template <class Check>
  void for_each_layout(Check check) {
    std::mt19937 random(17);
    for (int round = 0; round < 200; ++round) {
      const std::size_t shard_num = 1 + random() % 9;
      const std::vector<ParameterSpan> spans = random_spans(random);
      check(FlatLayout(spans, shard_num, GetParam()), spans, random);
      if (HasFailure()) return;
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Alignments, RandomLayouts, testing::Values(1, 2, 16, 64));

TEST_P(RandomLayouts, SpansAreDisjointAlignedAndOrderedByParamGroup) {
  for_each_layout([&](const FlatLayout& layout, const std::vector<ParameterSpan>& given, std::mt19937&) {
    owners(layout);
    std::size_t numel = 0;
    for (const ParameterSpan& span : layout.spans()) {
      EXPECT_EQ(span.offset_numel % GetParam(), 0U);
      numel += span.numel;
    }
    EXPECT_EQ(layout.numel(), numel);
    std::vector<ParameterSpan> expected = given;
    std::stable_sort(expected.begin(), expected.end(),
                     [](const auto& a, const auto& b) { return a.param_group < b.param_group; });
    ASSERT_EQ(layout.spans().size(), expected.size());
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_EQ(layout.spans()[i].name, expected[i].name);
      EXPECT_EQ(layout.spans()[i].numel, expected[i].numel);
    }
  });
}

TEST_P(RandomLayouts, ShardsAreEqualAndAlignedWithLittlePadding) {
  for_each_layout([&](const FlatLayout& layout, const std::vector<ParameterSpan>&, std::mt19937&) {
    EXPECT_EQ(layout.shard_numel() * layout.shard_num(), layout.padded_numel());
    EXPECT_EQ(layout.shard_numel() % GetParam(), 0U);
    const std::size_t most = layout.numel() + (layout.spans().size() + layout.shard_num()) * GetParam();
    EXPECT_LE(layout.padded_numel(), most);
  });
}

TEST_P(RandomLayouts, GapsAndSpansCoverTheBufferExactly) {
  for_each_layout([&](const FlatLayout& layout, const std::vector<ParameterSpan>&, std::mt19937&) {
    std::vector<std::size_t> owner = owners(layout);
    std::size_t cursor = 0;
    for (const Segment& gap : layout.gaps()) {
      EXPECT_LE(cursor, gap.begin);
      EXPECT_LT(gap.begin, gap.end);
      cursor = gap.end;
      for (std::size_t i = gap.begin; i < gap.end; ++i) {
        ASSERT_EQ(owner.at(i), 0U);
        owner[i] = 1;
      }
    }
    EXPECT_EQ(std::count(owner.begin(), owner.end(), 0U), 0) << "elements in neither a span nor a gap";
  });
}

TEST_P(RandomLayouts, SegmentsNameTheParamGroupOfEveryElement) {
  for_each_layout([&](const FlatLayout& layout, const std::vector<ParameterSpan>&, std::mt19937&) {
    std::vector<int> row(layout.padded_numel(), -1);
    std::size_t cursor = 0;
    int last_row = -1;
    for (const Segment& segment : layout.segments()) {
      EXPECT_LE(cursor, segment.begin);
      EXPECT_LE(segment.begin, segment.end);
      EXPECT_NE(segment.row, last_row) << "a run is cut in two";
      for (std::size_t i = segment.begin; i < segment.end; ++i) row[i] = segment.row;
      cursor = segment.end;
      last_row = segment.row;
    }
    for (const ParameterSpan& span : layout.spans()) {
      for (std::size_t i = 0; i < span.numel; ++i) ASSERT_EQ(row[span.offset_numel + i], span.param_group);
    }
  });
}

TEST_P(RandomLayouts, SegmentsWithinAreThePartsOfTheWhole) {
  for_each_layout([&](const FlatLayout& layout, const std::vector<ParameterSpan>&, std::mt19937& random) {
    std::vector<int> row(layout.padded_numel(), -1);
    for (const Segment& segment : layout.segments()) {
      for (std::size_t i = segment.begin; i < segment.end; ++i) row[i] = segment.row;
    }
    std::vector<std::pair<std::size_t, std::size_t>> ranges;
    for (std::size_t shard = 0; shard < layout.shard_num(); ++shard) {
      ranges.emplace_back(shard * layout.shard_numel(), (shard + 1) * layout.shard_numel());
    }
    const std::size_t a = random() % (layout.padded_numel() + 1);
    const std::size_t b = random() % (layout.padded_numel() + 1);
    ranges.emplace_back(std::min(a, b), std::max(a, b));
    for (const auto& [begin, end] : ranges) {
      std::vector<int> part(end - begin, -1);
      std::size_t cursor = 0;
      for (const Segment& segment : layout.segments_within(begin, end)) {
        ASSERT_LE(cursor, segment.begin);
        ASSERT_LT(segment.begin, segment.end);
        ASSERT_LE(segment.end, end - begin);
        cursor = segment.end;
        std::fill(part.begin() + static_cast<long>(segment.begin), part.begin() + static_cast<long>(segment.end),
                  segment.row);
      }
      ASSERT_TRUE(std::equal(part.begin(), part.end(), row.begin() + static_cast<long>(begin)));
    }
  });
}

TEST(FlatLayout, KeepsTheGivenOrderWithinAParamGroup) {
  const FlatLayout layout({{"a", 3, 1}, {"b", 5, 0}, {"c", 1, 1}, {"d", 2, 0}}, 2, 4);
  std::vector<std::string> names;
  std::vector<std::size_t> offsets;
  for (const ParameterSpan& span : layout.spans()) {
    names.push_back(span.name);
    offsets.push_back(span.offset_numel);
  }
  EXPECT_EQ(names, (std::vector<std::string>{"b", "d", "a", "c"}));
  EXPECT_EQ(offsets, (std::vector<std::size_t>{0, 8, 12, 16}));
  EXPECT_EQ(layout.padded_numel(), 24U);
  EXPECT_EQ(layout.segments(), (std::vector<Segment>{{0, 10, 0}, {12, 17, 1}}));
  EXPECT_EQ(layout.gaps(), (std::vector<Segment>{{5, 8, 0}, {10, 12, 0}, {15, 16, 0}, {17, 24, 0}}));
}

TEST(FlatLayout, FewerElementsThanShardsLeavesWholeShardsEmpty) {
  const FlatLayout layout({{"scalar", 1, 0}}, 4, 16);
  EXPECT_EQ(layout.shard_numel(), 16U);
  EXPECT_EQ(layout.segments_within(0, 16), (std::vector<Segment>{{0, 1, 0}}));
  EXPECT_TRUE(layout.segments_within(16, 32).empty());
}

TEST(FlatLayout, WithoutElementsEveryShardStillHasAddresses) {
  for (const FlatLayout& layout : {FlatLayout({}, 3, 16), FlatLayout({{"empty", 0, 0}}, 3, 16)}) {
    EXPECT_EQ(layout.numel(), 0U);
    EXPECT_EQ(layout.shard_numel(), 16U);
    EXPECT_EQ(layout.gaps(), (std::vector<Segment>{{0, 48, 0}}));
  }
}

TEST(FlatLayout, RejectsNoShardsAndNoAlignment) {
  EXPECT_THROW(FlatLayout({}, 0, 16), ArgumentError);
  EXPECT_THROW(FlatLayout({}, 1, 0), ArgumentError);
}

}  // namespace
}  // namespace zb
