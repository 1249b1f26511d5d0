// Leaves gradients in place, where autograd put them, until their update.
//
// [Note: gradients in place]
// One rank has nothing to reduce. If its device works in lanes and its store takes gradients in pieces, the gradients
// of a unit stay where autograd put them until the norm and the update have read them. All of that runs in the compute
// lane, which owns their memory. The conditions are:
// - Every parameter of the unit got exactly one gradient.
// - The gradients have the dtype of the reduction.
// - The step has only one backward.
// All other gradients are packed into flat gradients that are made for the step.
#pragma once

#include <vector>

#include "memory/ledger.h"
#include "zero/unit.h"

namespace zb {

class InPlaceGradients {
 public:
  InPlaceGradients(const std::vector<Parameter>& parameters, Ledger* ledger)
      : parameters_(parameters), ledger_(ledger) {}

  // Whether the unit's pending gradients can stay in place, in the first backward of a step.
  bool can_stay_in_place(const Unit& unit) const;
  // Leaves the unit's pending gradients in place from now on.
  void leave_in_place(Unit& unit) const;
  // Makes them pending again, before those that arrived since.
  static void take_back(Unit& unit);

 private:
  const std::vector<Parameter>& parameters_;
  Ledger* ledger_;
};

}  // namespace zb
