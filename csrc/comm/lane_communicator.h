// A communicator whose operations run in a lane of a device. Control messages go over a communicator of host memory.
//
// `start_*` and `end_group` put operations into the lane and return; `wait` orders the reader's lane behind them and
// never blocks the host. Buffers of both roles are the same memory of the device, allocated without the peers. A
// watchdog ends operations that cannot end by themselves (watchdog.h); a mismatch is noticed by [Note:
// mismatched collectives] (collective_history.h).
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "comm/communicator.h"
#include "comm/lane_transport.h"
#include "comm/memory_overhead.h"
#include "comm/peer_processes.h"

namespace zb {

struct LaneOptions {
  std::string kind;
  Lane lane = Lane::kGather;
  std::chrono::milliseconds timeout{300'000};
  std::shared_ptr<Device> device;
  std::unique_ptr<LaneTransport> transport;
  std::unique_ptr<Communicator> control;  // names the ranks
  PeerProcesses processes;
  std::shared_ptr<MemoryOverhead> overhead;  // of shared buffers; null where there is none
};

std::unique_ptr<Communicator> make_lane_communicator(LaneOptions options);

// Collective. The same with what `connect` puts into the options: transport, processes, overhead. When it throws, the
// peers learn of it over the control communicator. A world of one rank is not connected, and makes copies.
std::unique_ptr<Communicator> make_connected_communicator(LaneOptions options,
                                                          const std::function<void(LaneOptions&)>& connect);

}  // namespace zb
