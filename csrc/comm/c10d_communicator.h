// Any torch.distributed process group (gloo, MPI, UCC, ...) behind the Communicator interface.
//
// Reductions add in the backend's order and precision, not in rank order in float: results agree across ranks, but
// their bits differ from those of the shm communicator. The timeout is that of the process group. A failure reaches
// peers when their own operation fails or times out; abort() also closes this rank's connections where the backend can.
#pragma once

#include <memory>
#include <string>

#include "comm/communicator.h"
#include "comm/peer_hosts.h"

namespace zb {

// `group_name` is ProcessGroup.group_name of a live CPU process group of this process. `hosts` make an error name
// the rank that does not answer; they may be null.
std::unique_ptr<Communicator> make_c10d_communicator(const std::string& group_name, std::shared_ptr<PeerHosts> hosts);

}  // namespace zb
