#include "zero/unit_state.h"

#include "common/error.h"

namespace zb {
namespace {

// The transitions that start at `state`, for an error.
template <typename States>
std::string transitions_from(typename States::State state) {
  std::string text;
  for (const auto& transition : States::kTransitions) {
    if (transition.from != state) continue;
    if (!text.empty()) text += ", ";
    text += std::string(state_name<States>(transition.to)) + " (" + std::string(transition.reason) + ")";
  }
  return text;
}

}  // namespace

template <typename States>
void UnitState<States>::go(State next, std::string_view what, std::string_view unit) {
  const State from = state_;
  ZB_EXPECT_STATE(try_go(next), std::string(what) + " of unit '" + std::string(unit) + "' cannot go from " +
                                    std::string(state_name<States>(from)) + " to " +
                                    std::string(state_name<States>(next)) + "; from " +
                                    std::string(state_name<States>(from)) +
                                    " they can go to: " + transitions_from<States>(from));
}

template class UnitState<ParameterStates>;
template class UnitState<GradientStates>;

}  // namespace zb
