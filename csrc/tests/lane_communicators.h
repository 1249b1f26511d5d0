// Communicators in a lane, with threads as ranks and threads as lanes.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "comm/lane_communicator.h"
#include "comm/solo_communicator.h"
#include "thread_device.h"

namespace zb::test::lanes {

using namespace std::chrono_literals;

std::unique_ptr<Communicator> host_communicator(int rank, int world_size, const std::string& rendezvous);

using RankBody = std::function<void(int rank, std::unique_ptr<Communicator> control)>;

// Threads as ranks; rethrows what the first failed one threw.
void run_ranks(int world_size, const RankBody& body);

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

LaneOptions options_of(std::shared_ptr<Device> device, std::unique_ptr<LaneTransport> transport,
                       std::unique_ptr<Communicator> control, std::chrono::milliseconds timeout = 30s);

// A communicator that moves no data between ranks.
std::unique_ptr<Communicator> solo(const std::shared_ptr<Device>& device,
                                   std::unique_ptr<Communicator> control = make_solo_communicator());

// A communicator whose operations never end by themselves.
std::unique_ptr<Communicator> stuck(std::unique_ptr<Communicator> control, std::chrono::milliseconds timeout = 30s,
                                    const std::string& failure = "", PeerProcesses processes = {});

// Collectives of real data between two ranks whose lanes are threads.
void run_lanes(const std::function<void(Communicator&, ThreadDevice&)>& body);

Region region(Communicator& comm, std::size_t bytes, Ledger* ledger = nullptr);

inline float* floats(const Region& region) { return reinterpret_cast<float*>(region.data()); }

AllGather gather_of(const Region& full, int rank, std::size_t shard_bytes, std::string_view label);

std::string raised_by(Communicator& comm, std::chrono::milliseconds within = 10s);

}  // namespace zb::test::lanes
