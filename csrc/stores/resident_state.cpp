#include <array>
#include <utility>
#include <vector>

#include "stores/state_space.h"

namespace zb {
namespace {

constexpr std::array<Category, 3> kCategories{Category::kMaster, Category::kExpAvg, Category::kExpAvgSq};

class ResidentState final : public StateSpace {
 public:
  explicit ResidentState(std::shared_ptr<PinnedPool> pool) : pool_(std::move(pool)) {}

  void add_shard(std::size_t numel) override {
    Shard shard;  // zeros: the pool is new, and no shard ever goes
    for (std::size_t i = 0; i < kCategories.size(); ++i) {
      shard[i] = pool_->allocate(numel * sizeof(float), kCategories[i], PinnedPool::kLineAlignment);
    }
    shards_.push_back(std::move(shard));
  }

  StateChunk borrow(std::size_t index, std::size_t begin, std::size_t) override {
    const Shard& shard = shards_.at(index);
    return {shard[0].as<float>() + begin, shard[1].as<float>() + begin, shard[2].as<float>() + begin};
  }
  void give_back(std::size_t, std::size_t, std::size_t, ChunkUse) override {}

 private:
  using Shard = std::array<PinnedBlock, kCategories.size()>;

  std::shared_ptr<PinnedPool> pool_;
  std::vector<Shard> shards_;
};

}  // namespace

std::unique_ptr<StateSpace> make_resident_state(std::shared_ptr<PinnedPool> pool) {
  return std::make_unique<ResidentState>(std::move(pool));
}

std::size_t resident_state_bytes(std::size_t numel) {
  return kCategories.size() * PinnedPool::footprint_bytes(numel * sizeof(float), PinnedPool::kLineAlignment);
}

}  // namespace zb
