// The device store: optimizer state in device memory beside the parameters, updated in place.
#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "common/round_up.h"
#include "kernels/device_buffer.h"
#include "stores/store.h"

namespace zb {
namespace {

constexpr std::size_t kStateAlignment = 256;

enum class Fp32Master : std::uint8_t { kParameters, kKept };

struct DeviceShard {
  std::size_t numel = 0;
  DType param_dtype = DType::kFloat32;
  std::vector<Segment> segments;
  DeviceBuffer master;      // empty where the parameters are the master; else floats, or:
  void* rounded = nullptr;  // the parameters whose masters' remainders those are
  DeviceBuffer exp_avg;
  DeviceBuffer exp_avg_sq;
  Lane changed_in = Lane::kCompute;    // lane of the last change of the state
  MarkPtr changed;                     // behind it; made when asked for where that is the compute lane
  std::array<bool, kLaneNum> knows{};  // lanes that stand behind it
};

const void* element(const void* base, DType dtype, std::size_t index) {
  return static_cast<const std::byte*>(base) + index * dtype_bytes(dtype);
}

void* element(void* base, DType dtype, std::size_t index) {
  return static_cast<std::byte*>(base) + index * dtype_bytes(dtype);
}

class DeviceStore final : public Store {
 public:
  DeviceStore(Ledger* ledger, const DeviceParts& parts, Fp32Master fp32_master)
      : ledger_(ledger), parts_(parts), fp32_master_(fp32_master) {}

  Tier tier() const noexcept override { return Tier::kDevice; }
  bool takes_pieces() const noexcept override { return true; }
  bool keeps_master(DType param_dtype) const noexcept override {
    return param_dtype != DType::kFloat32 || fp32_master_ == Fp32Master::kKept;
  }
  bool takes_remainders() const noexcept override { return true; }

  std::size_t add_shard(const ShardSpec& spec, std::span<const float> initial) override {
    check_segments(spec);
    ZB_EXPECT(initial.size() == spec.numel, "a shard of " + std::to_string(spec.numel) +
                                                " elements needs as many initial values, got " +
                                                std::to_string(initial.size()));
    DeviceShard shard;
    shard.numel = spec.numel;
    shard.param_dtype = spec.param_dtype;
    shard.segments = spec.segments;
    const std::size_t bytes = spec.numel * sizeof(float);
    const bool has_master = keeps_master(spec.param_dtype);
    shard.rounded = spec.parameters;
    ZB_EXPECT(shard.rounded == nullptr || spec.param_dtype == DType::kBFloat16,
              "only masters of bfloat16 parameters can be stored as remainders");
    const std::size_t master_bytes = shard.rounded != nullptr ? spec.numel * sizeof(std::uint16_t) : bytes;
    // One piece of memory, which the driver rounds up once (to 2 MiB).
    const std::size_t stride_bytes = round_up(bytes, kStateAlignment);
    const std::shared_ptr<std::byte> memory =
        bytes == 0 ? nullptr : device().allocate(2 * stride_bytes + (has_master ? master_bytes : 0), "optimizer state");
    const auto part = [&](std::size_t index, std::size_t part_bytes, Category category) {
      return DeviceBuffer({memory, memory.get() + index * stride_bytes}, part_bytes, ledger_, category);
    };
    shard.exp_avg = part(0, bytes, Category::kExpAvg);
    shard.exp_avg_sq = part(1, bytes, Category::kExpAvgSq);
    if (has_master) {
      shard.master = part(2, master_bytes, Category::kMaster);
      copy_to_master(shard, initial);
    }
    change_in(shard, Lane::kCompute);
    shards_.push_back(std::move(shard));
    return shards_.size() - 1;
  }

  void start_update(std::size_t index, const ShardUpdate& update) override {
    const std::pair<std::size_t, ShardUpdate> only{index, update};
    start_updates({&only, 1});
  }

  void start_updates(std::span<const std::pair<std::size_t, ShardUpdate>> updates) override {
    if (updates.empty()) return;
    const ShardUpdate& first = updates.front().second;
    runs_.clear();
    for (const auto& [index, update] : updates) {
      ZB_EXPECT(update.lane == first.lane && update.step == first.step,
                "updates that are started together must belong to one step and go into one lane");
      check(index, update);
      for (const Segment& segment : segments_of(update, at(index).segments)) add_runs(at(index), update, segment);
    }
    for (const auto& [index, update] : updates) stand_behind(at(index), first.lane);
    if (!runs_.empty()) parts_.adam->update(first.lane, runs_, first.step);
    for (const auto& [index, update] : updates) change_in(at(index), first.lane);
  }

