#include "stores/split_store.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"

namespace zb {
namespace {

constexpr std::size_t kLineNumel = 64;  // a whole number of cache lines in any dtype

class SplitStore final : public Store {
 public:
  SplitStore(std::unique_ptr<Store> first, std::unique_ptr<Store> second, double second_share)
      : first_(std::move(first)), second_(std::move(second)), second_share_(second_share) {
    ZB_EXPECT(second_share >= 0.0 && second_share <= 1.0,
              "the share of a split store must be in [0, 1], got " + std::to_string(second_share));
  }

  Tier tier() const noexcept override { return second_->tier(); }
  SwapStats swap_stats() const override { return second_->swap_stats(); }
  bool issues_at_once() const noexcept override { return first_->issues_at_once() && second_->issues_at_once(); }
  std::exception_ptr failure() const override {
    const std::exception_ptr first = first_->failure();
    return first ? first : second_->failure();
  }
  bool keeps_master(DType param_dtype) const noexcept override {
    return first_->keeps_master(param_dtype) && second_->keeps_master(param_dtype);
  }

  void reserve(std::span<const ShardSpec> shards) override {
    std::vector<ShardSpec> first;
    std::vector<ShardSpec> second;
    for (const ShardSpec& spec : shards) {
      first.push_back(part_of(spec, 0, cut_of(spec)));
      second.push_back(part_of(spec, cut_of(spec), spec.numel));
    }
    first_->reserve(first);
    second_->reserve(second);
  }

  StoreTraffic traffic() override {
    const StoreTraffic first = first_->traffic();
    const StoreTraffic second = second_->traffic();
    return {.to_host_bytes = first.to_host_bytes + second.to_host_bytes,
            .to_device_bytes = first.to_device_bytes + second.to_device_bytes};
  }
  double waited_ms() const override { return first_->waited_ms() + second_->waited_ms(); }
  double waited_for_files_ms() const override { return first_->waited_for_files_ms() + second_->waited_for_files_ms(); }
  PinnedStats pinned() const override { return second_->pinned(); }
  std::size_t chunk_numel() const override { return second_->chunk_numel(); }
  void set_timeline(Timeline* timeline) override {
    first_->set_timeline(timeline);
    second_->set_timeline(timeline);
  }

  std::size_t add_shard(const ShardSpec& spec, std::span<const float> initial) override {
    check_segments(spec);
    ZB_EXPECT(initial.size() == spec.numel, "a shard of " + std::to_string(spec.numel) +
                                                " elements needs as many initial values, got " +
                                                std::to_string(initial.size()));
    const std::size_t cut = cut_of(spec);
    shards_.push_back({.cut = cut,
                       .numel = spec.numel,
                       .param_dtype = spec.param_dtype,
                       .first = first_->add_shard(part_of(spec, 0, cut), initial.first(cut)),
                       .second = second_->add_shard(part_of(spec, cut, spec.numel), initial.subspan(cut))});
    return shards_.size() - 1;
  }

  void offer_gradient(std::size_t index, const ShardGradient& gradient) override {
    const Shard& shard = at(index);
    first_->offer_gradient(shard.first, gradient);
    ShardGradient rest = gradient;
    rest.data = beyond(gradient.data, gradient.dtype, shard.cut);
    second_->offer_gradient(shard.second, rest);
  }
  void drop_gradients(Lane lane) override {
    first_->drop_gradients(lane);
    second_->drop_gradients(lane);
  }

  void start_update(std::size_t index, const ShardUpdate& update) override {
    const Shard& shard = at(index);
    ShardUpdate part = update;
    ShardUpdate rest = update;
    rest.gradient = beyond(update.gradient, update.gradient_dtype, shard.cut);
    rest.parameters = const_cast<void*>(beyond(update.parameters, shard.param_dtype, shard.cut));
    std::vector<Segment> part_segments;
    std::vector<Segment> rest_segments;
    if (update.segments != nullptr) {
      part_segments = within(*update.segments, 0, shard.cut);
      rest_segments = within(*update.segments, shard.cut, shard.numel);
      part.segments = &part_segments;
      rest.segments = &rest_segments;
    }
    second_->start_update(shard.second, rest);  // the one that may run beside
    first_->start_update(shard.first, part);
  }
  bool is_issued(std::size_t index) const override {
    return first_->is_issued(shards_.at(index).first) && second_->is_issued(shards_.at(index).second);
  }
  void wait_update(std::size_t index, Lane lane) override {
    first_->wait_update(at(index).first, lane);
    second_->wait_update(at(index).second, lane);
  }

  void fetch_parameters(std::size_t index, Lane lane, void* destination) override {
    const Shard& shard = at(index);
    first_->fetch_parameters(shard.first, lane, destination);
    second_->fetch_parameters(shard.second, lane, const_cast<void*>(beyond(destination, shard.param_dtype, shard.cut)));
  }
  void read_state(std::size_t index, StateKind kind, std::span<float> destination) override {
    const Shard& shard = at(index, destination.size());
    first_->read_state(shard.first, kind, destination.first(shard.cut));
    second_->read_state(shard.second, kind, destination.subspan(shard.cut));
  }
  void write_state(std::size_t index, StateKind kind, std::span<const float> source) override {
    const Shard& shard = at(index, source.size());
    first_->write_state(shard.first, kind, source.first(shard.cut));
    second_->write_state(shard.second, kind, source.subspan(shard.cut));
  }

 private:
  struct Shard {
    std::size_t cut;
    std::size_t numel;
    DType param_dtype;
    std::size_t first;
    std::size_t second;
  };

  std::size_t cut_of(const ShardSpec& spec) const {
    const auto first_numel = static_cast<std::size_t>((1.0 - second_share_) * static_cast<double>(spec.numel));
    return second_share_ == 0.0 ? spec.numel : std::min(first_numel, spec.numel) / kLineNumel * kLineNumel;
  }

  static ShardSpec part_of(const ShardSpec& spec, std::size_t begin, std::size_t end) {
    ShardSpec part = spec;
    part.numel = end - begin;
    part.segments = within(spec.segments, begin, end);
    return part;
  }

  static const void* beyond(const void* base, DType dtype, std::size_t numel) {
    return base == nullptr ? nullptr : static_cast<const std::byte*>(base) + numel * dtype_bytes(dtype);
  }

  const Shard& at(std::size_t index) const {
    ZB_EXPECT(index < shards_.size(), "shard " + std::to_string(index) + " is out of range: the store has " +
                                          std::to_string(shards_.size()) + " shards, numbered from 0");
    return shards_[index];
  }
  const Shard& at(std::size_t index, std::size_t numel) const {
    const Shard& shard = at(index);
    ZB_EXPECT(numel == shard.numel, "shard " + std::to_string(index) + " has " + std::to_string(shard.numel) +
                                        " elements, the other side of the copy has " + std::to_string(numel));
    return shard;
  }

  std::unique_ptr<Store> first_;
  std::unique_ptr<Store> second_;
  double second_share_;
  std::vector<Shard> shards_;
};

}  // namespace

std::unique_ptr<Store> make_split_store(std::unique_ptr<Store> first, std::unique_ptr<Store> second,
                                        double second_share) {
  return std::make_unique<SplitStore>(std::move(first), std::move(second), second_share);
}

}  // namespace zb
