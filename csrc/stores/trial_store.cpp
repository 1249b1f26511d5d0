#include "stores/trial_store.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "common/error.h"
#include "kernels/device_buffer.h"
#include "kernels/drain.h"
#include "memory/host_limits.h"
#include "memory/pinned_pool.h"

namespace zb {
namespace {

constexpr const char* kWaitingMasters = "masters that wait on the host for the choice of offload_ratio";
constexpr const char* kWhatMoments = "moments that were loaded and wait on the host for the choice of offload_ratio";
constexpr std::array kMoments{StateKind::kExpAvg, StateKind::kExpAvgSq};

class TrialStore final : public Store {
 public:
  TrialStore(Ledger* ledger, const DeviceParts& parts, PinnedOptions pinned, std::size_t ranks_on_host,
             MakeStoreOfShare make_store)
      : ledger_(ledger),
        device_(parts.device),
        pinned_(std::move(pinned)),
        ranks_on_host_(ranks_on_host),
        make_store_(std::move(make_store)) {}
  ~TrialStore() override {
    store_.reset();
    const Drain drain(*device_);  // copies under way read and write the masters
  }

  Tier tier() const noexcept override { return store_ ? store_->tier() : Tier::kHost; }
  bool issues_at_once() const noexcept override { return store_ && store_->issues_at_once(); }
  bool keeps_master(DType param_dtype) const noexcept override {
    return awaits_share() || store_->keeps_master(param_dtype);
  }
  StoreTraffic traffic() override { return store_ ? store_->traffic() : StoreTraffic{}; }
  double waited_ms() const override { return store_ ? store_->waited_ms() : 0.0; }
  double waited_for_files_ms() const override { return store_ ? store_->waited_for_files_ms() : 0.0; }
  SwapStats swap_stats() const override { return store_ ? store_->swap_stats() : SwapStats{}; }
  PinnedStats pinned() const override {
    if (store_) return store_->pinned();
    return pool_ ? pool_->stats() : PinnedStats{};
  }
  std::size_t chunk_numel() const override { return store_ ? store_->chunk_numel() : 0; }
  std::exception_ptr failure() const override { return store_ ? store_->failure() : nullptr; }
  void set_timeline(Timeline* timeline) override { timeline_ = timeline; }

  bool awaits_share() const noexcept override { return !is_chosen_; }
  void choose_share(double host_share) override {
    ZB_EXPECT_STATE(store_ == nullptr, "the share of state on the host has been chosen already");
    auto store = make_store_(host_share);
    store->set_timeline(timeline_);
    store->reserve(specs_);
    store_ = std::move(store);
  }
  void take_share() override {
    ZB_EXPECT_STATE(store_ != nullptr && !is_chosen_, "a share is chosen once, before it is taken");
    std::size_t largest_numel = 0;
    for (const ShardSpec& spec : specs_) largest_numel = std::max(largest_numel, spec.numel);
    {
      const DeviceBuffer staging(*device_, largest_numel * sizeof(float), ledger_, Category::kStaging);
      const Drain drain(*device_);
      const auto staged = [&](const PinnedBlock& state) {
        device_->copy_from_pinned(Lane::kCompute, staging.data(), state.data(), state.bytes());
        return std::span<const float>(staging.as<float>(), state.bytes() / sizeof(float));
      };
      for (std::size_t index = 0; index < shards_.size(); ++index) {
        store_->add_shard(specs_[index], staged(shards_[index].master));
        for (const StateKind kind : kMoments) {
          const PinnedBlock& moment = shards_[index].moment(kind);
          if (moment.data() != nullptr) store_->write_state(index, kind, staged(moment));
        }
      }
    }
    is_chosen_ = true;
    shards_.clear();
    pool_.reset();
    moment_pool_.reset();
  }

  void reserve(std::span<const ShardSpec> shards) override {
    specs_.assign(shards.begin(), shards.end());
    pool_bytes_ = 0;
    for (const ShardSpec& spec : specs_) {
      pool_bytes_ += PinnedPool::footprint_bytes(spec.numel * sizeof(float), kAlignment);
    }
    require_host_memory(ranks_on_host_ * pool_bytes_, kWaitingMasters);
  }
  std::size_t add_shard(const ShardSpec& spec, std::span<const float> initial) override {
    check_segments(spec);
    const std::size_t index = shards_.size();
    ZB_EXPECT(index < specs_.size() && specs_[index].numel == spec.numel && initial.size() == spec.numel,
              "shard " + std::to_string(index) + " is not what was reserved");
    if (!pool_) pool_ = std::make_unique<PinnedPool>(pool_bytes_, ledger_, with_what(kWaitingMasters));
    shards_.push_back({.master = pool_->allocate(initial.size_bytes(), Category::kMaster, kAlignment)});
    write_state(index, StateKind::kMaster, initial);
    return index;
  }

