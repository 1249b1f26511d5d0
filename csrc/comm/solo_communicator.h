// The shm communicator of a world of one rank: every operation is a local copy that is finished when it starts.
#pragma once

#include <memory>

#include "comm/communicator.h"

namespace zb {

std::unique_ptr<Communicator> make_solo_communicator();

}  // namespace zb
