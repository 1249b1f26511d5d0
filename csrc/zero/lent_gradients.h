// Gradients that stay where autograd left them until their update.
//
// [Note: lent gradients]
// One rank has nothing to reduce. Where its device works in lanes and its store takes gradients in pieces, those of a
// unit stay where autograd left them, until the norm and the update have read them there; all in the compute lane,
// whose memory they are. That is so where every parameter of the unit got one gradient, in the dtype of the reduction,
// in the only backward of a step. Others are packed into flat gradients that are made for the step.
#pragma once

#include <vector>

#include "memory/ledger.h"
#include "zero/unit.h"

namespace zb {

class LentGradients {
 public:
  LentGradients(const std::vector<Parameter>& parameters, Ledger* ledger) : parameters_(parameters), ledger_(ledger) {}

  // Whether what the unit holds may stay, in the first backward of a step.
  bool may_stay(const Unit& unit) const;
  // What the unit holds is lent from now on.
  void lend(Unit& unit) const;
  // And held again, in front of what came since.
  static void take_back(Unit& unit);

 private:
  const std::vector<Parameter>& parameters_;
  Ledger* ledger_;
};

}  // namespace zb
