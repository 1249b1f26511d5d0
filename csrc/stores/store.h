// Stores: where the optimizer state of a flat buffer's shard lives, and how it is updated there.
//
// One store object per tier serves all flat buffers of an engine. Adding a tier means one new file here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "comm/communicator.h"
#include "common/dtype.h"
#include "memory/ledger.h"
#include "optim/adam.h"
#include "optim/device_adam.h"
#include "partition/flat_layout.h"

namespace zb {

enum class StateKind : std::uint8_t { kMaster, kExpAvg, kExpAvgSq };

// What a store is told about one shard at setup.
struct ShardSpec {
  std::size_t numel = 0;
  DType param_dtype = DType::kFloat32;
  std::vector<Segment> segments;  // relative to the shard
};

// One update of one shard. All pointers are device memory, ready for `lane`.
struct ShardUpdate {
  Lane lane = Lane::kCompute;      // that the update is put into
  const void* gradient = nullptr;  // numel elements, reduced, not yet scaled
  DType gradient_dtype = DType::kFloat32;
  void* parameters = nullptr;  // the shard's parameters in param_dtype; fp32 parameters are the master themselves
  std::span<const AdamScalars> rows;  // by segment row; grad_factor is not read
  const StepScalars* step = nullptr;
};

class Store {
 public:
  virtual ~Store() = default;
  virtual Tier tier() const noexcept = 0;
  // Registers a shard whose parameters currently hold `initial` (numel floats of device memory, the fp32 values before
  // any rounding). Returns the shard's index. For fp32 parameters no master is made.
  virtual std::size_t add_shard(const ShardSpec& spec, std::span<const float> initial) = 0;
  // Start and wait of one shard's update; parameters are current for its lane after wait.
  virtual void start_update(std::size_t shard, const ShardUpdate& update) = 0;
  virtual void wait_update(std::size_t shard) = 0;
  // Copies a state out of or into the store (numel floats of device memory), in the compute lane. kMaster of fp32
  // parameters raises StateError: read the parameters.
  virtual void read_state(std::size_t shard, StateKind kind, std::span<float> destination) = 0;
  virtual void write_state(std::size_t shard, StateKind kind, std::span<const float> source) = 0;
};

std::unique_ptr<Store> make_device_store(Ledger* ledger, const DeviceParts& parts);

}  // namespace zb
