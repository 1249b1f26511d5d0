// What a host store of given shards takes of pinned memory, and how a budget of it is spent. Comparisons are planned
// without the core, so python/zerobench/bench/swap/frames.py has the same for state and parameters in files, with the
// frames of paged_state.cpp and paged_parameters.cpp: change both. tests/unit/test_swap_plan.py holds them together.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "stores/host_store.h"
#include "stores/paged_parameters.h"

namespace zb {

// [Note: size of chunks]
// The pipeline works on chunks of so many elements. 4 Mi are 8 MiB of bf16, for which a transfer takes a hundred times
// as long as starting it, and a small share of any unit worth offloading. Buffers and frames are as large as a chunk,
// so where a budget has to hold them beside what stays of the state, chunks are halved until they fit and leave nearly
// as much in memory as any size would; but not below what makes whole requests of the I/O engine, one on every path,
// unless a budget holds no such chunks: then below, down to a page on every path. What is computed does not depend on
// it.
inline constexpr std::size_t kChunkNumel = std::size_t{4} << 20;

// Of the options, or kChunkNumel where they leave it open.
std::size_t chunk_numel_of(const HostStoreOptions& options);
// The least, of halves of kChunkNumel, of which every path gets so many bytes of the state and of paged parameters.
std::size_t least_chunk_numel(std::span<const ShardSpec> shards, const HostStoreOptions& options,
                              std::size_t path_bytes);

// Buffers for what leaves for the device: one being filled, one being sent, and one more, so that neither waits for the
// other's last moments.
inline constexpr std::size_t kOutgoingNum = 3;
std::size_t outgoing_numel(std::span<const ShardSpec> shards, std::size_t chunk_numel);

// Elements of each of its states, and of its gradient.
inline std::size_t state_numel(const ShardSpec& spec) { return spec.is_frozen ? 0 : spec.numel; }

std::size_t host_store_bytes(std::span<const ShardSpec> shards, const HostStoreOptions& options);

// Puts into the options the size of chunks where that is open, what stays in memory of what lies in files, as their
// memory_bytes allow, and what parameters are read ahead into where that is open: the largest shard, or half of what is
// left. Throws OutOfMemoryError where memory_bytes do not hold what cannot swap.
void spend_host_memory(std::span<const ShardSpec> shards, HostStoreOptions& options);

// What a step moves between files and memory, as far as memory is spent by then.
std::size_t swap_traffic_bytes(std::span<const ShardSpec> shards, const HostStoreOptions& options);

// What of the shards lies in files, and how.
std::vector<std::size_t> state_numels_of(std::span<const ShardSpec> shards);
std::vector<ParameterShard> parameters_of(std::span<const ShardSpec> shards);
PagedStateOptions pages_of_parameters(const HostStoreOptions& options);

}  // namespace zb