  void offer_gradient(std::size_t shard, const ShardGradient& gradient) override {
    if (is_chosen_) store_->offer_gradient(shard, gradient);
  }
  void drop_gradients(Lane lane) override {
    if (is_chosen_) store_->drop_gradients(lane);
  }
  void start_update(std::size_t shard, const ShardUpdate& update) override {
    chosen_store().start_update(shard, update);
  }
  bool is_issued(std::size_t shard) const override { return !is_chosen_ || store_->is_issued(shard); }
  void wait_update(std::size_t shard, Lane lane) override {
    if (is_chosen_) store_->wait_update(shard, lane);
  }
  void fetch_parameters(std::size_t shard, Lane lane, void* destination) override {
    chosen_store().fetch_parameters(shard, lane, destination);
  }

  void read_state(std::size_t shard, StateKind kind, std::span<float> destination) override {
    if (is_chosen_) return store_->read_state(shard, kind, destination);
    const PinnedBlock& state = state_of(shard, kind, destination.size_bytes());
    if (state.data() != nullptr) {
      device_->copy_from_pinned(Lane::kCompute, destination.data(), state.data(), state.bytes());
    } else {
      device_->zero(Lane::kCompute, destination.data(), destination.size_bytes());
    }
  }
  void expect_states() override {
    if (is_chosen_) return store_->expect_states();
    if (!moment_pool_) require_host_memory(ranks_on_host_ * kMoments.size() * pool_bytes_, kWhatMoments);
  }
  void write_state(std::size_t shard, StateKind kind, std::span<const float> source) override {
    if (is_chosen_) return store_->write_state(shard, kind, source);
    PinnedBlock& state = state_of(shard, kind, source.size_bytes());
    if (state.data() == nullptr) {
      if (!moment_pool_) {
        moment_pool_ = std::make_unique<PinnedPool>(kMoments.size() * pool_bytes_, ledger_, with_what(kWhatMoments));
      }
      state = moment_pool_->allocate(source.size_bytes(),
                                     kind == StateKind::kExpAvg ? Category::kExpAvg : Category::kExpAvgSq, kAlignment);
    }
    device_->copy_to_pinned(Lane::kCompute, state.data(), source.data(), source.size_bytes());
  }

 private:
  static constexpr std::size_t kAlignment = PinnedPool::kLineAlignment;

  // Moments are empty until they are written: zeros.
  struct WaitingShard {
    PinnedBlock master;
    PinnedBlock exp_avg = {};
    PinnedBlock exp_avg_sq = {};

    PinnedBlock& moment(StateKind kind) { return kind == StateKind::kExpAvg ? exp_avg : exp_avg_sq; }
  };

  Store& chosen_store() {
    ZB_EXPECT_STATE(is_chosen_, "the share of state on the host is chosen before the first update");
    return *store_;
  }
  PinnedBlock& state_of(std::size_t index, StateKind kind, std::size_t bytes) {
    ZB_EXPECT(index < shards_.size() && shards_[index].master.bytes() == bytes,
              "shard " + std::to_string(index) + " has another size than the other side of the copy");
    WaitingShard& shard = shards_[index];
    return kind == StateKind::kMaster ? shard.master : shard.moment(kind);
  }
  PinnedOptions with_what(const char* what) const {
    PinnedOptions options = pinned_;
    options.what = what;
    return options;
  }

  Ledger* ledger_;
  std::shared_ptr<Device> device_;
  PinnedOptions pinned_;
  std::size_t ranks_on_host_;
  MakeStoreOfShare make_store_;
  Timeline* timeline_ = nullptr;  // for the store to come
  std::vector<ShardSpec> specs_;
  std::size_t pool_bytes_ = 0;  // of one kind of state
  std::unique_ptr<PinnedPool> pool_;
  std::unique_ptr<PinnedPool> moment_pool_;  // null until moments are written
  std::vector<WaitingShard> shards_;
  std::unique_ptr<Store> store_;  // null until the share is chosen
  bool is_chosen_ = false;        // store_ has the state
};

}  // namespace

std::unique_ptr<Store> make_trial_store(Ledger* ledger, const DeviceParts& parts, PinnedOptions pinned,
                                        std::size_t ranks_on_host, MakeStoreOfShare make_store) {
  pinned.registrar = host_registrar(parts.device);
  return std::make_unique<TrialStore>(ledger, parts, std::move(pinned), ranks_on_host, std::move(make_store));
}

}  // namespace zb
