// Which process and which GPU each rank is: what communicators of GPUs ask for before they connect. Only files of the
// CUDA module include this.
#pragma once

#include <array>
#include <span>
#include <string_view>

#include "comm/communicator.h"
#include "comm/peer_processes.h"
#include "kernels/device.h"

namespace zb {

// What a rank tells its peers. Plain bytes.
struct RankDevice {
  ProcessIdentity process;
  std::array<char, 32> pci_bus_id{};

  static RankDevice own(Device& device);
};

// Throws CommunicationError, on all ranks alike, where two of one host use the same GPU.
void check_one_rank_a_gpu(std::span<const RankDevice> ranks);

// Collective.
PeerProcesses watch_processes(Communicator& control, std::span<const RankDevice> ranks, std::string_view label);

}  // namespace zb
