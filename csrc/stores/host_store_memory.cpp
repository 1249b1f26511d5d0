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
      kOutgoingNum * PinnedPool::footprint_bytes(outgoing_numel(shards, chunk_numel_of(options)) * sizeof(float));
  if (options.paged) {
    bytes += PinnedPool::footprint_bytes(
        paged_state_bytes(state_numels_of(shards), chunk_numel_of(options), *options.paged));
  }
  if (options.parameters == ParameterHome::kFiles) {
    bytes += PinnedPool::footprint_bytes(
        paged_parameters_bytes(parameters_of(shards), chunk_numel_of(options), pages_of_parameters(options)));
  }
  for (const ShardSpec& spec : shards) {
    if (!options.paged) bytes += resident_state_bytes(state_numel(spec));
    bytes += lines(state_numel(spec) * dtype_bytes(spec.gradient_dtype));
    if (options.parameters == ParameterHome::kHost) bytes += lines(spec.numel * dtype_bytes(spec.param_dtype));
  }
  return bytes;
}

namespace {

constexpr std::size_t kStateBytes = 3 * sizeof(float);  // of an element
constexpr std::size_t kPageBytes = 4096;                // of files
constexpr std::size_t kLeastNumel = 64;                 // of which a chunk is a multiple
constexpr std::size_t kCostDivisor = 20;  // of what a step moves where all swaps, what larger chunks may cost

// What is left of memory_bytes goes to parameters first: a step moves their bytes three times, those of the state
// twice. False, with nothing spent, where they do not hold what cannot swap.
bool spend(std::span<const ShardSpec> shards, HostStoreOptions& options) {
  const std::size_t chunk_numel = chunk_numel_of(options);
  const bool pages_parameters = options.parameters == ParameterHome::kFiles;
  const std::size_t largest_bytes =
      pages_parameters ? largest_paged_shard_bytes(parameters_of(shards), chunk_numel, *options.paged) : 0;
  if (!options.memory_bytes && !options.ahead_parameter_bytes) options.ahead_parameter_bytes = largest_bytes;
  if (!options.paged || !options.memory_bytes) return true;
  const std::size_t least_bytes = host_store_bytes(shards, options);
  if (*options.memory_bytes < least_bytes) return false;
  std::size_t bytes = *options.memory_bytes - least_bytes;
  if (pages_parameters) {
    const std::size_t most_bytes =
        most_paged_parameters_bytes(parameters_of(shards), chunk_numel, pages_of_parameters(options));
    std::size_t ahead_bytes = 0;  // given ones are among the least
    if (!options.ahead_parameter_bytes && bytes < most_bytes) ahead_bytes = std::min(bytes / 2, largest_bytes);
    options.ahead_parameter_bytes = options.ahead_parameter_bytes.value_or(0) + ahead_bytes;
    options.resident_parameter_bytes = std::min(bytes - ahead_bytes, most_bytes);
    bytes -= options.resident_parameter_bytes + ahead_bytes;
  }
  options.paged->resident_bytes = bytes;
  return true;
}

// [Note: size of chunks]
std::size_t choose_chunk_numel(std::span<const ShardSpec> shards, const HostStoreOptions& options) {
  if (!options.paged || !options.memory_bytes) return kChunkNumel;
  struct Choice {
    std::size_t numel;
    std::size_t moved_bytes;
  };
  std::vector<Choice> choices;  // that fit, largest first
  const std::size_t request_numel = least_chunk_numel(shards, options, options.paged->engine.block_bytes);
  const std::size_t least_numel = least_chunk_numel(shards, options, kPageBytes);
  for (std::size_t numel = kChunkNumel; numel >= least_numel; numel /= 2) {
    if (numel < request_numel && !choices.empty()) break;
    HostStoreOptions tried = options;
    tried.chunk_numel = numel;
    if (spend(shards, tried)) choices.push_back({numel, swap_traffic_bytes(shards, tried)});
  }
  if (choices.empty()) return least_numel;
  std::size_t whole_bytes = 0;
  for (const ShardSpec& spec : shards) {
    whole_bytes += 2 * kStateBytes * state_numel(spec);
    if (options.parameters == ParameterHome::kFiles) whole_bytes += 3 * spec.numel * dtype_bytes(spec.param_dtype);
  }
  const std::size_t best_bytes = std::ranges::min(choices, {}, &Choice::moved_bytes).moved_bytes;
  return std::ranges::find_if(
             choices,
             [&](const Choice& choice) { return choice.moved_bytes <= best_bytes + whole_bytes / kCostDivisor; })
      ->numel;
}

}  // namespace

std::size_t chunk_numel_of(const HostStoreOptions& options) { return options.chunk_numel.value_or(kChunkNumel); }

std::size_t least_chunk_numel(std::span<const ShardSpec> shards, const HostStoreOptions& options,
                              std::size_t path_bytes) {
  if (!options.paged) return kChunkNumel;
  std::size_t element_bytes = kStateBytes;
  if (options.parameters == ParameterHome::kFiles) {
    for (const ShardSpec& spec : shards) element_bytes = std::min(element_bytes, dtype_bytes(spec.param_dtype));
  }
  const std::size_t least_bytes = path_bytes * options.paged->directories.size();
  std::size_t numel = kChunkNumel;
  while (numel > kLeastNumel && numel / 2 * element_bytes >= least_bytes) numel /= 2;
  return numel;
}

std::size_t swap_traffic_bytes(std::span<const ShardSpec> shards, const HostStoreOptions& options) {
  const std::size_t chunk_numel = chunk_numel_of(options);
  std::size_t bytes = 2 * swapped_state_bytes(state_numels_of(shards), chunk_numel, *options.paged);
  if (options.parameters == ParameterHome::kFiles) {
    bytes += 3 * swapped_parameters_bytes(parameters_of(shards), chunk_numel, pages_of_parameters(options));
  }
  return bytes;
}

void spend_host_memory(std::span<const ShardSpec> shards, HostStoreOptions& options) {
  const bool is_open = !options.chunk_numel;
  if (is_open) options.chunk_numel = choose_chunk_numel(shards, options);
  if (spend(shards, options)) return;
  throw OutOfMemoryError("gradients and buffers of state on NVMe take " +
                         memory_text(host_store_bytes(shards, options)) +
                         " of a rank's host memory, of which the budget allows " + memory_text(*options.memory_bytes) +
                         "; give a larger one (host_memory_bytes of a rank, --host-memory-gib of all ranks)" +
                         (is_open ? "" : ", leave out chunk_numel") +
                         ", have fewer bytes in flight (io_depth, io_block_bytes), or use more ranks");
}

std::vector<std::size_t> state_numels_of(std::span<const ShardSpec> shards) {
  std::vector<std::size_t> numels;
  for (const ShardSpec& spec : shards) numels.push_back(state_numel(spec));
  return numels;
}

std::vector<ParameterShard> parameters_of(std::span<const ShardSpec> shards) {
  std::vector<ParameterShard> parameters;
  for (const ShardSpec& spec : shards) parameters.push_back({spec.numel, spec.param_dtype, spec.is_frozen});
  return parameters;
}

PagedStateOptions pages_of_parameters(const HostStoreOptions& options) {
  PagedStateOptions pages = *options.paged;
  pages.resident_bytes = options.resident_parameter_bytes;
  pages.ahead_bytes = options.ahead_parameter_bytes.value_or(0);
  return pages;
}

}  // namespace zb
