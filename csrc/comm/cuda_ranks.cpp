#include "comm/cuda_ranks.h"

#include <cuda_runtime.h>

#include <string>
#include <vector>

#include "common/cuda_check.h"
#include "common/error.h"

namespace zb {

RankDevice RankDevice::own(Device& device) {
  RankDevice rank;
  rank.process = ProcessIdentity::own();
  device.bind_thread();
  int ordinal = 0;
  ZB_CUDA(cudaGetDevice(&ordinal));
  ZB_CUDA(cudaDeviceGetPCIBusId(rank.pci_bus_id.data(), static_cast<int>(rank.pci_bus_id.size()), ordinal));
  return rank;
}

void check_one_rank_a_gpu(std::span<const RankDevice> ranks) {
  for (std::size_t rank = 1; rank < ranks.size(); ++rank) {
    for (std::size_t other = 0; other < rank; ++other) {
      if (ranks[rank].process.host != ranks[other].process.host || ranks[rank].pci_bus_id != ranks[other].pci_bus_id) {
        continue;
      }
      throw CommunicationError("ranks " + std::to_string(other) + " and " + std::to_string(rank) +
                                   " of one host both use the GPU " + ranks[rank].pci_bus_id.data() +
                                   "; start at most one rank for each GPU that is visible, or name the communicator "
                                   "'peer', whose ranks may share a GPU to try things out",
                               static_cast<int>(rank));
    }
  }
}

PeerProcesses watch_processes(Communicator& control, std::span<const RankDevice> ranks, std::string_view label) {
  std::vector<ProcessIdentity> identities;
  for (const RankDevice& rank : ranks) identities.push_back(rank.process);
  PeerProcesses processes(control.rank(), identities);
  control.barrier(label);  // all of them lived until here, so it is them that are watched
  return processes;
}

}  // namespace zb
