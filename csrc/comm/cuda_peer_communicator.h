// The peer communicator: GPUs of one host that read each other's memory with their copy engines, so gathers use no
// multiprocessor. Reductions add in rank order in float and round once (comm/peer_transport.h).
//
// `control` is a communicator of host memory among the same ranks. A world of one rank makes copies in its own memory.
// Ranks may share a GPU: then they take turns on it, so it serves to try out what several GPUs would do.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "comm/communicator.h"
#include "kernels/device.h"

namespace zb {

class CudaDevice;

struct PeerOptions {
  std::shared_ptr<CudaDevice> device;
  Lane lane = Lane::kGather;
  std::unique_ptr<Communicator> control;
  std::chrono::milliseconds timeout{300'000};
};

// Why these ranks cannot use it, the first rank's reason on all of them; empty where they can. Asks the devices, and
// then tries memory, meetings and copies once. Collective over `control`, in the gather lane. Throws CommunicationError
// when a peer failed, or two ranks use the same GPU: who leaves the choice open has not meant that.
std::string peer_obstacle(const std::shared_ptr<CudaDevice>& device, Communicator& control,
                          std::chrono::milliseconds timeout);

// Collective. Throws ArgumentError on all ranks where there is an obstacle, CommunicationError after the timeout or
// when a peer failed.
std::unique_ptr<Communicator> make_peer_communicator(PeerOptions options);

}  // namespace zb
