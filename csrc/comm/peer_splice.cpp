#include "comm/peer_splice.h"

#include <algorithm>
#include <utility>

#include "common/error.h"
#include "common/round_up.h"

namespace zb {

SplicedLayout spliced_layout(std::size_t shard_bytes, bool has_own, int rank, int world_size, std::size_t page_bytes) {
  const std::size_t all_bytes = static_cast<std::size_t>(world_size) * shard_bytes;
  SplicedLayout layout;
  if (has_own) {
    const std::size_t slice_bytes = static_cast<std::size_t>(rank) * shard_bytes;
    layout.begin_bytes = round_up(slice_bytes, page_bytes) - slice_bytes;
    layout.before_num = (layout.begin_bytes + slice_bytes) / page_bytes;
    layout.own_num = round_up(shard_bytes, page_bytes) / page_bytes;
  }
  const std::size_t page_num =
      round_up(layout.begin_bytes + std::max<std::size_t>(all_bytes, 1), page_bytes) / page_bytes;
  layout.after_num = page_num - std::min(page_num, layout.before_num + layout.own_num);
  return layout;
}

PeerSplice::PeerSplice(int rank, int world_size, std::unique_ptr<PeerPages> pages, FindOwn find_own)
    : rank_(rank), world_size_(world_size), pages_(std::move(pages)), find_own_(std::move(find_own)) {}

std::vector<std::shared_ptr<std::byte>> PeerSplice::destinations(std::span<const Part> parts) {
  std::vector<SplicedLayout> layouts;
  std::size_t page_num = 0;
  for (const Part& part : parts) {
    layouts.push_back(spliced_layout(part.shard_bytes, part.own != nullptr, rank_, world_size_, pages_->page_bytes()));
    page_num += layouts.back().before_num + layouts.back().after_num;
  }
  if (page_num > pages_->page_num()) pages_->grow(page_num);
  std::vector<std::shared_ptr<std::byte>> memories;
  std::size_t first = 0;
  for (std::size_t index = 0; index < parts.size(); ++index) {
    const SplicedLayout& layout = layouts[index];
    std::shared_ptr<PeerMemory> own;
    if (parts[index].own != nullptr) {
      own = find_own_(parts[index].own);
      ZB_EXPECT(
          own != nullptr,
          "a part to splice must be a whole buffer, allocated with BufferRole::kSharedAlone by this communicator");
    }
    std::shared_ptr<std::byte> mapped = pages_->map(first, layout.before_num, own, layout.after_num);
    first += layout.before_num + layout.after_num;
    std::byte* const begin = mapped.get() + layout.begin_bytes;
    memories.emplace_back(std::move(mapped), begin);
  }
  return memories;
}

}  // namespace zb
