#include "comm/peer_communicator.h"

#include <cuda_runtime.h>

#include <array>
#include <cstdlib>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/cuda_peer_link.h"
#include "comm/cuda_ranks.h"
#include "comm/cuda_shared_memory.h"
#include "comm/lane_communicator.h"
#include "comm/peer_transport.h"
#include "comm/solo_transport.h"
#include "common/cuda_check.h"
#include "common/error.h"

namespace zb {
namespace {

// The lane that reduces holds pieces of this size; in the other only rare small reductions run.
constexpr std::size_t kScratchBytes = std::size_t{64} << 20U;
constexpr std::size_t kSmallScratchBytes = std::size_t{2} << 20U;
// Fewer hardware queues make streams share one, and a lane that waits for a peer would hold up what the peer waits for.
constexpr long kQueueMin = 8;
constexpr const char* kLabel = "peer setup";

// Why a rank cannot take part; empty where it can. Plain bytes.
struct Obstacle {
  std::array<char, 512> text{};
};

std::string obstacle_of_queues() {
  const char* const text = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  if (text == nullptr || std::strtol(text, nullptr, 10) >= kQueueMin) return {};
  return std::string("CUDA_DEVICE_MAX_CONNECTIONS=") + text +
         " lets streams hold each other up; unset it, or use 'nccl'";
}

std::string obstacle_to(const CudaDevice& device, int peer, const RankDevice& theirs) {
  int ordinal = -1;
  if (cudaDeviceGetByPCIBusId(&ordinal, theirs.pci_bus_id.data()) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return "the GPU " + std::string(theirs.pci_bus_id.data()) + " of rank " + std::to_string(peer) +
           " is not visible here; make all GPUs of the host visible to all ranks, or use 'nccl'";
  }
  int can_access = 0;
  ZB_CUDA(cudaDeviceCanAccessPeer(&can_access, device.ordinal(), ordinal));
  if (can_access != 0) return {};
  return "cuda:" + std::to_string(device.ordinal()) + " has no peer access to the GPU " + theirs.pci_bus_id.data() +
         " of rank " + std::to_string(peer) + "; use 'nccl'";
}

std::string obstacle_of(CudaDevice& device, int rank, const std::vector<RankDevice>& ranks) {
  if (ranks.size() > kSumSourceMax) {
    return "it connects at most " + std::to_string(kSumSourceMax) + " ranks, not " + std::to_string(ranks.size()) +
           "; use 'nccl'";
  }
  for (std::size_t peer = 0; peer < ranks.size(); ++peer) {
    if (ranks[peer].process.host != ranks[0].process.host) {
      return "it connects GPUs of one host, and ranks 0 and " + std::to_string(peer) + " are on two; use 'nccl'";
    }
  }
  std::string text = obstacle_of_queues();
  if (text.empty()) text = sharing_obstacle(device);
  if (!text.empty()) return text;
  device.bind_thread();
  for (int peer = 0; peer < static_cast<int>(ranks.size()) && text.empty(); ++peer) {
    if (peer != rank) text = obstacle_to(device, peer, ranks[static_cast<std::size_t>(peer)]);
  }
  return text;
}

// The first obstacle of any rank is everybody's.
void check_obstacles(CudaDevice& device, Communicator& control, const std::vector<RankDevice>& ranks) {
  Obstacle mine;
  obstacle_of(device, control.rank(), ranks).copy(mine.text.data(), mine.text.size() - 1);
  std::vector<Obstacle> all(ranks.size());
  control.exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)), kLabel);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    ZB_EXPECT(all[rank].text[0] == '\0',
              "communicator 'peer' cannot be used on rank " + std::to_string(rank) + ": " + all[rank].text.data());
  }
}

LaneOptions connected(PeerOptions& options) {
  Communicator& control = *options.control;
  const RankDevice mine = RankDevice::own(*options.device);
  std::vector<RankDevice> ranks(static_cast<std::size_t>(control.world_size()));
  control.exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(ranks)), kLabel);
  check_one_rank_a_gpu(ranks);
  check_obstacles(*options.device, control, ranks);
  LaneOptions lane;
  lane.processes = watch_processes(control, ranks, kLabel);
  auto link = std::make_unique<CudaPeerLink>(options.device, options.lane, control, options.timeout);
  lane.transport = std::make_unique<PeerTransport>(options.device, options.lane, std::move(link),
                                                   options.lane == Lane::kReduce ? kScratchBytes : kSmallScratchBytes);
  control.barrier(kLabel);  // all have their scratch
  return lane;
}

}  // namespace

std::unique_ptr<Communicator> make_peer_communicator(PeerOptions options) {
  ZB_EXPECT(options.device != nullptr && options.control != nullptr,
            "the peer communicator needs a device and a control communicator");
  ZB_EXPECT(options.timeout.count() > 0, "the timeout must be positive");
  LaneOptions lane;
  if (options.control->world_size() == 1) {
    lane.transport = std::make_unique<SoloTransport>(options.device, options.lane);
  } else {
    try {
      lane = connected(options);
    } catch (const std::exception& error) {
      options.control->abort(error.what());  // or the peers would wait for this rank until their timeout
      throw;
    }
  }
  lane.kind = "peer";
  lane.lane = options.lane;
  lane.timeout = options.timeout;
  lane.device = std::move(options.device);
  lane.control = std::move(options.control);
  return make_lane_communicator(std::move(lane));
}

}  // namespace zb
