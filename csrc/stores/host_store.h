// The host store: optimizer state in pinned host memory, updated by the CPU's Adam (see [Note: host pipeline]).
//
// [Note: host pipeline]
// A shard's gradient leaves for the host in a lane of its own as soon as it is reduced, under backward. One thread runs
// the updates in the order in which they are started, chunk by chunk: it waits for the chunk's gradient (and, once a
// step, for the scalars), runs Adam, which leaves the new parameters in one of a few outgoing buffers, and puts their
// copy to the device into another lane. So the copies of one chunk run beside the Adam of the next, and an outgoing
// buffer that is still being sent is what bounds the pipeline. The values are those of the device store, bit for bit.
// Parameters whose home is the host are written where they stay instead, and sent when they are fetched.
// Where the state lies in files, borrowing a chunk of it waits for what is not yet read; all else is the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "memory/pinned_pool.h"
#include "stores/paged_state.h"
#include "stores/state_space.h"
#include "stores/store.h"
#include "stores/update_thread.h"

namespace zb {

enum class ParameterHome : std::uint8_t { kDevice, kHost, kFiles };

struct HostStoreOptions {
  std::size_t thread_num = 1;  // of Adam
  std::vector<int> cpus = {};  // as ThreadPool takes them
  int numa_node = kAnyNode;
  PageLock lock = PageLock::kNone;
  std::size_t ranks_on_host = 1;  // that take as much memory at the same time
  // A multiple of 64. None: chosen when shards are reserved, see [Note: size of chunks].
  std::optional<std::size_t> chunk_numel = {};
  // kHost, kFiles: shards of parameters lie there, too, and are fetched from the store before each gather. kFiles needs
  // paged state, whose paths they share.
  ParameterHome parameters = ParameterHome::kDevice;
  std::optional<PagedStateOptions> paged = {};  // the state lies in files
  System* system = &kernel_system();            // that moves them
  std::size_t resident_parameter_bytes = 0;     // of paged parameters, that never swap
  // For paged parameters that are read ahead beyond the engine's depth; none: the largest shard, or what of it
  // memory_bytes leave.
  std::optional<std::size_t> ahead_parameter_bytes = {};
  // Of pinned memory in all; paged parameters, then paged state, stay in what is left of it beside gradients and
  // buffers. None: all swaps.
  std::optional<std::size_t> memory_bytes = {};
  UpdatesRun updates_run = UpdatesRun::kInThread;
  std::shared_ptr<DeviceAdam> adam = nullptr;  // of host memory; null: make_cpu_adam
};

std::unique_ptr<Store> make_host_store(Ledger* ledger, const DeviceParts& parts, HostStoreOptions options);

}  // namespace zb
