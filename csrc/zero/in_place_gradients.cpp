#include "zero/in_place_gradients.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace zb {

bool InPlaceGradients::can_stay_in_place(const Unit& unit) const {
  if (unit.pending_gradients.size() != unit.trainable_parameters) return false;
  return std::all_of(unit.pending_gradients.begin(), unit.pending_gradients.end(),
                     [&](const ArrivedGradient& gradient) {
                       return !gradient.accumulate &&
                              gradient.dtype == unit.flats[parameters_[gradient.parameter].flat].accumulate_dtype;
                     });
}

void InPlaceGradients::leave_in_place(Unit& unit) const {
  unit.in_place_gradients = std::exchange(unit.pending_gradients, {});
  std::size_t bytes = 0;
  for (const ArrivedGradient& gradient : unit.in_place_gradients) {
    const Parameter& parameter = parameters_[gradient.parameter];
    unit.flats[parameter.flat].in_place_pieces.push_back(
        {.begin = parameter.offset_numel, .numel = parameter.numel, .data = gradient.data});
    bytes += parameter.numel * dtype_bytes(gradient.dtype);
  }
  unit.in_place_bytes = Allocation(ledger_, Tier::kDevice, Category::kGradients, bytes);
  for (FlatBuffer& flat : unit.flats) {
    std::sort(flat.in_place_pieces.begin(), flat.in_place_pieces.end(),
              [](const FlatPiece& a, const FlatPiece& b) { return a.begin < b.begin; });
  }
}

void InPlaceGradients::take_back(Unit& unit) {
  unit.pending_gradients.insert(unit.pending_gradients.begin(),
                                std::make_move_iterator(unit.in_place_gradients.begin()),
                                std::make_move_iterator(unit.in_place_gradients.end()));
  unit.drop_in_place();
}

}  // namespace zb
