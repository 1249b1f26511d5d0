#include "zero/gradient_packer.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace zb {

std::byte* GradientPacker::base(const Unit& unit, const FlatBuffer& flat) const {
  if (flat.full_gradients || unit.gradient_slot) return unit.gradients_of(flat).data();
  return unit.spare->data() + flat.gradient_offset_bytes;
}

void GradientPacker::pack_pending(Unit& unit) {
  add_pending(unit, [this] { pack(Lane::kCompute); });
  pack(Lane::kCompute);
  packed_.clear();  // the compute lane gives their memory to nobody before it has packed them
}

std::vector<ArrivedGradient> GradientPacker::pack_whole(Unit& unit, Lane lane) {
  add_pending(unit, [this, lane] { pack(lane); });
  add_missing(unit);
  pack(lane);
  return std::exchange(packed_, {});
}

std::vector<ArrivedGradient> GradientPacker::push_whole(Unit& unit, Communicator& communicator,
                                                        std::size_t copy_bytes) {
  add_pending(unit, [] {});  // a push keeps the order of items that add
  add_missing(unit);
  std::vector<ArrivedGradient> pushed = std::exchange(packed_, {});
  std::vector<PackItem> items = std::exchange(items_, {});
  auto begin = items.begin();
  for (const FlatBuffer& flat : unit.flats) {
    if (!flat.trainable) continue;
    const Region source = unit.gradients_of(flat);
    const auto end = std::stable_partition(begin, items.end(), [&](const PackItem& item) {
      const auto* const destination = static_cast<const std::byte*>(item.destination);
      return destination >= source.data() && destination < source.data() + flat.full_gradient_bytes();
    });
    communicator.push({.source = source,
                       .shard_numel = flat.layout.shard_numel(),
                       .dtype = flat.reduce_dtype,
                       .label = flat.label,
                       .items = std::span(begin, end),
                       .copy_bytes = copy_bytes});
    begin = end;
  }
  return pushed;
}

void GradientPacker::pack(Lane lane) {
  const auto is_copied = [&](const PackItem& item) {
    if (lane == Lane::kCompute || !item.is_copy() || item.bytes() < kCopyBytes) return false;
    device_.copy(lane, item.destination, item.source, item.bytes());
    return true;
  };
  items_.erase(std::remove_if(items_.begin(), items_.end(), is_copied), items_.end());
  if (!items_.empty()) device_.pack(lane, items_);
  items_.clear();
}

template <typename BeforeRepeat>
void GradientPacker::add_pending(Unit& unit, const BeforeRepeat& before_repeat) {
  for (auto pending = unit.pending_gradients.begin(); pending != unit.pending_gradients.end(); ++pending) {
    const Parameter& parameter = parameters_[pending->parameter];
    const FlatBuffer& flat = unit.flats[parameter.flat];
    // A further gradient of the same parameter is added to what the first one leaves.
    const bool repeats = pending->accumulate &&
                         std::any_of(unit.pending_gradients.begin(), pending, [&](const ArrivedGradient& earlier) {
                           return earlier.parameter == pending->parameter;
                         });
    if (repeats) before_repeat();
    items_.push_back({.destination = base(unit, flat) + parameter.offset_numel * dtype_bytes(flat.reduce_dtype),
                      .destination_dtype = flat.reduce_dtype,
                      .source = pending->data,
                      .source_dtype = pending->dtype,
                      .numel = parameter.numel,
                      .accumulate = pending->accumulate});
  }
  packed_.insert(packed_.end(), std::make_move_iterator(unit.pending_gradients.begin()),
                 std::make_move_iterator(unit.pending_gradients.end()));
  unit.pending_gradients.clear();
}

// Zeros what no gradient was written to: parameters without one, and in slots the gaps that another unit may have used.
void GradientPacker::add_missing(const Unit& unit) {
  for (const FlatBuffer& flat : unit.flats) {
    if (!flat.trainable) continue;
    std::byte* begin = base(unit, flat);
    const auto zero = [&](std::size_t offset_numel, std::size_t numel) {
      items_.push_back({.destination = begin + offset_numel * dtype_bytes(flat.reduce_dtype),
                        .destination_dtype = flat.reduce_dtype,
                        .numel = numel});
    };
    if (!gaps_stay_) {
      for (const Segment& gap : flat.layout.gaps()) zero(gap.begin, gap.end - gap.begin);
    }
    for (const std::size_t index : flat.parameters) {
      const Parameter& parameter = parameters_[index];
      if (!parameter.arrived_in_window) zero(parameter.offset_numel, parameter.numel);
    }
  }
}

}  // namespace zb
