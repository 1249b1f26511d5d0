// Any torch.distributed process group (gloo, MPI, UCC, ...) behind the Communicator interface.
#pragma once

#include <memory>
#include <string>

#include "comm/communicator.h"

namespace zb {

// `group_name` is ProcessGroup.group_name of a live CPU process group of this process.
std::unique_ptr<Communicator> make_c10d_communicator(const std::string& group_name);

}  // namespace zb
