// The NCCL communicator: an ncclComm_t of its own whose collectives run in a lane of a CUDA device.
//
// `control` is a communicator of host memory among the same ranks (shm on one host, c10d across hosts), over which they
// meet, exchange messages and learn of each other's failures. A world of one rank makes copies and needs no NCCL.
// NVLink SHARP stays off: the first communicator sets NCCL_NVLS_ENABLE=0 in the environment, for NCCL's other users in
// this process too. NCCL reads the variable once, so a process that uses NCCL before must set it itself.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "comm/communicator.h"
#include "kernels/device.h"

namespace zb {

class DeviceLink;  // cuda_paced_transport.h

enum class NcclBuffers : std::uint8_t {
  kPlain,      // memory of the device
  kSymmetric,  // NCCL's own, registered as symmetric windows: allocation is collective, whatever the role
};

struct NcclOptions {
  std::shared_ptr<Device> device;
  Lane lane = Lane::kGather;
  std::unique_ptr<Communicator> control;
  std::chrono::milliseconds timeout{300'000};
  NcclBuffers buffers = NcclBuffers::kPlain;
  std::shared_ptr<DeviceLink> link;  // whose time operations take; null: as long as they take
};

// Collective. Blocks until all ranks have connected. Throws CommunicationError after the timeout or when a peer failed,
// NcclError when NCCL does.
std::unique_ptr<Communicator> make_nccl_communicator(NcclOptions options);

}  // namespace zb
