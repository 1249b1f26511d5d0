// How ranks of one host meet: an abstract Unix socket of rank 0, over which each rank passes a pidfd of itself and
// receives the control block and the pidfds of all peers. The connections to rank 0 stay open to pass memfds later.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "comm/file_descriptor.h"
#include "comm/shm_communicator.h"
#include "comm/shm_control.h"
#include "comm/shm_memory.h"

namespace zb::shm {

using Clock = std::chrono::steady_clock;

struct Connection {
  std::shared_ptr<Mapping> control;
  std::vector<FileDescriptor> processes;  // pidfds by rank; this rank's own is empty
  std::vector<FileDescriptor> sockets;    // on rank 0 by rank, elsewhere only [0]
  int cpu_num = 0;                        // that the ranks together may run on
};

// Throws CommunicationError after the timeout or on a mismatch.
Connection connect_ranks(const ShmOptions& options);

}  // namespace zb::shm
