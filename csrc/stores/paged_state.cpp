#include "stores/paged_state.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "common/error.h"
#include "common/round_up.h"

namespace zb {
namespace {

constexpr std::size_t kStateNum = 3;
constexpr std::size_t kLineBytes = 64;

// Bytes of one state in a chunk: each begins on a line.
std::size_t part_bytes(std::size_t numel) { return round_up(numel * sizeof(float), kLineBytes); }

// Where the chunks of each shard lie, and how large they are.
struct ChunkTable {
  ChunkTable(std::span<const std::size_t> shard_numels, std::size_t chunk_numel)
      : shards(shard_numels.begin(), shard_numels.end()) {
    ZB_EXPECT(chunk_numel > 0, "chunks need at least one element");
    for (const std::size_t numel : shards) {
      first.push_back(numels.size());
      for (std::size_t begin = 0; begin < numel; begin += chunk_numel) {
        numels.push_back(std::min(chunk_numel, numel - begin));
      }
    }
  }
  std::size_t largest_bytes() const {
    return numels.empty() ? 1 : kStateNum * part_bytes(*std::ranges::max_element(numels));
  }
  std::size_t numel() const { return std::accumulate(shards.begin(), shards.end(), std::size_t{0}); }
  std::vector<std::size_t> chunk_bytes() const {
    std::vector<std::size_t> bytes;
    for (const std::size_t numel : numels) bytes.push_back(kStateNum * part_bytes(numel));
    return bytes;
  }

  std::vector<std::size_t> shards;  // numel of each
  std::vector<std::size_t> first;   // chunk of each shard
  std::vector<std::size_t> numels;  // of each chunk
};

// While one chunk is worked on, reads ahead fill the engine's depth, and so do writes behind.
PagerPlan plan_for(const ChunkTable& table, const PagedStateOptions& options) {
  const std::size_t slot_bytes = SwapSpace::slot_bytes_for(table.largest_bytes(), options.directories.size());
  const std::size_t depth_bytes = options.engine.depth * options.engine.block_bytes;
  const std::size_t frame_num = 2 * ((depth_bytes + slot_bytes - 1) / slot_bytes) + 2;
  return plan_pager(table.numels.size(), options.resident_bytes / slot_bytes + frame_num, frame_num);
}

std::size_t swapped_numel(const ChunkTable& table, const PagerPlan& plan) {
  std::size_t numel = 0;
  for (std::size_t i = 0; i < table.numels.size(); ++i) numel += plan.is_resident(i) ? 0 : table.numels[i];
  return numel;
}

class PagedStateImpl final : public PagedState {
 public:
  PagedStateImpl(ChunkTable table, std::size_t chunk_numel, const PagedStateOptions& options,
                 std::span<std::byte> memory, Ledger* ledger, System& system)
      : table_(std::move(table)),
        chunk_numel_(chunk_numel),
        plan_(plan_for(table_, options)),
        space_({.directories = options.directories,
                .owner = options.owner,
                .slot_bytes = table_.largest_bytes(),
                .slot_num = plan_.swapped_num(),
                .direct = options.direct,
                .allow_fallback = options.engine.allow_fallback},
               system),
        engine_(make_io_engine(options.engine, space_.files(), std::span(&memory, 1), system)),
        pager_(plan_, table_.chunk_bytes(), space_, *engine_, memory,
               {.checksums = options.checksums, .on_transfer = told_by_shard(options)}),
        is_recorded_(table_.numels.size()) {
    swapped_numel_ = swapped_numel(table_, plan_);
    count(ledger, Tier::kHost, table_.numel() - swapped_numel_, plan_.memory_frames() * space_.slot_bytes());
    count(ledger, Tier::kNvme, swapped_numel_, space_.file_bytes() * options.directories.size());
  }

  void add_shard(std::size_t numel) override {
    ZB_EXPECT_STATE(added_num_ < table_.shards.size() && table_.shards[added_num_] == numel,
                    "shard " + std::to_string(added_num_) + " of " + std::to_string(numel) +
                        " elements is not the one that the paged state was made for");
    ++added_num_;
  }

  StateChunk borrow(std::size_t shard, std::size_t begin, std::size_t end) override {
    const std::size_t chunk = chunk_at(shard, begin, end);
    record(chunk);
    std::byte* const memory = pager_.acquire(chunk).data();
    const std::size_t bytes = part_bytes(end - begin);
    return {reinterpret_cast<float*>(memory), reinterpret_cast<float*>(memory + bytes),
            reinterpret_cast<float*>(memory + 2 * bytes)};
  }
  void give_back(std::size_t shard, std::size_t begin, std::size_t end, ChunkUse use) override {
    pager_.release(chunk_at(shard, begin, end), use == ChunkUse::kWritten ? Change::kDirty : Change::kClean);
  }

