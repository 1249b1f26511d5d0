// A device store that issues updates when somebody waits for them, as one does whose updates run on host threads.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/device_buffer.h"
#include "stores/store.h"

namespace zb::test {

class LateStore final : public Store {
 public:
  LateStore(Ledger* ledger, const DeviceParts& parts)
      : device_(*parts.device), store_(make_device_store(ledger, parts)) {}
  // What was started and never waited for is left out.
  ~LateStore() override { device_.synchronize(); }

  Tier tier() const noexcept override { return Tier::kDevice; }
  bool issues_at_once() const noexcept override { return false; }

  std::size_t add_shard(const ShardSpec& spec, std::span<const float> initial) override {
    numels_.push_back(spec.numel);
    scalars_.emplace_back(device_, sizeof(StepScalars), nullptr, Category::kStaging);
    return store_->add_shard(spec, initial);
  }

  void offer_gradient(std::size_t shard, const ShardGradient& gradient) override {
    EXPECT_FALSE(pending_.contains(shard)) << "a gradient was offered before the last update was waited for";
    EXPECT_TRUE(offered_.emplace(shard, gradient).second) << "a gradient was offered twice";
  }
  void drop_gradients(Lane lane) override {
    for (const auto& [shard, gradient] : offered_) read(shard, gradient);
    offered_.clear();
    device_.wait(lane, device_.mark(kLane));
  }

  void start_update(std::size_t shard, const ShardUpdate& update) override {
    EXPECT_FALSE(pending_.contains(shard)) << "an update was started before the last one was waited for";
    const auto offered = offered_.find(shard);
    if (offered != offered_.end()) {
      EXPECT_EQ(offered->second.data, update.gradient);
      offered_.erase(offered);
    }
    Pending& pending = pending_[shard];
    pending = {update, {update.rows.begin(), update.rows.end()}, device_.mark(update.lane)};
  }
  bool is_issued(std::size_t shard) const override { return !pending_.contains(shard); }
  void wait_update(std::size_t shard, Lane lane) override {
    issue(shard);
    store_->wait_update(shard, lane);
  }
  void fetch_parameters(std::size_t shard, Lane lane, void* destination) override {
    issue(shard);
    store_->fetch_parameters(shard, lane, destination);
  }
  void read_state(std::size_t shard, StateKind kind, std::span<float> destination) override {
    issue(shard);
    store_->read_state(shard, kind, destination);
  }
  void write_state(std::size_t shard, StateKind kind, std::span<const float> source) override {
    issue(shard);
    store_->write_state(shard, kind, source);
  }

 private:
  static constexpr Lane kLane = Lane::kReduce;
  struct Pending {
    ShardUpdate update;
    std::vector<AdamScalars> rows;
    MarkPtr started = nullptr;
  };

  void issue(std::size_t shard) {
    auto found = pending_.extract(shard);
    if (found.empty()) return;
    Pending& pending = found.mapped();
    device_.synchronize(pending.update.step_arrived);
    device_.wait(kLane, pending.started);
    device_.copy(kLane, scalars_[shard].data(), pending.update.step_on_host, sizeof(StepScalars));
    pending.update.lane = kLane;
    pending.update.rows = pending.rows;
    pending.update.step = scalars_[shard].as<StepScalars>();
    store_->start_update(shard, pending.update);
    // Its neighbour's update may be done by now too, on this rank.
    if (++issued_num_ % 3 == 0 && !pending_.empty()) issue(pending_.begin()->first);
  }

  // Reads all of a gradient, for the detector of accesses that nothing orders.
  void read(std::size_t shard, const ShardGradient& gradient) {
    device_.wait(kLane, gradient.ready);
    const auto scratch = device_.allocate(numels_[shard] * dtype_bytes(gradient.dtype), "a dropped gradient");
    device_.copy(kLane, scratch.get(), gradient.data, numels_[shard] * dtype_bytes(gradient.dtype));
    device_.synchronize(device_.mark(kLane));
  }

  Device& device_;
  std::unique_ptr<Store> store_;
  std::vector<std::size_t> numels_;
  std::vector<DeviceBuffer> scalars_;  // by shard
  std::map<std::size_t, ShardGradient> offered_;
  std::map<std::size_t, Pending> pending_;
  std::size_t issued_num_ = 0;
};

inline std::unique_ptr<Store> make_late_store(Ledger* ledger, const DeviceParts& parts) {
  return std::make_unique<LateStore>(ledger, parts);
}

}  // namespace zb::test
