// File descriptors passed between all ranks of one host: a Unix socket for each pair of them, which has no name any
// more once the ranks are connected.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "comm/communicator.h"
#include "comm/file_descriptor.h"
#include "common/interrupts.h"

namespace zb {

class DescriptorMesh {
 public:
  // Collective. `control` tells addresses and failures, and must outlive exchanges. What fails here, or in an exchange,
  // on one rank fails on all: control is aborted.
  DescriptorMesh(Communicator& control, std::chrono::milliseconds timeout);

  // Every rank gives a descriptor and gets those of its peers, by rank; its own place stays empty. `number` must be the
  // same on all ranks.
  std::vector<shm::FileDescriptor> exchange(const shm::FileDescriptor& mine, std::uint64_t number);

 private:
  struct Patience {
    std::chrono::steady_clock::time_point deadline;
    SignalWatch signals = {};
  };

  void listen_and_connect();
  void connect(const shm::FileDescriptor& listener);
  std::vector<shm::FileDescriptor> pass(const shm::FileDescriptor& mine, std::uint64_t number);
  void check_control() const;  // throws what it failed by
  // Throws once the communicator failed, the time is out or a signal ends the wait.
  void keep_waiting(Patience& patience, int peer) const;

  Communicator& control_;
  std::chrono::milliseconds timeout_;
  std::vector<shm::FileDescriptor> sockets_;  // by rank
};

}  // namespace zb