  void wait_update(std::size_t index, Lane lane) override { stand_behind(at(index), lane); }

  void fetch_parameters(std::size_t index, Lane lane, void* destination) override {
    DeviceShard& shard = at(index);
    expect_master(shard);
    ZB_EXPECT_STATE(shard.rounded == nullptr, "parameters whose masters are stored as remainders cannot be fetched");
    stand_behind(shard, lane);
    device().cast(lane, destination, shard.param_dtype, shard.master.data(), DType::kFloat32, shard.numel);
  }

  void read_state(std::size_t index, StateKind kind, std::span<float> destination) override {
    const DeviceShard& shard = expect_state(index, kind, destination.size());
    stand_behind(at(index), Lane::kCompute);
    if (shard.rounded != nullptr && kind == StateKind::kMaster) {
      parts_.adam->read_masters(Lane::kCompute, whole_span(shard), destination.data());
    } else if (shard.rounded != nullptr && kind == StateKind::kExpAvgSq) {
      parts_.adam->copy_magnitudes(Lane::kCompute, destination.data(), shard.exp_avg_sq.as<float>(), nullptr,
                                   shard.numel);
    } else {
      device().copy(Lane::kCompute, destination.data(), state_of(shard, kind).data(), destination.size_bytes());
    }
  }

  void write_state(std::size_t index, StateKind kind, std::span<const float> source) override {
    const DeviceShard& shard = expect_state(index, kind, source.size());
    stand_behind(at(index), Lane::kCompute);
    if (kind == StateKind::kMaster) {
      copy_to_master(shard, source);
    } else if (shard.rounded != nullptr && kind == StateKind::kExpAvgSq) {
      auto* const squares = shard.exp_avg_sq.as<float>();
      parts_.adam->copy_magnitudes(Lane::kCompute, squares, source.data(), squares, shard.numel);
    } else {
      device().copy(Lane::kCompute, state_of(shard, kind).data(), source.data(), source.size_bytes());
    }
    change_in(at(index), Lane::kCompute);
  }

 private:
  void check(std::size_t index, const ShardUpdate& update) {
    const DeviceShard& shard = at(index);
    const bool has_gradient = update.gradient != nullptr || !update.gradient_pieces.empty();
    const bool has_parameters = update.parameters != nullptr || keeps_master(shard.param_dtype);
    ZB_EXPECT(
        shard.numel == 0 || (has_gradient && has_parameters && update.step != nullptr),
        "an update of shard " + std::to_string(index) + " needs its gradient, its parameters and the step's scalars");
    ZB_EXPECT(
        shard.rounded == nullptr || update.parameters == shard.rounded,
        "shard " + std::to_string(index) + " stores remainders of other parameters than those given to its update");
    check_rows(index, segments_of(update, shard.segments), update.rows.size());
  }

  // What lies in no piece is padding: zeros that an update by zeros would leave as they are.
  void add_runs(const DeviceShard& shard, const ShardUpdate& update, const Segment& segment) {
    const AdamScalars& scalars = update.rows[static_cast<std::size_t>(segment.row)];
    if (update.gradient_pieces.empty()) {
      const void* const gradient = element(update.gradient, update.gradient_dtype, segment.begin);
      runs_.push_back({span_of(shard, update, segment.begin, segment.end, gradient), scalars});
    }
    for (const FlatPiece& piece : update.gradient_pieces) {
      const std::size_t begin = std::max(segment.begin, piece.begin);
      const std::size_t end = std::min(segment.end, piece.begin + piece.numel);
      if (begin >= end) continue;
      const void* const gradient = element(piece.data, update.gradient_dtype, begin - piece.begin);
      runs_.push_back({span_of(shard, update, begin, end, gradient), scalars});
    }
  }

