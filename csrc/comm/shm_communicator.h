// Ranks of one host on CPU: shared memory by memfd, futexes, reductions in rank order in vector code.
//
// Nothing has a name in a file system: buffers are memfds passed over sockets, the meeting point is an abstract Unix
// socket that rank 0 holds only while ranks connect. Dead peers are noticed through pidfds, stuck ones by the timeout;
// both poison the communicator on every rank. Operations run lazily in the caller's thread (test, wait, progress):
// a peer's memory is read where it lies, with no copy into a mailbox.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "comm/communicator.h"

namespace zb {

struct ShmOptions {
  int rank = 0;
  int world_size = 1;
  std::string rendezvous;  // the same unique text on all ranks; becomes the abstract socket's name
  std::chrono::milliseconds timeout{300'000};
};

// Blocks until all ranks are connected. Throws CommunicationError after the timeout, naming the ranks that are missing.
std::unique_ptr<Communicator> make_shm_communicator(const ShmOptions& options);

}  // namespace zb
