#include "comm/cuda_peer_communicator.h"

#include <cuda_runtime.h>

#include <array>
#include <cstdlib>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/cuda_peer_link.h"
#include "comm/cuda_ranks.h"
#include "comm/cuda_shared_memory.h"
#include "comm/lane_communicator.h"
#include "comm/or_abort.h"
#include "comm/peer_transport.h"
#include "common/cuda_check.h"
#include "common/error.h"
#include "common/interrupts.h"

namespace zb {
namespace {

// The lane that reduces holds pieces of this size; in the other only rare small reductions run.
constexpr std::size_t kScratchBytes = std::size_t{64} << 20U;
constexpr std::size_t kSmallScratchBytes = std::size_t{2} << 20U;
// Fewer hardware queues make streams share one, and a lane that waits for a peer would hold up what the peer waits for.
constexpr long kQueueMin = 8;
constexpr const char* kLabel = "peer setup";
constexpr std::size_t kPeerTrialBytes = 4096;
constexpr Lane kTrialLane = Lane::kGather;
constexpr std::chrono::seconds kTrialTime{5};

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
  if (ordinal == device.ordinal()) return {};  // ranks that share a GPU
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
std::string first_obstacle(Communicator& control, const std::string& own) {
  Obstacle mine;
  own.copy(mine.text.data(), mine.text.size() - 1);
  std::vector<Obstacle> all(static_cast<std::size_t>(control.world_size()));
  control.exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)), kLabel);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].text[0] != '\0') return "on rank " + std::to_string(rank) + " " + all[rank].text.data();
  }
  return {};
}

// Does what all ranks do; where it fails on one, all of them get to know why.
template <typename Body>
std::string obstacle_in(Communicator& control, const Body& body) {
  std::string text;
  try {
    body();
  } catch (const CommunicationError&) {
    throw;
  } catch (const Interrupted&) {
    throw;
  } catch (const std::exception& error) {
    text = error.what();
  }
  return first_obstacle(control, text);
}

// A copy from a peer must hold what the peer wrote, and a copy to it must arrive there.
void copy_once(CudaDevice& device, CudaPeerLink& link, const PeerMemory& memory) {
  const auto pattern_of = [](int rank) {
    return std::vector<std::byte>(kPeerTrialBytes, std::byte{static_cast<unsigned char>(rank + 1)});
  };
  const std::shared_ptr<std::byte> copies =
      device.allocate(kPeerTrialBytes * static_cast<std::size_t>(link.world_size()), "a trial of peer access");
  device.upload(memory.of(link.rank()), pattern_of(link.rank()).data(), kPeerTrialBytes);
  const auto copy_of = [&](int peer) { return copies.get() + static_cast<std::size_t>(peer) * kPeerTrialBytes; };
  const auto pushed_by = [&](int rank) { return static_cast<std::size_t>(1 + rank) * kPeerTrialBytes; };
  link.announce();
  link.await();
  for (int peer = 0; peer < link.world_size(); ++peer) {
    if (peer == link.rank()) continue;
    device.copy(kTrialLane, copy_of(peer), memory.of(peer), kPeerTrialBytes);
    device.copy(kTrialLane, memory.of(peer) + pushed_by(link.rank()), memory.of(link.rank()), kPeerTrialBytes);
  }
  link.announce();
  link.await();
  const auto deadline = std::chrono::steady_clock::now() + kTrialTime;
  bool is_late = false;
  while (!link.is_idle()) {
    is_late = is_late || std::chrono::steady_clock::now() >= deadline;
    if (is_late) link.release();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (is_late) throw CudaError("the self-test of peer memory failed: flags of peers did not arrive", cudaErrorTimeout);
  for (int peer = 0; peer < link.world_size(); ++peer) {
    if (peer == link.rank()) continue;
    std::vector<std::byte> found(kPeerTrialBytes);
    device.download(found.data(), copy_of(peer), kPeerTrialBytes);
    if (found != pattern_of(peer)) {
      throw CudaError(
          "the self-test of peer memory failed: a copy from rank " + std::to_string(peer) + " delivered wrong bytes",
          cudaErrorUnknown);
    }
    device.download(found.data(), memory.of(link.rank()) + pushed_by(peer), kPeerTrialBytes);
    if (found != pattern_of(peer)) {
      throw CudaError(
          "the self-test of peer memory failed: a copy by rank " + std::to_string(peer) + " delivered wrong bytes",
          cudaErrorUnknown);
    }
  }
}

std::vector<RankDevice> meet(CudaDevice& device, Communicator& control) {
  const RankDevice mine = RankDevice::own(device);
  std::vector<RankDevice> ranks(static_cast<std::size_t>(control.world_size()));
  control.exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(ranks)), kLabel);
  return ranks;
}

// Asks the devices, then tries memory, meetings and copies once.
std::string obstacle_among(const std::vector<RankDevice>& ranks, const std::shared_ptr<CudaDevice>& device,
                           Communicator& control, std::chrono::milliseconds timeout) {
  std::string text = first_obstacle(control, obstacle_of(*device, control.rank(), ranks));
  if (!text.empty()) return text;
  std::unique_ptr<CudaPeerLink> link;
  std::shared_ptr<PeerMemory> memory;
  const std::size_t trial_bytes = kPeerTrialBytes * (1 + ranks.size());  // a rank's own, and what each pushes there
  text = obstacle_in(control, [&] {
    link = std::make_unique<CudaPeerLink>(device, kTrialLane, control, timeout, std::make_shared<MemoryOverhead>());
  });
  if (text.empty()) {
    text = obstacle_in(control, [&] { memory = link->allocate(trial_bytes, "a trial of peer access"); });
  }
  if (text.empty()) text = obstacle_in(control, [&] { copy_once(*device, *link, *memory); });
  return text;
}

void connect(const std::shared_ptr<CudaDevice>& device, LaneOptions& options) {
  Communicator& control = *options.control;
  const std::vector<RankDevice> ranks = meet(*device, control);
  if (ranks.size() > 1) {
    const std::string obstacle = obstacle_among(ranks, device, control, options.timeout);
    ZB_EXPECT(obstacle.empty(), "communicator 'peer' cannot be used: " + obstacle);
  }
  options.processes = watch_processes(control, ranks, kLabel);
  options.overhead = std::make_shared<MemoryOverhead>();
  auto link = std::make_unique<CudaPeerLink>(device, options.lane, control, options.timeout, options.overhead);
  options.transport = std::make_unique<PeerTransport>(
      device, options.lane, std::move(link), options.lane == Lane::kReduce ? kScratchBytes : kSmallScratchBytes);
  control.barrier(kLabel);  // all have their scratch
}

}  // namespace

std::string peer_obstacle(const std::shared_ptr<CudaDevice>& device, Communicator& control,
                          std::chrono::milliseconds timeout) {
  if (control.world_size() == 1) return {};
  return or_abort(control, [&] {
    const std::vector<RankDevice> ranks = meet(*device, control);
    check_one_rank_a_gpu(ranks);
    return obstacle_among(ranks, device, control, timeout);
  });
}

std::unique_ptr<Communicator> make_peer_communicator(PeerOptions options) {
  const std::shared_ptr<CudaDevice> device = std::move(options.device);
  LaneOptions lane;
  lane.kind = "peer";
  lane.lane = options.lane;
  lane.timeout = options.timeout;
  lane.device = device;
  lane.control = std::move(options.control);
  return make_connected_communicator(std::move(lane), [&](LaneOptions& unconnected) { connect(device, unconnected); });
}

}  // namespace zb
