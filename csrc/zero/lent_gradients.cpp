#include "zero/lent_gradients.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace zb {

bool LentGradients::may_stay(const Unit& unit) const {
  if (unit.held.size() != unit.trainable_parameters) return false;
  return std::all_of(unit.held.begin(), unit.held.end(), [&](const HeldGradient& gradient) {
    return !gradient.accumulate && gradient.dtype == unit.flats[parameters_[gradient.parameter].flat].accumulate_dtype;
  });
}

void LentGradients::lend(Unit& unit) const {
  unit.lent = std::exchange(unit.held, {});
  std::size_t bytes = 0;
  for (const HeldGradient& gradient : unit.lent) {
    const Parameter& parameter = parameters_[gradient.parameter];
    unit.flats[parameter.flat].lent_gradients.push_back(
        {.begin = parameter.offset_numel, .numel = parameter.numel, .data = gradient.data});
    bytes += parameter.numel * dtype_bytes(gradient.dtype);
  }
  unit.lent_bytes = Allocation(ledger_, Tier::kDevice, Category::kGradients, bytes);
  for (FlatBuffer& flat : unit.flats) {
    std::sort(flat.lent_gradients.begin(), flat.lent_gradients.end(),
              [](const FlatPiece& a, const FlatPiece& b) { return a.begin < b.begin; });
  }
}

void LentGradients::take_back(Unit& unit) {
  unit.held.insert(unit.held.begin(), std::make_move_iterator(unit.lent.begin()),
                   std::make_move_iterator(unit.lent.end()));
  unit.drop_lent();
}

}  // namespace zb
