// Packs a unit's pending gradients into its flat gradients: one piece of work for many, and in a lane beside the
// compute lane copies for the large ones, which take no multiprocessor from what runs there. Or pushes them to the
// ranks that reduce them, in the place of flat gradients that those would read.
#pragma once

#include <cstddef>
#include <vector>

#include "comm/communicator.h"
#include "kernels/device.h"
#include "zero/unit.h"

namespace zb {

class GradientPacker {
 public:
  // `gaps_stay`: what lies between parameters in flat gradients is zero, since nobody else uses their memory.
  GradientPacker(Device& device, const std::vector<Parameter>& parameters, bool gaps_stay)
      : device_(device), parameters_(parameters), gaps_stay_(gaps_stay) {}

  // Packs the unit's pending gradients, in the compute lane.
  void pack_pending(Unit& unit);
  // The same in any lane that is behind the gradients, and zeros wherever this rank has none. What is returned keeps
  // them, and has to stay until the lane has read them.
  std::vector<ArrivedGradient> pack_whole(Unit& unit, Lane lane);
  // The same, but everything goes to the ranks that reduce it, in the communicator's lane; gradients of `copy_bytes` or
  // more by copies.
  std::vector<ArrivedGradient> push_whole(Unit& unit, Communicator& communicator, std::size_t copy_bytes);

  // Below it a copy costs the host more than it spares the device.
  static constexpr std::size_t kCopyBytes = std::size_t{8} << 20U;

 private:
  std::byte* base(const Unit& unit, const FlatBuffer& flat) const;
  template <typename BeforeRepeat>
  void add_pending(Unit& unit, const BeforeRepeat& before_repeat);
  void add_missing(const Unit& unit);
  void pack(Lane lane);

  Device& device_;
  const std::vector<Parameter>& parameters_;
  bool gaps_stay_;
  std::vector<PackItem> items_;          // of the next pack
  std::vector<ArrivedGradient> packed_;  // whose memory the next pack reads
};

}  // namespace zb
