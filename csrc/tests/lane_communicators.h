// Communicators in a lane, with threads as ranks and threads as lanes.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "comm/lane_communicator.h"
#include "comm/shm_communicator.h"
#include "comm/solo_communicator.h"
#include "comm/solo_transport.h"
#include "lane_support.h"
#include "rank_threads.h"

namespace zb::test::lanes {

using namespace std::chrono_literals;

inline std::unique_ptr<Communicator> host_communicator(int rank, int world_size, const std::string& rendezvous) {
  return make_shm_communicator({.rank = rank, .world_size = world_size, .rendezvous = rendezvous, .timeout = 30s});
}

using RankBody = std::function<void(int rank, std::unique_ptr<Communicator> control)>;

// Threads as ranks; rethrows what the first failed one threw.
inline void run_ranks(int world_size, const RankBody& body) {
  const std::string rendezvous = unique_rendezvous();
  rethrow_first(run_rank_threads(
      world_size, [&](int rank) { body(rank, host_communicator(rank, world_size, rendezvous + "-control")); }));
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

inline LaneOptions options_of(std::shared_ptr<Device> device, std::unique_ptr<LaneTransport> transport,
                              std::unique_ptr<Communicator> control, std::chrono::milliseconds timeout = 30s) {
  LaneOptions options;
  options.kind = "test";
  options.timeout = timeout;
  options.device = std::move(device);
  options.transport = std::move(transport);
  options.control = std::move(control);
  return options;
}

// A communicator that moves no data between ranks.
inline std::unique_ptr<Communicator> solo(const std::shared_ptr<Device>& device,
                                          std::unique_ptr<Communicator> control = make_solo_communicator()) {
  return make_lane_communicator(
      options_of(device, std::make_unique<SoloTransport>(device, Lane::kGather), std::move(control)));
}

// A communicator whose operations never end by themselves.
inline std::unique_ptr<Communicator> stuck(std::unique_ptr<Communicator> control,
                                           std::chrono::milliseconds timeout = 30s, const std::string& failure = "",
                                           PeerProcesses processes = {}) {
  const auto device = std::make_shared<ThreadDevice>();
  auto transport = std::make_unique<StuckTransport>(device, Lane::kGather);
  if (!failure.empty()) transport->fail_when_used(failure);
  LaneOptions options = options_of(device, std::move(transport), std::move(control), timeout);
  options.processes = std::move(processes);
  return make_lane_communicator(std::move(options));
}

// Collectives of real data between two ranks whose lanes are threads.
inline void run_lanes(const std::function<void(Communicator&, ThreadDevice&)>& body) {
  const std::string rendezvous = unique_rendezvous();
  run_ranks(2, [&](int rank, std::unique_ptr<Communicator> control) {
    const auto device = std::make_shared<ThreadDevice>();
    auto transport =
        std::make_unique<HostTransport>(device, Lane::kGather, host_communicator(rank, 2, rendezvous + "-data"));
    const auto comm = make_lane_communicator(options_of(device, std::move(transport), std::move(control)));
    body(*comm, *device);
    comm->barrier("end");
  });
}

inline Region region(Communicator& comm, std::size_t bytes, Ledger* ledger = nullptr) {
  return {comm.allocate(bytes, BufferRole::kPrivate, ledger, Category::kStaging), 0};
}

inline float* floats(const Region& region) { return reinterpret_cast<float*>(region.data()); }

inline AllGather gather_of(const Region& full, int rank, std::size_t shard_bytes, std::string_view label) {
  return {full.at(static_cast<std::size_t>(rank) * shard_bytes), full, shard_bytes, label};
}

inline std::string raised_by(Communicator& comm, std::chrono::milliseconds within = 10s) {
  const auto deadline = std::chrono::steady_clock::now() + within;
  while (!comm.poisoned() && std::chrono::steady_clock::now() < deadline) std::this_thread::sleep_for(5ms);
  return communication_error([&] { comm.progress(); });
}

}  // namespace zb::test::lanes
