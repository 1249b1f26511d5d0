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

void Store::choose_share(double) { ZB_EXPECT_STATE(false, "the store's share of state on the host is fixed"); }
void Store::take_share() { ZB_EXPECT_STATE(false, "the store's share of state on the host is fixed"); }

}  // namespace zb
