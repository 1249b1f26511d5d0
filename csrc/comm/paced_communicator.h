// A communicator of host memory whose operations take the time that a slower link would need.
#pragma once

#include <memory>

#include "comm/communicator.h"
#include "comm/paced_link.h"

namespace zb {

// `inner` runs the operations by these algorithms; a caller waits for one until it has come over `link` too.
std::unique_ptr<Communicator> make_paced_communicator(std::unique_ptr<Communicator> inner, Algorithms algorithms,
                                                      std::shared_ptr<PacedLink> link);

}  // namespace zb
