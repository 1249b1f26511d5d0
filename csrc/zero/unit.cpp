#include "zero/unit.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "common/error.h"
#include "common/round_up.h"

namespace zb {
namespace {

// Every parameter and every shard begins on a cache line.
constexpr std::size_t kUnitAlignmentBytes = 64;

constexpr std::size_t align(std::size_t bytes) { return round_up(bytes, kUnitAlignmentBytes); }

}  // namespace

void check_intact(const Parameter& parameter) {
  ZB_EXPECT_STATE(
      parameter.binding->intact(),
      "the storage of parameter '" + parameter.name +
          "' was replaced from outside (assigning to .data, set_(), share_memory(), or a module's .to(), which a model "
          "may call itself); write values inside engine.gather(..., modifier_rank=0), and let modules keep their "
          "dtype and device");
}

Region Unit::gradients_of(const FlatBuffer& flat) const {
  return flat.full_gradients ? flat.full_gradients : gradient_slot.region().at(flat.gradient_offset_bytes);
}

void Unit::drop_in_place() noexcept {
  for (FlatBuffer& flat : flats) flat.in_place_pieces.clear();
  in_place_gradients.clear();
  in_place_bytes = {};
}

bool Unit::has_frozen() const {
  return std::any_of(flats.begin(), flats.end(), [](const FlatBuffer& flat) { return !flat.trainable; });
}

void Unit::fetch_parameters_of(const std::function<bool(const FlatBuffer&)>& is_kept) {
  for (FlatBuffer& flat : flats) {
    flat.is_fetched = is_kept(flat);
    if (!flat.is_fetched) continue;
    flat.fetch_offset_bytes = fetch_bytes;
    fetch_bytes = align(fetch_bytes + flat.shard_parameter_bytes());
  }
}

void Unit::splice_parameters(std::size_t min_bytes) {
  for (FlatBuffer& flat : flats) {
    const std::size_t bytes = flat.shard_parameter_bytes();
    flat.is_spliced = !flat.is_fetched && bytes > 0 && bytes >= min_bytes;
  }
}

bool Unit::is_spliced() const {
  return std::any_of(flats.begin(), flats.end(), [](const FlatBuffer& flat) { return flat.is_spliced; });
}

std::vector<Unit> make_units(const std::vector<std::string>& unit_names, std::size_t root_unit,
                             const std::vector<ParameterSpec>& specs, int world_size,
                             std::vector<Parameter>& parameters) {
  std::vector<Unit> units(unit_names.size());
  for (std::size_t index = 0; index < units.size(); ++index) {
    units[index].name = unit_names[index];
    units[index].ranges = RangeNames(unit_names[index]);
    units[index].is_root = index == root_unit;
  }
  // Flats in a fixed order: trainable before frozen, then by dtype.
  using Key = std::tuple<bool, DType, DType, DType>;
  std::vector<std::map<Key, std::vector<std::size_t>>> members(units.size());
  for (std::size_t index = 0; index < specs.size(); ++index) {
    const ParameterSpec& spec = specs[index];
    ZB_EXPECT(spec.unit < units.size(), "parameter '" + spec.name + "' names a unit that does not exist");
    const DType accumulate_dtype = spec.accumulate_dtype.value_or(spec.reduce_dtype);
    members[spec.unit][{!spec.trainable, spec.param_dtype, spec.reduce_dtype, accumulate_dtype}].push_back(index);
  }
  parameters.resize(specs.size());
  for (std::size_t unit_index = 0; unit_index < units.size(); ++unit_index) {
    Unit& unit = units[unit_index];
    for (const auto& [key, indices] : members[unit_index]) {
      const auto& [frozen, param_dtype, reduce_dtype, accumulate_dtype] = key;
      FlatBuffer flat;
      flat.param_dtype = param_dtype;
      flat.reduce_dtype = reduce_dtype;
      flat.accumulate_dtype = accumulate_dtype;
      flat.trainable = !frozen;
      flat.label = unit.name;
      // The layout reorders by group; keep our indices in the same (stable) order.
      flat.parameters = indices;
      std::stable_sort(flat.parameters.begin(), flat.parameters.end(),
                       [&](std::size_t a, std::size_t b) { return specs[a].param_group < specs[b].param_group; });
      std::vector<ParameterSpan> spans;
      for (const std::size_t index : flat.parameters) {
        spans.push_back({specs[index].name, specs[index].numel, specs[index].param_group, 0});
      }
      const std::size_t narrowest_bytes = std::min(dtype_bytes(param_dtype), dtype_bytes(reduce_dtype));
      flat.layout =
          FlatLayout(std::move(spans), static_cast<std::size_t>(world_size), kUnitAlignmentBytes / narrowest_bytes);
      flat.gather_offset_bytes = unit.gather_bytes;
      unit.gather_bytes = align(unit.gather_bytes + flat.full_parameter_bytes());
      if (flat.trainable) {
        flat.gradient_offset_bytes = unit.gradient_bytes;
        unit.gradient_bytes = align(unit.gradient_bytes + flat.full_gradient_bytes());
        unit.trainable_parameters += flat.parameters.size();
      }
      for (std::size_t position = 0; position < flat.parameters.size(); ++position) {
        const ParameterSpec& spec = specs[flat.parameters[position]];
        Parameter& parameter = parameters[flat.parameters[position]];
        parameter.name = spec.name;
        parameter.numel = spec.numel;
        parameter.trainable = spec.trainable;
        parameter.unit = unit_index;
        parameter.flat = unit.flats.size();
        parameter.offset_numel = flat.layout.spans()[position].offset_numel;
      }
      unit.flats.push_back(std::move(flat));
    }
  }
  return units;
}

}  // namespace zb
