#include "stores/store.h"

#include <string>

#include "common/error.h"

namespace zb {

void check_segments(const ShardSpec& spec) {
  std::size_t cursor = 0;
  for (const Segment& segment : spec.segments) {
    ZB_EXPECT(segment.begin >= cursor && segment.begin <= segment.end && segment.end <= spec.numel,
              "segment [" + std::to_string(segment.begin) + ", " + std::to_string(segment.end) +
                  ") is out of order or outside its shard of " + std::to_string(spec.numel) + " elements");
    ZB_EXPECT(segment.row >= 0, "a segment needs a row of hyperparameters, got " + std::to_string(segment.row));
    cursor = segment.end;
  }
}

void check_rows(std::size_t shard, std::span<const Segment> segments, std::size_t row_num) {
  for (const Segment& segment : segments) {
    ZB_EXPECT(static_cast<std::size_t>(segment.row) < row_num,
              "shard " + std::to_string(shard) + " needs hyperparameters of param group " +
                  std::to_string(segment.row) + ", got " + std::to_string(row_num) + " rows");
  }
}

void Store::choose_share(double) { ZB_EXPECT_STATE(false, "the store's share of state on the host is fixed"); }
void Store::take_share() { ZB_EXPECT_STATE(false, "the store's share of state on the host is fixed"); }

}  // namespace zb