  AdamSpan span_of(const DeviceShard& shard, const ShardUpdate& update, std::size_t begin, std::size_t end,
                   const void* gradient) const {
    const bool master_is_parameters = !keeps_master(shard.param_dtype);
    void* parameters = update.parameters == nullptr ? nullptr : element(update.parameters, shard.param_dtype, begin);
    const bool has_remainders = shard.rounded != nullptr;
    float* master = nullptr;
    if (master_is_parameters) {
      master = static_cast<float*>(parameters);
    } else if (!has_remainders) {
      master = shard.master.as<float>() + begin;
    }
    return {.master = master,
            .exp_avg = shard.exp_avg.as<float>() + begin,
            .exp_avg_sq = shard.exp_avg_sq.as<float>() + begin,
            .gradient = gradient,
            .gradient_dtype = update.gradient_dtype,
            .low_precision = master_is_parameters ? nullptr : parameters,
            .low_precision_dtype = shard.param_dtype,
            .numel = end - begin,
            .remainder = has_remainders ? shard.master.as<std::uint16_t>() + begin : nullptr};
  }

  // All of a shard that has remainders, for its masters.
  static AdamSpan whole_span(const DeviceShard& shard) {
    return {.master = nullptr,
            .exp_avg = shard.exp_avg.as<float>(),
            .exp_avg_sq = shard.exp_avg_sq.as<float>(),
            .gradient = nullptr,
            .gradient_dtype = DType::kFloat32,
            .low_precision = shard.rounded,
            .low_precision_dtype = shard.param_dtype,
            .numel = shard.numel,
            .remainder = shard.master.as<std::uint16_t>()};
  }

  void copy_to_master(const DeviceShard& shard, std::span<const float> values) {
    if (shard.rounded != nullptr) {
      parts_.adam->write_masters(Lane::kCompute, whole_span(shard), values.data());
    } else {
      device().copy(Lane::kCompute, shard.master.data(), values.data(), values.size_bytes());
    }
  }

  // Where every rank updates everything in the compute lane, nobody asks and no mark is made.
  void change_in(DeviceShard& shard, Lane lane) {
    shard.changed_in = lane;
    shard.changed = lane == Lane::kCompute ? nullptr : device().mark(lane);
    shard.knows = {};
    shard.knows[static_cast<std::size_t>(lane)] = true;
  }
  void stand_behind(DeviceShard& shard, Lane lane) {
    if (std::exchange(shard.knows[static_cast<std::size_t>(lane)], true)) return;
    if (shard.changed == nullptr) shard.changed = device().mark(shard.changed_in);
    device().wait(lane, shard.changed);
  }

  Device& device() { return *parts_.device; }

  DeviceShard& at(std::size_t index) {
    ZB_EXPECT(index < shards_.size(), "shard " + std::to_string(index) + " is out of range: the store has " +
                                          std::to_string(shards_.size()) + " shards, numbered from 0");
    return shards_[index];
  }

  const DeviceShard& expect_state(std::size_t index, StateKind kind, std::size_t numel) {
    const DeviceShard& shard = at(index);
    ZB_EXPECT(numel == shard.numel, "shard " + std::to_string(index) + " has " + std::to_string(shard.numel) +
                                        " elements, the other side of the copy has " + std::to_string(numel));
    if (kind == StateKind::kMaster) expect_master(shard);
    return shard;
  }

  static const DeviceBuffer& state_of(const DeviceShard& shard, StateKind kind) {
    if (kind == StateKind::kExpAvg) return shard.exp_avg;
    return kind == StateKind::kExpAvgSq ? shard.exp_avg_sq : shard.master;
  }

  void expect_master(const DeviceShard& shard) const {
    ZB_EXPECT_STATE(keeps_master(shard.param_dtype),
                    "fp32 parameters are their own master; read or write the parameters instead");
  }

  Ledger* ledger_;
  DeviceParts parts_;
  Fp32Master fp32_master_;
  std::vector<AdamRun> runs_;
  std::vector<DeviceShard> shards_;
};

}  // namespace

std::unique_ptr<Store> make_device_store(Ledger* ledger, const DeviceParts& parts) {
  return std::make_unique<DeviceStore>(ledger, parts, Fp32Master::kParameters);
}

std::unique_ptr<Store> make_device_store_with_masters(Ledger* ledger, const DeviceParts& parts) {
  return std::make_unique<DeviceStore>(ledger, parts, Fp32Master::kKept);
}

}  // namespace zb
