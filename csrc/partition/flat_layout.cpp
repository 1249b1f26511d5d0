#include "partition/flat_layout.h"

#include <algorithm>

#include "common/error.h"
#include "common/round_up.h"

namespace zb {

FlatLayout::FlatLayout(std::vector<ParameterSpan> spans, std::size_t shard_num, std::size_t alignment_numel)
    : spans_(std::move(spans)), shard_num_(shard_num) {
  ZB_EXPECT(shard_num > 0, "a flat layout needs at least one shard");
  ZB_EXPECT(alignment_numel > 0, "the alignment of a flat layout must be positive");
  std::stable_sort(spans_.begin(), spans_.end(),
                   [](const ParameterSpan& a, const ParameterSpan& b) { return a.param_group < b.param_group; });
  std::size_t cursor = 0;
  for (ParameterSpan& span : spans_) {
    const std::size_t begin = round_up(cursor, alignment_numel);
    if (begin > cursor) gaps_.push_back({cursor, begin, 0});
    span.offset_numel = begin;
    cursor = begin + span.numel;
    numel_ += span.numel;
    if (!segments_.empty() && segments_.back().row == span.param_group) {
      segments_.back().end = cursor;
    } else {
      segments_.push_back({begin, cursor, span.param_group});
    }
  }
  // Never empty, so that a unit of zero-sized parameters still has addresses.
  padded_numel_ = round_up(std::max<std::size_t>(cursor, 1), shard_num_ * alignment_numel);
  if (padded_numel_ > cursor) gaps_.push_back({cursor, padded_numel_, 0});
}

std::vector<Segment> within(const std::vector<Segment>& segments, std::size_t begin, std::size_t end) {
  std::vector<Segment> result;
  for (const Segment& segment : segments) {
    const std::size_t from = std::max(segment.begin, begin);
    const std::size_t to = std::min(segment.end, end);
    if (from < to) result.push_back({from - begin, to - begin, segment.row});
  }
  return result;
}

std::vector<Segment> FlatLayout::segments_within(std::size_t begin, std::size_t end) const {
  return within(segments_, begin, end);
}

}  // namespace zb
