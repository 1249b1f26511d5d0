#include "stores/host_store_memory.h"

#include <algorithm>
#include <string>

#include "common/error.h"
#include "memory/host_limits.h"

namespace zb {

std::size_t outgoing_numel(std::span<const ShardSpec> shards, std::size_t chunk_numel) {
  std::size_t largest = 0;
  for (const ShardSpec& spec : shards) largest = std::max(largest, spec.numel);
  return std::min(largest, chunk_numel);
}

std::size_t host_store_bytes(std::span<const ShardSpec> shards, const HostStoreOptions& options) {
  const auto lines = [](std::size_t bytes) { return PinnedPool::footprint_bytes(bytes, PinnedPool::kLineAlignment); };
  std::size_t bytes =
      kOutgoingNum * PinnedPool::footprint_bytes(outgoing_numel(shards, options.chunk_numel) * sizeof(float));
  if (options.paged) {
    bytes += PinnedPool::footprint_bytes(paged_state_bytes(numels_of(shards), options.chunk_numel, *options.paged));
  }
  if (options.parameters == ParameterHome::kFiles) {
    bytes += PinnedPool::footprint_bytes(
        paged_parameters_bytes(parameters_of(shards), options.chunk_numel, pages_of_parameters(options)));
  }
  for (const ShardSpec& spec : shards) {
    if (!options.paged) bytes += resident_state_bytes(spec.numel);
    bytes += lines(spec.numel * dtype_bytes(spec.gradient_dtype));
    if (options.parameters == ParameterHome::kHost) bytes += lines(spec.numel * dtype_bytes(spec.param_dtype));
  }
  return bytes;
}

// What is left goes to parameters first: a step moves their bytes three times, those of the state twice.
void spend_host_memory(std::span<const ShardSpec> shards, HostStoreOptions& options) {
  const bool pages_parameters = options.parameters == ParameterHome::kFiles;
  const std::size_t largest_bytes =
      pages_parameters ? largest_paged_shard_bytes(parameters_of(shards), options.chunk_numel, *options.paged) : 0;
  if (!options.memory_bytes && !options.ahead_parameter_bytes) options.ahead_parameter_bytes = largest_bytes;
  if (!options.paged || !options.memory_bytes) return;
  const std::size_t least_bytes = host_store_bytes(shards, options);
  if (*options.memory_bytes < least_bytes) {
    throw OutOfMemoryError("gradients and buffers of state on NVMe take " + memory_text(least_bytes) +
                           " of a rank's host memory, of which the budget allows " +
                           memory_text(*options.memory_bytes) +
                           "; give a larger one (host_memory_bytes of a rank, --host-memory-gib of all ranks), or use "
                           "more ranks");
  }
  std::size_t bytes = *options.memory_bytes - least_bytes;
  if (pages_parameters) {
    const std::size_t most_bytes =
        most_paged_parameters_bytes(parameters_of(shards), options.chunk_numel, pages_of_parameters(options));
    std::size_t ahead_bytes = 0;  // given ones are among the least
    if (!options.ahead_parameter_bytes && bytes < most_bytes) ahead_bytes = std::min(bytes / 2, largest_bytes);
    options.ahead_parameter_bytes = options.ahead_parameter_bytes.value_or(0) + ahead_bytes;
    options.resident_parameter_bytes = std::min(bytes - ahead_bytes, most_bytes);
    bytes -= options.resident_parameter_bytes + ahead_bytes;
  }
  options.paged->resident_bytes = bytes;
}

std::vector<std::size_t> numels_of(std::span<const ShardSpec> shards) {
  std::vector<std::size_t> numels;
  for (const ShardSpec& spec : shards) numels.push_back(spec.numel);
  return numels;
}

std::vector<ParameterShard> parameters_of(std::span<const ShardSpec> shards) {
  std::vector<ParameterShard> parameters;
  for (const ShardSpec& spec : shards) parameters.push_back({spec.numel, spec.param_dtype});
  return parameters;
}

PagedStateOptions pages_of_parameters(const HostStoreOptions& options) {
  PagedStateOptions pages = *options.paged;
  pages.resident_bytes = options.resident_parameter_bytes;
  pages.ahead_bytes = options.ahead_parameter_bytes.value_or(0);
  return pages;
}

}  // namespace zb
