// Some steps of a toy model whose ranks go different ways, and all that is left of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "engine_support.h"

namespace zb::test {

inline const std::vector<std::size_t> kUnits{1, 2, 3, 4};
inline const std::vector<std::size_t> kReversed{4, 3, 2, 1};

// Units in an order of the rank's own in every third micro-batch, one left out in every fifth.
inline std::vector<std::size_t> units_of(const ToyRank& toy, long micro_step) {
  std::vector<std::size_t> units = kUnits;
  const long own = micro_step + 2 * toy.rank();
  if (own % 3 == 2) std::rotate(units.begin(), units.begin() + 1 + own % 2, units.end());
  if (own % 5 == 4) units.erase(units.begin() + own % 4);
  return units;
}

inline Values walk(ToyRank& toy, const ToyOptions& options) {
  constexpr long kSteps = 4;
  for (long step = 0; step < kSteps; ++step) {
    if (step == 2 && toy.rank() == 0 && options.loss_scale.enabled) toy.spoil(2);
    if (step == 3) toy.spoil(SIZE_MAX);
    for (long micro = 1; micro <= options.accumulation_steps; ++micro) {
      std::vector<std::size_t> units = units_of(toy, toy.micro_step());
      toy.forward(units);
      std::reverse(units.begin(), units.end());
      toy.backward(units, micro == options.accumulation_steps);
    }
    toy.start_step();
    if (step % 2 == 1) toy.forward({2, 4}, false);
  }
  EXPECT_EQ(toy.engine().steps_applied(), options.loss_scale.enabled ? kSteps - 1 : kSteps);
  Values found = toy.state(FullState::kParameters);
  for (const FullState kind : {FullState::kMaster, FullState::kExpAvg, FullState::kExpAvgSq}) {
    const Values more = toy.state(kind);
    found.insert(found.end(), more.begin(), more.end());
  }
  return found;
}

}  // namespace zb::test
