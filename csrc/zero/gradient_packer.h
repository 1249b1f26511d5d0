// Packs gradients that a unit holds into its flat gradients, in the compute lane: one piece of work for many.
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/device.h"
#include "zero/unit.h"

namespace zb {

class GradientPacker {
 public:
  // `persistent`: flat gradients are buffers of their units; else slots or spares, which the unit needs to be packed.
  GradientPacker(Device& device, const std::vector<Parameter>& parameters, bool persistent)
      : device_(device), parameters_(parameters), persistent_(persistent) {}

  // What the unit holds by now.
  void pack_held(Unit& unit);
  // The same, and zeros wherever this rank has no gradient.
  void pack_whole(Unit& unit);

 private:
  std::byte* base(const Unit& unit, const FlatBuffer& flat) const;
  void add_held(Unit& unit);
  void add_missing(const Unit& unit);
  void pack();

  Device& device_;
  const std::vector<Parameter>& parameters_;
  bool persistent_;
  std::vector<PackItem> items_;       // of the next pack
  std::vector<HeldGradient> packed_;  // whose memory the next pack reads
};

}  // namespace zb
