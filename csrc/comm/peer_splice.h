// The memory of a spliced slot ([Note: spliced slots] in spliced_slot.h) over a PeerLink's pages: which page goes
// where.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "comm/lane_transport.h"
#include "comm/peer_link.h"

namespace zb {

// Where a destination's bytes and a rank's own part of them lie in a row of pages. Pure arithmetic.
struct SplicedLayout {
  std::size_t begin_bytes = 0;  // of the destination, in the first page
  std::size_t before_num = 0;   // pages in front of the own part
  std::size_t own_num = 0;
  std::size_t after_num = 0;
};
SplicedLayout spliced_layout(std::size_t shard_bytes, bool has_own, int rank, int world_size, std::size_t page_bytes);

class PeerSplice final : public SplicedMemory {
 public:
  // The allocation that begins there and is alone in its pages; null: there is none.
  using FindOwn = std::function<std::shared_ptr<PeerMemory>(const std::byte* data)>;

  PeerSplice(int rank, int world_size, std::unique_ptr<PeerPages> pages, FindOwn find_own);

  std::vector<std::shared_ptr<std::byte>> destinations(std::span<const Part> parts) override;
  std::size_t bytes() const noexcept override { return pages_->page_num() * pages_->page_bytes(); }

 private:
  int rank_;
  int world_size_;
  std::unique_ptr<PeerPages> pages_;
  FindOwn find_own_;
};

}  // namespace zb
