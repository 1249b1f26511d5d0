#include "comm/nccl_communicator.h"

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "comm/cuda_paced_transport.h"
#include "comm/cuda_ranks.h"
#include "comm/lane_communicator.h"
#include "comm/nccl_transport.h"
#include "comm/peer_processes.h"
#include "comm/text.h"
#include "common/interrupts.h"

namespace zb {
namespace {

using Clock = std::chrono::steady_clock;

// What ranks tell each other before NCCL connects them. Plain bytes.
struct Greeting {
  RankDevice device;
  int nccl_version = 0;
  ncclUniqueId id{};  // of rank 0
};

Greeting own_greeting(Device& device, int rank) {
  Greeting greeting;
  greeting.device = RankDevice::own(device);
  check_nccl(ncclGetVersion(&greeting.nccl_version), "ncclGetVersion");
  if (rank == 0) check_nccl(ncclGetUniqueId(&greeting.id), "ncclGetUniqueId");
  return greeting;
}

std::vector<RankDevice> devices_of(const std::vector<Greeting>& greetings) {
  std::vector<RankDevice> devices;
  for (const Greeting& greeting : greetings) devices.push_back(greeting.device);
  return devices;
}

// The same on all ranks, so that all of them raise.
void check_greetings(const std::vector<Greeting>& greetings) {
  for (std::size_t rank = 1; rank < greetings.size(); ++rank) {
    const Greeting& greeting = greetings[rank];
    if (greeting.nccl_version != greetings[0].nccl_version) {
      throw CommunicationError("rank 0 runs NCCL " + std::to_string(greetings[0].nccl_version) + " and rank " +
                                   std::to_string(rank) + " " + std::to_string(greeting.nccl_version) +
                                   "; install one version of torch for all ranks",
                               static_cast<int>(rank));
    }
  }
  check_one_rank_a_gpu(devices_of(greetings));
}

std::vector<Greeting> exchange_greetings(Communicator& control, const Greeting& mine) {
  std::vector<Greeting> all(static_cast<std::size_t>(control.world_size()));
  control.exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)), "NCCL setup");
  check_greetings(all);
  return all;
}

void connect_transport(NcclTransport& transport, Communicator& control, const PeerProcesses& processes,
                       const ncclUniqueId& id, std::chrono::milliseconds timeout) {
  const Clock::time_point deadline = Clock::now() + timeout;
  SignalWatch signals;
  transport.connect(control.rank(), control.world_size(), id, [&] {
    signals.look();
    if (const auto cause = control.poisoned()) throw CommunicationError(*cause);
    if (const auto dead = processes.dead()) {
      throw CommunicationError("rank " + std::to_string(*dead) + " died while NCCL connected the ranks", *dead);
    }
    if (Clock::now() >= deadline) {
      throw CommunicationError("rank " + std::to_string(control.rank()) + " waited " + seconds_text(timeout) +
                                   " for NCCL to connect the ranks",
                               -1);
    }
  });
}

void connect(NcclBuffers buffers, const std::shared_ptr<DeviceLink>& link, LaneOptions& options) {
  ::setenv("NCCL_NVLS_ENABLE", "0", 1);
  Communicator& control = *options.control;
  auto transport = std::make_unique<NcclTransport>(options.device, options.lane, buffers);
  const auto greetings = exchange_greetings(control, own_greeting(*options.device, control.rank()));
  options.processes = watch_processes(control, devices_of(greetings), "NCCL setup");
  connect_transport(*transport, control, options.processes, greetings[0].id, options.timeout);
  options.transport = std::move(transport);
  if (link) {
    options.transport = make_paced_transport(std::move(options.transport), options.lane, control.world_size(), link);
  }
}

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(NcclOptions options) {
  LaneOptions lane;
  lane.kind = "nccl";
  lane.lane = options.lane;
  lane.timeout = options.timeout;
  lane.device = std::move(options.device);
  lane.control = std::move(options.control);
  return make_connected_communicator(
      std::move(lane), [&](LaneOptions& unconnected) { connect(options.buffers, options.link, unconnected); });
}

}  // namespace zb
