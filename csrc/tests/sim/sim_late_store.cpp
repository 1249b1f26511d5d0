#include "sim/sim_late_store.h"

#include <gtest/gtest.h>

namespace zb::test {

LateStore::LateStore(Ledger* ledger, const DeviceParts& parts)
    : device_(*parts.device), store_(make_device_store(ledger, parts)) {}

LateStore::~LateStore() { device_.synchronize(); }

std::size_t LateStore::add_shard(const ShardSpec& spec, std::span<const float> initial) {
  numels_.push_back(spec.numel);
  scalars_.emplace_back(device_, sizeof(StepScalars), nullptr, Category::kStaging);
  return store_->add_shard(spec, initial);
}

void LateStore::offer_gradient(std::size_t shard, const ShardGradient& gradient) {
  EXPECT_FALSE(pending_.contains(shard)) << "a gradient was offered before the last update was waited for";
  EXPECT_TRUE(offered_.emplace(shard, gradient).second) << "a gradient was offered twice";
}

void LateStore::drop_gradients(Lane lane) {
  for (const auto& [shard, gradient] : offered_) read(shard, gradient);
  offered_.clear();
  device_.wait(lane, device_.mark(kLane));
}

void LateStore::start_update(std::size_t shard, const ShardUpdate& update) {
  EXPECT_FALSE(pending_.contains(shard)) << "an update was started before the last one was waited for";
  const auto offered = offered_.find(shard);
  if (offered != offered_.end()) {
    EXPECT_EQ(offered->second.data, update.gradient);
    offered_.erase(offered);
  }
  Pending& pending = pending_[shard];
  pending = {update, {update.rows.begin(), update.rows.end()}, device_.mark(update.lane)};
}

void LateStore::wait_update(std::size_t shard, Lane lane) {
  issue(shard);
  store_->wait_update(shard, lane);
}

void LateStore::fetch_parameters(std::size_t shard, Lane lane, void* destination) {
  issue(shard);
  store_->fetch_parameters(shard, lane, destination);
}

void LateStore::read_state(std::size_t shard, StateKind kind, std::span<float> destination) {
  issue(shard);
  store_->read_state(shard, kind, destination);
}

void LateStore::write_state(std::size_t shard, StateKind kind, std::span<const float> source) {
  issue(shard);
  store_->write_state(shard, kind, source);
}

void LateStore::issue(std::size_t shard) {
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

void LateStore::read(std::size_t shard, const ShardGradient& gradient) {
  device_.wait(kLane, gradient.ready);
  const auto scratch = device_.allocate(numels_[shard] * dtype_bytes(gradient.dtype), "a dropped gradient");
  device_.copy(kLane, scratch.get(), gradient.data, numels_[shard] * dtype_bytes(gradient.dtype));
  device_.synchronize(device_.mark(kLane));
}

std::unique_ptr<Store> make_late_store(Ledger* ledger, const DeviceParts& parts) {
  return std::make_unique<LateStore>(ledger, parts);
}

}  // namespace zb::test
