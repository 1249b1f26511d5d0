// What a host store of given shards takes of pinned memory, and how a budget of it is spent.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "stores/host_store.h"
#include "stores/paged_parameters.h"

namespace zb {

// Buffers for what leaves for the device: one being filled, one being sent, and one more, so that neither waits for the
// other's last moments.
inline constexpr std::size_t kOutgoingNum = 3;
std::size_t outgoing_numel(std::span<const ShardSpec> shards, std::size_t chunk_numel);

std::size_t host_store_bytes(std::span<const ShardSpec> shards, const HostStoreOptions& options);

// Puts into the options what stays in memory of what lies in files, as their memory_bytes allow, and what parameters
// are read ahead into where that is open: the largest shard, or half of what is left. Throws OutOfMemoryError where
// memory_bytes do not hold what cannot swap.
void spend_host_memory(std::span<const ShardSpec> shards, HostStoreOptions& options);

// What of the shards lies in files, and how.
std::vector<std::size_t> numels_of(std::span<const ShardSpec> shards);
std::vector<ParameterShard> parameters_of(std::span<const ShardSpec> shards);
PagedStateOptions pages_of_parameters(const HostStoreOptions& options);

}  // namespace zb
