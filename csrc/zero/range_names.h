// What profilers call the work on a unit, composed once, since nothing may be composed in a step.
#pragma once

#include <string>

namespace zb {

struct RangeNames {
  explicit RangeNames(const std::string& unit = {})
      : gather("gather " + unit),
        wait_for_gather("wait for gather " + unit),
        forward("forward " + unit),
        backward("backward " + unit),
        reduce("reduce " + unit),
        update("update " + unit),
        publish("publish " + unit) {}

  std::string gather;
  std::string wait_for_gather;
  std::string forward;
  std::string backward;
  std::string reduce;
  std::string update;
  std::string publish;
};

}  // namespace zb
