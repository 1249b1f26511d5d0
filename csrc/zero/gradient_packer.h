// Packs gradients that a unit holds into its flat gradients: one piece of work for many, and in a lane beside the
// compute lane copies for the large ones, which take no multiprocessor from what runs there.
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

  // What the unit holds by now, in the compute lane.
  void pack_held(Unit& unit);
  // The same in any lane that is behind the gradients, and zeros wherever this rank has none. What is returned keeps
  // them, and has to stay until the lane has read them.
  std::vector<HeldGradient> pack_whole(Unit& unit, Lane lane);

 private:
  // Below it a copy costs the host more than it spares the device.
  static constexpr std::size_t kCopyBytes = std::size_t{8} << 20U;

  std::byte* base(const Unit& unit, const FlatBuffer& flat) const;
  void add_held(Unit& unit, Lane lane);
  void add_missing(const Unit& unit);
  void pack(Lane lane);

  Device& device_;
  const std::vector<Parameter>& parameters_;
  bool persistent_;
  std::vector<PackItem> items_;       // of the next pack
  std::vector<HeldGradient> packed_;  // whose memory the next pack reads
};

}  // namespace zb