  void flush() override { pager_.flush(); }
  PagerStats stats() const override { return pager_.stats(); }
  std::size_t swapped_bytes() const override { return kStateNum * swapped_numel_ * sizeof(float); }
  std::string_view engine() const override { return io_engine_name(engine_->kind()); }
  std::vector<std::string> notes() const override {
    std::vector<std::string> notes = space_.notes();
    if (!engine_->note().empty()) notes.push_back(engine_->note());
    return notes;
  }

 private:
  // So many elements of each state, and what else these bytes hold: frames, ends of slots.
  void count(Ledger* ledger, Tier tier, std::size_t numel, std::size_t bytes) {
    for (const Category category : {Category::kMaster, Category::kExpAvg, Category::kExpAvgSq}) {
      counted_.emplace_back(ledger, tier, category, numel * sizeof(float));
    }
    counted_.emplace_back(ledger, tier, Category::kStaging, bytes - kStateNum * numel * sizeof(float));
  }

  PagerOptions::OnTransfer told_by_shard(const PagedStateOptions& options) const {
    if (!options.on_transfer) return {};
    return [this, tell = options.on_transfer](const ChunkTransfer& transfer) {
      const auto after = std::ranges::upper_bound(table_.first, transfer.chunk);
      tell({.direction = transfer.direction,
            .shard = static_cast<std::size_t>(after - table_.first.begin()) - 1,
            .begin = transfer.begin,
            .end = transfer.end});
    };
  }

  std::size_t chunk_at(std::size_t shard, std::size_t begin, std::size_t end) const {
    ZB_EXPECT(shard < added_num_ && begin % chunk_numel_ == 0 &&
                  end == std::min(begin + chunk_numel_, table_.shards[shard]) && begin < end,
              "elements [" + std::to_string(begin) + ", " + std::to_string(end) + ") of shard " +
                  std::to_string(shard) + " are not one chunk");
    return table_.first[shard] + begin / chunk_numel_;
  }

  // A chunk that comes again ends a round, whose order is expected of the next one.
  void record(std::size_t chunk) {
    if (is_recorded_[chunk]) {
      if (round_ != order_) {
        pager_.set_order(round_);
        order_ = round_;
      }
      round_.clear();
      is_recorded_.assign(is_recorded_.size(), false);
    }
    round_.push_back(chunk);
    is_recorded_[chunk] = true;
  }

  ChunkTable table_;
  std::size_t chunk_numel_;
  PagerPlan plan_;
  SwapSpace space_;
  std::unique_ptr<IoEngine> engine_;
  Pager pager_;
  std::size_t swapped_numel_ = 0;
  std::vector<Allocation> counted_;
  std::size_t added_num_ = 0;
  std::vector<std::size_t> order_;
  std::vector<std::size_t> round_;
  std::vector<bool> is_recorded_;
};

}  // namespace

std::size_t paged_state_bytes(std::span<const std::size_t> shard_numels, std::size_t chunk_numel,
                              const PagedStateOptions& options) {
  ZB_EXPECT(!options.directories.empty(), "state on NVMe needs at least one path");
  const ChunkTable table(shard_numels, chunk_numel);
  return plan_for(table, options).memory_frames() *
         SwapSpace::slot_bytes_for(table.largest_bytes(), options.directories.size());
}

std::size_t swapped_state_bytes(std::span<const std::size_t> shard_numels, std::size_t chunk_numel,
                                const PagedStateOptions& options) {
  ZB_EXPECT(!options.directories.empty(), "state on NVMe needs at least one path");
  const ChunkTable table(shard_numels, chunk_numel);
  return kStateNum * sizeof(float) * swapped_numel(table, plan_for(table, options));
}

std::unique_ptr<PagedState> make_paged_state(std::span<const std::size_t> shard_numels, std::size_t chunk_numel,
                                             const PagedStateOptions& options, std::span<std::byte> memory,
                                             Ledger* ledger, System& system) {
  ZB_EXPECT(!options.directories.empty(), "state on NVMe needs at least one path");
  return std::make_unique<PagedStateImpl>(ChunkTable(shard_numels, chunk_numel), chunk_numel, options, memory, ledger,
                                          system);
}

}  // namespace zb
