#include "zero/unit_state.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/error.h"
#include "zero/unit.h"

namespace zb {
namespace {

using Pairs = std::set<std::pair<std::string, std::string>>;

// [Note: state of a unit], pair by pair.
const Pairs kParameterPairs{
    {"sharded", "gathering"}, {"gathering", "unsharded"}, {"unsharded", "sharded"}, {"gathering", "sharded"}};
const Pairs kGradientPairs{{"empty", "accumulating"}, {"accumulating", "reducing"}, {"reducing", "reduced"},
                           {"reduced", "empty"},      {"accumulating", "empty"},    {"reducing", "empty"}};

template <typename States>
std::vector<typename States::State> all_states() {
  std::vector<typename States::State> all;
  for (std::size_t index = 0; index < States::kNames.size(); ++index)
    all.push_back(static_cast<typename States::State>(index));
  return all;
}

// One in each state, brought there by transitions of the table.
template <typename States>
std::map<typename States::State, UnitState<States>> one_in_each_state() {
  std::map<typename States::State, UnitState<States>> found{{States::kInitial, {}}};
  for (std::size_t round = 0; round < States::kNames.size(); ++round) {
    for (const Transition<typename States::State>& transition : States::kTransitions) {
      if (!found.contains(transition.from)) continue;
      UnitState<States> state = found.at(transition.from);
      state.go(transition.to, "parts", "h.3");
      found.emplace(transition.to, state);
    }
  }
  return found;
}

template <typename States>
std::string name_of(typename States::State state) {
  return std::string(state_name<States>(state));
}

// The message of the StateError of a move from one state to another, empty where there is none.
template <typename States>
std::string refusal(UnitState<States> state, typename States::State to) {
  try {
    state.go(to, "parts", "h.3");
  } catch (const StateError& error) {
    return error.what();
  }
  return {};
}

template <typename States>
Pairs table_of() {
  Pairs pairs;
  for (const auto& transition : States::kTransitions)
    pairs.emplace(name_of<States>(transition.from), name_of<States>(transition.to));
  return pairs;
}

template <typename States>
class UnitStates : public testing::Test {};

struct StateNames {
  template <typename States>
  static std::string GetName(int) {
    return std::is_same_v<States, ParameterStates> ? "Parameters" : "Gradients";
  }
};

using BothKinds = testing::Types<ParameterStates, GradientStates>;
TYPED_TEST_SUITE(UnitStates, BothKinds, StateNames);

TEST(UnitStateTables, ArePairByPairThoseOfTheDiagram) {
  EXPECT_EQ(table_of<ParameterStates>(), kParameterPairs);
  EXPECT_EQ(ParameterStates::kTransitions.size(), kParameterPairs.size());
  EXPECT_EQ(table_of<GradientStates>(), kGradientPairs);
  EXPECT_EQ(GradientStates::kTransitions.size(), kGradientPairs.size());
}

TYPED_TEST(UnitStates, EachCanBeReached) { EXPECT_EQ(one_in_each_state<TypeParam>().size(), TypeParam::kNames.size()); }

TYPED_TEST(UnitStates, ExactlyTheTransitionsOfTheTableAreAllowed) {
  const Pairs legal = table_of<TypeParam>();
  for (const auto& [from, state] : one_in_each_state<TypeParam>()) {
    for (const auto to : all_states<TypeParam>()) {
      const std::string move = "from " + name_of<TypeParam>(from) + " to " + name_of<TypeParam>(to);
      const bool is_legal = legal.contains({name_of<TypeParam>(from), name_of<TypeParam>(to)});
      UnitState<TypeParam> moved = state;
      EXPECT_EQ(moved.try_go(to), is_legal) << move;
      EXPECT_EQ(name_of<TypeParam>(moved), name_of<TypeParam>(is_legal ? to : from)) << move;
      const std::string message = refusal(state, to);
      EXPECT_EQ(message.empty(), is_legal) << move;
      if (is_legal) continue;
      EXPECT_NE(message.find("parts of unit 'h.3' cannot go " + move), std::string::npos) << message;
    }
  }
}

TYPED_TEST(UnitStates, ARefusedMoveLeavesTheState) {
  for (auto& [from, state] : one_in_each_state<TypeParam>()) {
    UnitState<TypeParam> same = state;
    EXPECT_THROW(same.go(from, "parts", "h.3"), StateError);
    EXPECT_EQ(name_of<TypeParam>(same), name_of<TypeParam>(from));
  }
}

TYPED_TEST(UnitStates, EachCanBeReset) {
  for (auto& [from, state] : one_in_each_state<TypeParam>()) {
    UnitState<TypeParam> moved = state;
    moved.reset();
    EXPECT_EQ(name_of<TypeParam>(moved), name_of<TypeParam>(TypeParam::kReset)) << name_of<TypeParam>(from);
  }
}

TEST(Units, SayWhichOfTheirStatesCannotChangeSoAndWhatIsAllowed) {
  Unit unit;
  unit.name = "h.3";
  unit.set_parameter_state(ParameterState::kSharded);
  try {
    unit.set_parameter_state(ParameterState::kUnsharded);
    FAIL() << "no error";
  } catch (const StateError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("parameters of unit 'h.3' cannot go from sharded to unsharded; from sharded they can go to: "
                        "gathering (a gather starts)"),
              std::string::npos)
        << text;
  }
}

}  // namespace
}  // namespace zb
