// How ranks of one host meet: an abstract Unix socket of rank 0, over which each rank passes a pidfd of itself and
// receives the control block and the pidfds of all peers. The connections to rank 0 stay open to pass memfds later.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/file_descriptor.h"
#include "comm/shm_communicator.h"
#include "comm/shm_control.h"
#include "comm/shm_memory.h"

namespace zb::shm {

using Clock = std::chrono::steady_clock;
// How often a rank that sleeps looks at its peers and the clock.
inline constexpr std::chrono::milliseconds kSlice{20};

struct Connection {
  std::shared_ptr<Mapping> control;
  std::vector<FileDescriptor> processes;  // pidfds by rank; this rank's own is empty
  std::vector<FileDescriptor> sockets;    // on rank 0 by rank, elsewhere only [0]
  int cpu_num = 0;                        // that the ranks together may run on
};

// Throws CommunicationError after the timeout or on a mismatch.
Connection connect_ranks(const ShmOptions& options);

std::string seconds_text(std::chrono::milliseconds time);

// One message with file descriptors over a sequenced-packet socket. `keep_waiting` is called once a slice while the
// socket is not ready and throws to give up.
void send_message(const FileDescriptor& socket, std::span<const std::byte> message, std::span<const int> descriptors,
                  const std::function<void()>& keep_waiting);
struct Message {
  std::vector<std::byte> bytes;  // empty: the other side closed the connection
  std::vector<FileDescriptor> descriptors;
};
Message receive_message(const FileDescriptor& socket, const std::function<void()>& keep_waiting);

}  // namespace zb::shm
