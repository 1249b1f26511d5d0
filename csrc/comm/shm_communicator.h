// Ranks of one host on CPU: shared memory by memfd, futexes, reductions in rank order in vector code.
//
// Nothing has a name in a file system: buffers are memfds passed over sockets, the meeting point is an abstract Unix
// socket that rank 0 holds only while ranks connect. Dead peers are noticed through pidfds, stuck ones by the timeout;
// both poison the communicator on every rank. Operations run lazily in the caller's thread (test, wait, progress):
// a peer's memory is read where it lies, with no copy into a mailbox.
//
// [Note: in place] Peers read a source from its start until `source_free`, so
// - sources, and the buffers of all_reduce and broadcast, must be kShared, of any shm communicator of the same ranks;
// - all_gather whose source is its own slice of the destination copies the slices of the peers only;
// - reduce_scatter whose destination is its own slice of the source is right, since peers read other slices. The other
//   slices may be overwritten after wait_source_free only;
// - a source that an unfinished operation is still to write is refused (StateError).
//
// A world of one rank needs no socket and no thread: operations are finished when they start. A forked child may drop
// an inherited communicator, but not call it. Work that outlives its communicator raises StateError, unless all that it
// is asked is whether it has ended, and it had.
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
