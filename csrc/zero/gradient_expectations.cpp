#include "zero/gradient_expectations.h"

#include <algorithm>

namespace zb {

void GradientExpectations::guess() {
  for (Unit& unit : units_) {
    unit.expected_uses = 1;
    unit.expected_arrivals = static_cast<std::uint32_t>(unit.trainable_parameters);
    for (const FlatBuffer& flat : unit.flats) {
      for (const std::size_t p : flat.parameters) parameters_[p].expected_arrivals = 1;
    }
  }
}

void GradientExpectations::abandon_forward() {
  if (forwards_ > 0) --forwards_;
  if (forwards_ == 0) forget_uses();
}

void GradientExpectations::begin_backward() {
  regular_ = forwards_ == expected_forwards_;
  for (Unit& unit : units_) {
    unit.arrivals = 0;
    unit.last_arrived = nullptr;
    for (const FlatBuffer& flat : unit.flats) {
      for (const std::size_t p : flat.parameters) parameters_[p].arrivals = 0;
    }
  }
}

bool GradientExpectations::is_unused(const Unit& unit) const {
  return recorded_ && regular_ && unit.uses == 0 && unit.expected_uses > 0;
}

void GradientExpectations::count_arrival(Unit& unit, Parameter& parameter) const {
  unit.last_arrived = &parameter;
  if (++parameter.arrivals <= parameter.expected_arrivals) ++unit.arrivals;
}

// Before anything is recorded, one gradient a parameter is a guess. It fails where reentrant checkpoints inside a unit
// use a parameter again, so units whose gradients come from several graph tasks, and the root, wait for the end then.
bool GradientExpectations::is_complete(const Unit& unit, const Parameter& last, int graph_task) const {
  if (!regular_ || unit.is_reduced_at_end || unit.uses != unit.expected_uses) return false;
  if (last.arrivals > last.expected_arrivals || unit.arrivals < unit.expected_arrivals) return false;
  if (recorded_) return !may_get_more(unit);
  return !unit.is_root && unit.graph_task == graph_task;
}

// Behind the gradients that came in every backward.
bool GradientExpectations::may_get_more(const Unit& unit) const {
  if (!unit.last_varies && !unit.is_root) return false;
  for (const FlatBuffer& flat : unit.flats) {
    if (!flat.trainable) continue;
    for (const std::size_t p : flat.parameters) {
      const Parameter& parameter = parameters_[p];
      const bool is_unseen = parameter.most_arrivals == 0;
      if (is_unseen ? unit.is_root : unit.last_varies && parameter.expected_arrivals < parameter.most_arrivals)
        return true;
    }
  }
  return false;
}

void GradientExpectations::record_last(Unit& unit) {
  if (unit.last_arrived == nullptr) return;
  unit.last_varies |= unit.expected_last != nullptr && unit.expected_last != unit.last_arrived;
  unit.expected_last = unit.last_arrived;
}

void GradientExpectations::refute(Unit& unit) {
  expected_forwards_ = 0;
  unit.is_reduced_at_end = true;
}

void GradientExpectations::record() {
  if (forwards_ == 0) return;  // of an earlier forward's second backward: nothing tells how often modules were used
  expected_forwards_ = forwards_;
  for (Unit& unit : units_) {
    if (!unit.has_trainable()) continue;
    const bool used_as_before = recorded_ && unit.uses == unit.expected_uses;
    unit.expected_uses = unit.uses;
    unit.expected_arrivals = 0;
    record_last(unit);
    for (const FlatBuffer& flat : unit.flats) {
      for (const std::size_t p : flat.parameters) {
        Parameter& parameter = parameters_[p];
        parameter.most_arrivals = std::max(parameter.most_arrivals, parameter.arrivals);
        if (unit.uses == 0 && parameter.arrivals > 0) unit.is_awaited_early = true;
        // What came in some backwards only, such as an expert's gradient, is not waited for.
        parameter.expected_arrivals =
            used_as_before ? std::min(parameter.expected_arrivals, parameter.arrivals) : parameter.arrivals;
        unit.expected_arrivals += parameter.expected_arrivals;
      }
    }
  }
  recorded_ = true;
}

void GradientExpectations::forget_uses() {
  forwards_ = 0;
  for (Unit& unit : units_) unit.uses = 0;
}

}  // namespace zb
