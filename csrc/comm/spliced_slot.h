// Memory for gathers in which a rank's own part need not be copied.
//
// [Note: spliced slots]
// What a rank gathers contains its own part, which it has already. Copying it costs a read and a write of the shard in
// every gather, and room in the slot. Where a device can map memory in several places, a gather's destination is a
// range of addresses instead: at this rank's slice the shard's own pages appear, elsewhere pages of the slot. The
// destination begins within its first page such that the slice begins with a page; behind the shard its last page goes
// on with what the next rank's part begins with. So whoever writes to a destination's slice of this rank writes to the
// shard. And one page is of one gather at a time: a slot is used for the parts of one unit, then of another.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "comm/communicator.h"

namespace zb {

struct SplicedPart {
  Region own;  // a whole buffer of BufferRole::kSharedAlone; none: all of the destination is the slot's
  std::size_t shard_bytes = 0;
};

class SplicedSlot {
 public:
  virtual ~SplicedSlot() = default;
  SplicedSlot(const SplicedSlot&) = delete;
  SplicedSlot& operator=(const SplicedSlot&) = delete;

  // A destination for an all_gather of each part, of world_size * shard_bytes, to be used together. Not zeroed, private
  // and not collective. The slot grows to the largest such set. Throws OutOfMemoryError.
  virtual std::vector<Region> destinations(std::span<const SplicedPart> parts) = 0;

 protected:
  SplicedSlot() = default;
};

}  // namespace zb
