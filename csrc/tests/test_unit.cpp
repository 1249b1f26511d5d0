#include "zero/unit.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "common/error.h"

namespace zb {
namespace {

constexpr std::size_t kAlignmentBytes = 64;
constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

struct Model {
  std::vector<std::string> unit_names;
  std::vector<ParameterSpec> specs;
};

// Some units (one of them possibly empty) of parameters of every kind.
Model random_model(std::uint32_t seed) {
  std::mt19937 random(seed);
  Model model;
  const std::size_t unit_num = 1 + random() % 5;
  for (std::size_t unit = 0; unit < unit_num; ++unit)
    model.unit_names.push_back(std::string("unit") + std::to_string(unit));
  for (std::size_t index = 0; index < random() % 30; ++index) {
    const std::size_t numels[] = {1, 3, 7, 16, 100, 1000 + random() % 5000};
    model.specs.push_back({.name = std::string("p") + std::to_string(index),
                           .numel = numels[random() % 6],
                           .param_dtype = kDTypes[random() % 3],
                           .reduce_dtype = kDTypes[random() % 3],
                           .trainable = random() % 4 != 0,
                           .param_group = static_cast<int>(random() % 3),
                           .unit = random() % unit_num});
  }
  return model;
}

class MakeUnits : public testing::TestWithParam<int> {
 protected:
  std::size_t ranks() const { return static_cast<std::size_t>(GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(Unit, MakeUnits, testing::Values(1, 2, 3, 4, 7, 64));

void check_flat(const Unit& unit, std::size_t flat_index, const Model& model, const std::vector<Parameter>& parameters,
                std::size_t ranks) {
  const FlatBuffer& flat = unit.flats[flat_index];
  EXPECT_FALSE(flat.parameters.empty());
  EXPECT_EQ(flat.layout.padded_numel(), flat.layout.shard_numel() * ranks);
  EXPECT_EQ(flat.shard_parameter_bytes() % kAlignmentBytes, 0U);
  EXPECT_EQ(flat.shard_gradient_bytes() % kAlignmentBytes, 0U);
  EXPECT_EQ(flat.gather_offset_bytes % kAlignmentBytes, 0U);
  EXPECT_LE(flat.gather_offset_bytes + flat.full_parameter_bytes(), unit.gather_bytes);
  if (flat.trainable) {
    EXPECT_EQ(flat.gradient_offset_bytes % kAlignmentBytes, 0U);
    EXPECT_LE(flat.gradient_offset_bytes + flat.full_gradient_bytes(), unit.gradient_bytes);
  }
  std::size_t end = 0;
  int group = -1;
  for (const std::size_t index : flat.parameters) {
    const Parameter& parameter = parameters[index];
    const ParameterSpec& spec = model.specs[index];
    EXPECT_EQ(parameter.flat, flat_index);
    EXPECT_EQ(flat.param_dtype, spec.param_dtype);
    EXPECT_EQ(flat.reduce_dtype, spec.reduce_dtype);
    EXPECT_EQ(flat.trainable, spec.trainable);
    EXPECT_GE(spec.param_group, group);  // ordered by param group
    EXPECT_GE(parameter.offset_numel, end);
    EXPECT_EQ(parameter.offset_numel * dtype_bytes(flat.param_dtype) % kAlignmentBytes, 0U);
    EXPECT_EQ(parameter.offset_numel * dtype_bytes(flat.reduce_dtype) % kAlignmentBytes, 0U);
    group = spec.param_group;
    end = parameter.offset_numel + parameter.numel;
  }
  EXPECT_LE(end, flat.layout.padded_numel());
}

TEST_P(MakeUnits, EveryParameterLiesInExactlyOneAlignedPlace) {
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    const Model model = random_model(seed);
    std::vector<Parameter> parameters;
    const std::vector<Unit> units =
        make_units(model.unit_names, seed % model.unit_names.size(), model.specs, GetParam(), parameters);
    ASSERT_EQ(units.size(), model.unit_names.size());
    ASSERT_EQ(parameters.size(), model.specs.size());
    std::multiset<std::size_t> placed;
    for (std::size_t unit_index = 0; unit_index < units.size(); ++unit_index) {
      const Unit& unit = units[unit_index];
      EXPECT_EQ(unit.name, model.unit_names[unit_index]);
      EXPECT_EQ(unit.is_root, unit_index == seed % units.size());
      std::size_t trainable_num = 0;
      for (std::size_t flat = 0; flat < unit.flats.size(); ++flat) {
        check_flat(unit, flat, model, parameters, ranks());
        placed.insert(unit.flats[flat].parameters.begin(), unit.flats[flat].parameters.end());
        if (unit.flats[flat].trainable) trainable_num += unit.flats[flat].parameters.size();
        for (const std::size_t index : unit.flats[flat].parameters) EXPECT_EQ(parameters[index].unit, unit_index);
      }
      EXPECT_EQ(unit.trainable_parameters, trainable_num);
      EXPECT_EQ(unit.has_trainable(), unit.gradient_bytes > 0);
      EXPECT_EQ(unit.flats.empty(), unit.gather_bytes == 0);
    }
    ASSERT_EQ(placed.size(), model.specs.size());
    for (std::size_t index = 0; index < model.specs.size(); ++index) {
      EXPECT_EQ(placed.count(index), 1U);
      EXPECT_EQ(parameters[index].name, model.specs[index].name);
      EXPECT_EQ(parameters[index].numel, model.specs[index].numel);
      EXPECT_EQ(parameters[index].trainable, model.specs[index].trainable);
    }
    if (HasFailure()) FAIL() << "seed " << seed;
  }
}

TEST_P(MakeUnits, IsTheSameForEqualModels) {
  const Model model = random_model(7);
  std::vector<Parameter> first, second;
  static_cast<void>(make_units(model.unit_names, 0, model.specs, GetParam(), first));
  static_cast<void>(make_units(model.unit_names, 0, model.specs, GetParam(), second));
  for (std::size_t index = 0; index < first.size(); ++index) {
    EXPECT_EQ(first[index].offset_numel, second[index].offset_numel);
    EXPECT_EQ(first[index].flat, second[index].flat);
  }
}

TEST(Units, AParameterOfNoUnitIsRefused) {
  std::vector<Parameter> parameters;
  EXPECT_THROW(make_units({"root"}, 0, {{.name = "lost", .numel = 1, .unit = 1}}, 2, parameters), ArgumentError);
}

}  // namespace
}  // namespace zb
