// The states of a unit's parameters and gradients, and every legal transition between them.
//
// [Note: state of a unit]
// Parameters:  sharded -> gathering -> unsharded -> sharded   (stage 3 on several ranks; elsewhere always unsharded)
//                         gathering -> sharded                (the gathered buffer is dropped)
//   sharded    costs a shard; touching a parameter raises an error that names it
//   gathering  costs a slot; the all-gather has been started
//   unsharded  costs a slot; parameters point into it
// Gradients:   empty -> accumulating -> reducing -> reduced -> empty
//                       accumulating -> empty                 (the next micro-batch, or the window is dropped)
//                                       reducing -> empty     (dropped after a fault)
//   accumulating  gradients arrive and are packed into the flat gradient (own buffer, slot, or spare memory); where the
//                 device works in lanes they are pending until the unit has all of them, and on one rank they may stay
//                 where they are ([Note: gradients in place] in in_place_gradients.h)
//   reducing      the reduce-scatter has been started; nothing more may arrive
//   reduced       this rank's shard of the sum is readable (stage 0: the others' once the backward ended)
// The tables below are what is checked; test_unit_states.cpp repeats this diagram and compares.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace zb {

enum class ParameterState : std::uint8_t { kSharded, kGathering, kUnsharded };
enum class GradientState : std::uint8_t { kEmpty, kAccumulating, kReducing, kReduced };

template <typename State>
struct Transition {
  State from;
  State to;
  std::string_view reason;
};

struct ParameterStates {
  using State = ParameterState;
  using enum ParameterState;
  static constexpr std::array<std::string_view, 3> kNames{"sharded", "gathering", "unsharded"};
  static constexpr State kInitial = kUnsharded;
  static constexpr State kReset = kSharded;
  static constexpr std::array<Transition<State>, 4> kTransitions{{
      {kSharded, kGathering, "a gather starts"},
      {kGathering, kUnsharded, "the gather has ended"},
      {kGathering, kSharded, "the gathered buffer is dropped"},
      {kUnsharded, kSharded, "the unit is built or released"},
  }};
};

struct GradientStates {
  using State = GradientState;
  using enum GradientState;
  static constexpr std::array<std::string_view, 4> kNames{"empty", "accumulating", "reducing", "reduced"};
  static constexpr State kInitial = kEmpty;
  static constexpr State kReset = kEmpty;
  static constexpr std::array<Transition<State>, 6> kTransitions{{
      {kEmpty, kAccumulating, "a gradient arrives, or zeros take its place"},
      {kAccumulating, kReducing, "the reduction starts"},
      {kAccumulating, kEmpty, "the next micro-batch begins, or the window is dropped"},
      {kReducing, kReduced, "the reduction has ended"},
      {kReducing, kEmpty, "the gradients are dropped after a fault"},
      {kReduced, kEmpty, "the next backward begins, or the window ends or is dropped"},
  }};
};

template <typename States>
constexpr bool has_transition(typename States::State from, typename States::State to) {
  return std::any_of(States::kTransitions.begin(), States::kTransitions.end(),
                     [&](const auto& transition) { return transition.from == from && transition.to == to; });
}

template <typename States>
constexpr std::string_view state_name(typename States::State state) noexcept {
  return States::kNames[static_cast<std::size_t>(state)];
}

// Whether every other state has a transition to the one that reset() goes to.
template <typename States>
constexpr bool can_always_reset() {
  for (std::size_t index = 0; index < States::kNames.size(); ++index) {
    const auto state = static_cast<typename States::State>(index);
    if (state != States::kReset && !has_transition<States>(state, States::kReset)) return false;
  }
  return true;
}

// One of these states, which changes by legal transitions only.
template <typename States>
class UnitState {
  static_assert(can_always_reset<States>());

 public:
  using State = typename States::State;

  operator State() const noexcept { return state_; }

  // Goes to `next` and returns true, or returns false and stays where the table has no such transition. Nothing else
  // assigns a state.
  [[nodiscard]] bool try_go(State next) noexcept {
    if (!has_transition<States>(state_, next)) return false;
    state_ = next;
    return true;
  }

  // Goes to `next`. Throws StateError where the table has no such transition; `what` and `unit` are for its message.
  void go(State next, std::string_view what, std::string_view unit);

  // Goes to States::kReset, unless it is there. Cannot fail, since every state has a transition there.
  void reset() noexcept { static_cast<void>(try_go(States::kReset)); }

 private:
  State state_ = States::kInitial;
};

extern template class UnitState<ParameterStates>;
extern template class UnitState<GradientStates>;

}  // namespace zb
