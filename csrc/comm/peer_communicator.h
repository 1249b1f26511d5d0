// The peer communicator: GPUs of one host that read each other's memory with their copy engines, so gathers use no
// multiprocessor. Reductions add in rank order in float and round once (comm/peer_transport.h).
//
// `control` is a communicator of host memory among the same ranks. A world of one rank makes copies in its own memory.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>

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

// Collective. Throws ArgumentError on all ranks where some rank's GPU cannot take part, CommunicationError after the
// timeout or when a peer failed.
std::unique_ptr<Communicator> make_peer_communicator(PeerOptions options);

}  // namespace zb
