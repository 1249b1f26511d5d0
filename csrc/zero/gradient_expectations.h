// Knows when a unit has all the gradients of a backward.
//
// [Note: complete units]
// A unit counts as complete when its module was called as often before this backward as before the recorded ones and
// all gradients arrived that came in each of them (an expert's comes in some only); a unit that was not called at all
// is complete at once. In a backward that other forwards than the recorded ones led to nothing is known to be complete
// before its end. Until a backward was recorded, every module is taken to be called once, and every parameter to get
// one gradient.
//
// Gradients that come in some backwards only must come before one that comes in all. Where the last one was not always
// of the same parameter they may not, so such a unit is complete at the end of a backward. So is a root of which a
// parameter never got a gradient yet: a part of it that later steps use (what a batch with images goes through) mostly
// comes first in a forward, and to wait costs a root little, whose turn to be reduced is the last.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "zero/unit.h"

namespace zb {

class GradientExpectations {
 public:
  GradientExpectations(std::vector<Unit>& units, std::vector<Parameter>& parameters)
      : units_(units), parameters_(parameters) {}

  // Makes the first guess, once layouts exist.
  void guess();

  void begin_forward() { ++forwards_; }
  // Forgets the last forward, which failed.
  void abandon_forward();
  void count_use(std::size_t unit) { ++units_[unit].uses; }
  void begin_backward();
  // Whether the unit is complete with nothing: no forward has called it.
  bool is_unused(const Unit& unit) const;
  void count_arrival(Unit& unit, Parameter& parameter) const;
  // With the gradient of `last`, which came from this graph task.
  bool is_complete(const Unit& unit, const Parameter& last, int graph_task) const;
  // A gradient came after the unit was complete: the next backward reduces everything at its end and records anew.
  void refute(Unit& unit);
  // A whole backward is over. Units with gradients that no forward has called are awaited early from now on.
  void record();
  void forget_uses();

 private:
  bool may_get_more(const Unit& unit) const;
  static void record_last(Unit& unit);

  std::vector<Unit>& units_;
  std::vector<Parameter>& parameters_;
  bool recorded_ = false;                // expectations come from a backward, not from a guess
  bool regular_ = false;                 // expectations hold for the running backward
  std::uint32_t forwards_ = 0;           // training forwards since the last backward ended
  std::uint32_t expected_forwards_ = 1;  // before the backward that the expectations come from
};

}  // namespace zb
