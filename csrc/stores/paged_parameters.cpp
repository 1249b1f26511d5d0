#include "stores/paged_parameters.h"

#include <algorithm>
#include <utility>

#include "common/error.h"

namespace zb {
namespace {

constexpr std::size_t kCopyNum = 2;   // one being copied while the next is got ready
constexpr std::size_t kWriteNum = 2;  // one being written in memory and one to its file
// A round without a step (many evaluations) is no order to read ahead by, beyond so many times every chunk.
constexpr std::size_t kLongestRound = 64;

std::vector<std::size_t> chunk_bytes_of(std::span<const ParameterShard> shards, std::size_t chunk_numel) {
  ZB_EXPECT(chunk_numel > 0, "chunks need at least one element");
  std::vector<std::size_t> bytes;
  for (const ParameterShard& shard : shards) {
    for (std::size_t begin = 0; begin < shard.numel; begin += chunk_numel) {
      bytes.push_back(std::min(chunk_numel, shard.numel - begin) * dtype_bytes(shard.dtype));
    }
  }
  return bytes;
}

std::size_t largest_of(const std::vector<std::size_t>& chunk_bytes) {
  return chunk_bytes.empty() ? 1 : *std::ranges::max_element(chunk_bytes);
}

// Beside the chunks under copies and updates, reads ahead fill the engine's depth twice, and what was given for them.
PagerPlan plan_for(const std::vector<std::size_t>& chunk_bytes, const PagedStateOptions& options) {
  const std::size_t slot_bytes = SwapSpace::slot_bytes_for(largest_of(chunk_bytes), options.directories.size());
  const std::size_t depth_bytes = options.engine.depth * options.engine.block_bytes;
  const std::size_t frame_num =
      2 * ((depth_bytes + slot_bytes - 1) / slot_bytes) + options.ahead_bytes / slot_bytes + kCopyNum + kWriteNum;
  return plan_pager(chunk_bytes.size(), options.resident_bytes / slot_bytes + frame_num, frame_num);
}

std::size_t frames_bytes(const PagerPlan& plan, const std::vector<std::size_t>& chunk_bytes,
                         const PagedStateOptions& options) {
  return plan.memory_frames() * SwapSpace::slot_bytes_for(largest_of(chunk_bytes), options.directories.size());
}

std::size_t swapped_bytes(const PagerPlan& plan, const std::vector<std::size_t>& chunk_bytes) {
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < chunk_bytes.size(); ++i) bytes += plan.is_resident(i) ? 0 : chunk_bytes[i];
  return bytes;
}

}  // namespace

std::size_t paged_parameters_bytes(std::span<const ParameterShard> shards, std::size_t chunk_numel,
                                   const PagedStateOptions& options) {
  ZB_EXPECT(!options.directories.empty(), "parameters on NVMe need at least one path");
  const std::vector<std::size_t> chunk_bytes = chunk_bytes_of(shards, chunk_numel);
  return frames_bytes(plan_for(chunk_bytes, options), chunk_bytes, options);
}

std::size_t most_paged_parameters_bytes(std::span<const ParameterShard> shards, std::size_t chunk_numel,
                                        const PagedStateOptions& options) {
  const std::vector<std::size_t> chunk_bytes = chunk_bytes_of(shards, chunk_numel);
  return frames_bytes(plan_pager(chunk_bytes.size(), chunk_bytes.size(), 1), chunk_bytes, options);
}

std::size_t swapped_parameters_bytes(std::span<const ParameterShard> shards, std::size_t chunk_numel,
                                     const PagedStateOptions& options) {
  ZB_EXPECT(!options.directories.empty(), "parameters on NVMe need at least one path");
  const std::vector<std::size_t> chunk_bytes = chunk_bytes_of(shards, chunk_numel);
  return swapped_bytes(plan_for(chunk_bytes, options), chunk_bytes);
}

std::size_t largest_paged_shard_bytes(std::span<const ParameterShard> shards, std::size_t chunk_numel,
                                      const PagedStateOptions& options) {
  std::size_t numel = 0;
  for (const ParameterShard& shard : shards) numel = std::max(numel, shard.numel);
  return (numel + chunk_numel - 1) / chunk_numel *
         SwapSpace::slot_bytes_for(largest_of(chunk_bytes_of(shards, chunk_numel)), options.directories.size());
}

