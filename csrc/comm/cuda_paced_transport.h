// A transport between GPUs whose operations take the time that a slower link would need (paced_link.h). Only files of
// the CUDA module include this.
#pragma once

#include <array>
#include <memory>

#include "comm/lane_transport.h"
#include "comm/paced_link.h"
#include "kernels/cuda_pace.h"

namespace zb {

// Shared by the communicators of a rank, with the times of the link in the device's memory.
class DeviceLink {
 public:
  DeviceLink(std::shared_ptr<Device> device, LinkSpeed speed);

  void depart(Lane lane, WireCost cost);  // what is put into the lane next begins
  void arrive(Lane lane);                 // what is put into the lane later comes after that

 private:
  struct Times {
    LinkTimes link;
    std::array<unsigned long long, kLaneNum> arrival_ns;
  };
  Times* times() const noexcept;

  std::shared_ptr<Device> device_;
  LinkSpeed speed_;
  std::shared_ptr<std::byte> memory_;
};

std::unique_ptr<LaneTransport> make_paced_transport(std::unique_ptr<LaneTransport> inner, Lane lane, int world_size,
                                                    std::shared_ptr<DeviceLink> link);

}  // namespace zb
