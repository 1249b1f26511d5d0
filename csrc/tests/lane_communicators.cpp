#include "lane_communicators.h"

#include <thread>
#include <utility>

#include "comm/shm_communicator.h"
#include "comm/solo_transport.h"
#include "rank_threads.h"

namespace zb::test::lanes {

std::unique_ptr<Communicator> host_communicator(int rank, int world_size, const std::string& rendezvous) {
  return make_shm_communicator({.rank = rank, .world_size = world_size, .rendezvous = rendezvous, .timeout = 30s});
}

void run_ranks(int world_size, const RankBody& body) {
  const std::string rendezvous = unique_rendezvous();
  rethrow_first(run_rank_threads(
      world_size, [&](int rank) { body(rank, host_communicator(rank, world_size, rendezvous + "-control")); }));
}

LaneOptions options_of(std::shared_ptr<Device> device, std::unique_ptr<LaneTransport> transport,
                       std::unique_ptr<Communicator> control, std::chrono::milliseconds timeout) {
  LaneOptions options;
  options.kind = "test";
  options.timeout = timeout;
  options.device = std::move(device);
  options.transport = std::move(transport);
  options.control = std::move(control);
  return options;
}

std::unique_ptr<Communicator> solo(const std::shared_ptr<Device>& device, std::unique_ptr<Communicator> control) {
  return make_lane_communicator(
      options_of(device, std::make_unique<SoloTransport>(device, Lane::kGather), std::move(control)));
}

std::unique_ptr<Communicator> stuck(std::unique_ptr<Communicator> control, std::chrono::milliseconds timeout,
                                    const std::string& failure, PeerProcesses processes) {
  const auto device = std::make_shared<ThreadDevice>();
  auto transport = std::make_unique<StuckTransport>(device, Lane::kGather);
  if (!failure.empty()) transport->fail_when_used(failure);
  LaneOptions options = options_of(device, std::move(transport), std::move(control), timeout);
  options.processes = std::move(processes);
  return make_lane_communicator(std::move(options));
}

void run_lanes(const std::function<void(Communicator&, ThreadDevice&)>& body) {
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

Region region(Communicator& comm, std::size_t bytes, Ledger* ledger) {
  return {comm.allocate(bytes, BufferRole::kPrivate, ledger, Category::kStaging), 0};
}

AllGather gather_of(const Region& full, int rank, std::size_t shard_bytes, std::string_view label) {
  return {full.at(static_cast<std::size_t>(rank) * shard_bytes), full, shard_bytes, label};
}

std::string raised_by(Communicator& comm, std::chrono::milliseconds within) {
  const auto deadline = std::chrono::steady_clock::now() + within;
  while (!comm.poisoned() && std::chrono::steady_clock::now() < deadline) std::this_thread::sleep_for(5ms);
  return communication_error([&] { comm.progress(); });
}

}  // namespace zb::test::lanes