PagedParameters::PagedParameters(std::span<const ParameterShard> shards, std::size_t chunk_numel,
                                 const PagedStateOptions& options, std::span<std::byte> memory,
                                 std::shared_ptr<Device> device, Ledger* ledger, System& system)
    : shards_(shards.begin(), shards.end()),
      chunk_numel_(chunk_numel),
      chunk_bytes_(chunk_bytes_of(shards, chunk_numel)),
      plan_(plan_for(chunk_bytes_, options)),
      space_({.directories = options.directories,
              .owner = options.owner + "-parameters",
              .slot_bytes = largest_of(chunk_bytes_),
              .slot_num = plan_.swapped_num(),
              .direct = options.direct,
              .allow_fallback = options.engine.allow_fallback},
             system),
      engine_(make_io_engine(options.engine, space_.files(), std::span(&memory, 1), system)),
      pager_(plan_, chunk_bytes_, space_, *engine_, memory,
             {.spare_frame_num = kCopyNum + kWriteNum, .checksums = options.checksums}),
      device_(std::move(device)),
      is_updated_(shards_.size()),
      are_all_frozen_(std::ranges::all_of(shards_, &ParameterShard::is_frozen)) {
  std::size_t chunk = 0;
  for (const ParameterShard& shard : shards_) {
    first_chunk_.push_back(chunk);
    chunk += (shard.numel + chunk_numel - 1) / chunk_numel;
  }
  counted_ = Allocation(ledger, Tier::kNvme, Category::kParameters, swapped_bytes(plan_, chunk_bytes_));
}

PagedParameters::~PagedParameters() = default;

void PagedParameters::fetch(std::size_t shard, const Copy& copy) {
  release(shard);
  std::size_t offset_bytes = 0;
  for (std::size_t chunk = first_chunk_.at(shard); chunk < end_chunk(shard); ++chunk) {
    {
      const std::lock_guard lock(mutex_);
      while (retained_.size() >= kCopyNum) {
        device_->synchronize(retained_.front().copied);
        pager_.release(retained_.front().chunk, Change::kClean);
        retained_.pop_front();
      }
    }
    record(chunk);
    const std::span<const std::byte> memory = pager_.acquire(chunk);
    const MarkPtr copied = copy(offset_bytes, memory);
    offset_bytes += memory.size();
    const std::lock_guard lock(mutex_);
    retained_.push_back({shard, chunk, copied});
  }
}

bool PagedParameters::is_read(std::size_t shard) const {
  std::size_t ahead = pager_.ahead_frame_num();
  for (std::size_t chunk = first_chunk_.at(shard); chunk < end_chunk(shard); ++chunk) {
    if (plan_.is_resident(chunk)) continue;
    if (ahead-- == 0) return true;
    if (!pager_.is_in_memory(chunk)) return false;
  }
  return true;
}

void PagedParameters::release(std::size_t shard) {
  const std::lock_guard lock(mutex_);
  for (auto chunk_in_copy = retained_.begin(); chunk_in_copy != retained_.end();) {
    if (chunk_in_copy->shard != shard) {
      ++chunk_in_copy;
      continue;
    }
    device_->synchronize(chunk_in_copy->copied);
    pager_.release(chunk_in_copy->chunk, Change::kClean);
    chunk_in_copy = retained_.erase(chunk_in_copy);
  }
}

void PagedParameters::write(std::size_t shard, std::size_t begin, const std::function<void(std::byte* chunk)>& fill) {
  const std::size_t chunk = first_chunk_.at(shard) + begin / chunk_numel_;
  fill(pager_.acquire(chunk, Content::kOverwritten).data());
  pager_.release(chunk, Change::kDirty);
}

std::vector<std::string> PagedParameters::notes() const {
  std::vector<std::string> notes = space_.notes();
  if (!engine_->note().empty()) notes.push_back(engine_->note());
  return notes;
}

void PagedParameters::begin_update(std::size_t shard) {
  if (is_updated_.at(shard)) {
    end_round();
    is_updated_.assign(is_updated_.size(), false);
  }
  is_updated_[shard] = true;
}

void PagedParameters::end_round() {
  if (round_ != order_ && round_.size() <= kLongestRound * chunk_bytes_.size()) {
    order_ = round_;
    pager_.set_order(order_);
  }
  round_.clear();
}

void PagedParameters::record(std::size_t chunk) {
  if (are_all_frozen_ && round_.size() >= chunk_bytes_.size() && chunk == round_.front()) end_round();
  if (round_.size() <= kLongestRound * chunk_bytes_.size()) round_.push_back(chunk);
}

}  // namespace zb
