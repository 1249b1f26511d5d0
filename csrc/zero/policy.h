// ZeRO stages as rows of a table: how parameters, gradients and optimizer state are kept.
#pragma once

#include <cstdint>

#include "common/error.h"

namespace zb {

enum class ZeroStage : std::uint8_t { kZero0, kZero1, kZero2, kZero3 };

enum class Placement : std::uint8_t { kReplicated, kSharded };

enum class GradientPlacement : std::uint8_t {
  kReplicated,             // reduced and gathered again: every rank ends with the full sum
  kShardedAtBoundary,      // full while micro-batches accumulate, reduce-scattered in the last backward
  kShardedEachMicroBatch,  // reduce-scattered in every backward, accumulated as shards
};

struct StagePolicy {
  Placement parameters;
  GradientPlacement gradients;
  Placement state;
};

// With one rank there is nothing to share, and every stage keeps everything whole, but for parameters whose home is
// elsewhere than on the device (`parameters_away`): they are gathered from there as shards are.
constexpr StagePolicy stage_policy(ZeroStage stage, int world_size, bool parameters_away = false) {
  constexpr StagePolicy kTable[] = {
      {Placement::kReplicated, GradientPlacement::kReplicated, Placement::kReplicated},
      {Placement::kReplicated, GradientPlacement::kShardedAtBoundary, Placement::kSharded},
      {Placement::kReplicated, GradientPlacement::kShardedEachMicroBatch, Placement::kSharded},
      {Placement::kSharded, GradientPlacement::kShardedEachMicroBatch, Placement::kSharded},
  };
  StagePolicy policy = kTable[world_size == 1 ? 0 : static_cast<int>(stage)];
  if (parameters_away) policy.parameters = Placement::kSharded;
  return policy;
}

inline ZeroStage zero_stage_from_int(int stage) {
  ZB_EXPECT(stage >= 0 && stage <= 3, "stage must be 0, 1, 2 or 3, not " + std::to_string(stage));
  return static_cast<ZeroStage>(stage);
}

}  // namespace zb
