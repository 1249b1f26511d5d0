// A device store that issues updates when somebody waits for them, as one does whose updates run on host threads.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "kernels/device_buffer.h"
#include "stores/store.h"

namespace zb::test {

class LateStore final : public Store {
 public:
  LateStore(Ledger* ledger, const DeviceParts& parts);
  // What was started and never waited for is left out.
  ~LateStore() override;

  Tier tier() const noexcept override { return Tier::kDevice; }
  bool issues_at_once() const noexcept override { return false; }

  std::size_t add_shard(const ShardSpec& spec, std::span<const float> initial) override;

  void offer_gradient(std::size_t shard, const ShardGradient& gradient) override;
  void drop_gradients(Lane lane) override;

  void start_update(std::size_t shard, const ShardUpdate& update) override;
  bool is_issued(std::size_t shard) const override { return !pending_.contains(shard); }
  void wait_update(std::size_t shard, Lane lane) override;
  void fetch_parameters(std::size_t shard, Lane lane, void* destination) override;
  void read_state(std::size_t shard, StateKind kind, std::span<float> destination) override;
  void write_state(std::size_t shard, StateKind kind, std::span<const float> source) override;

 private:
  static constexpr Lane kLane = Lane::kReduce;
  struct Pending {
    ShardUpdate update;
    std::vector<AdamScalars> rows;
    MarkPtr started = nullptr;
  };

  void issue(std::size_t shard);

  // Reads all of a gradient, for the detector of accesses that nothing orders.
  void read(std::size_t shard, const ShardGradient& gradient);

  Device& device_;
  std::unique_ptr<Store> store_;
  std::vector<std::size_t> numels_;
  std::vector<DeviceBuffer> scalars_;  // by shard
  std::map<std::size_t, ShardGradient> offered_;
  std::map<std::size_t, Pending> pending_;
  std::size_t issued_num_ = 0;
};

std::unique_ptr<Store> make_late_store(Ledger* ledger, const DeviceParts& parts);

}  // namespace zb::test
