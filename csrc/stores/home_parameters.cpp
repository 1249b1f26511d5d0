#include "stores/home_parameters.h"

#include <utility>

#include "stores/host_store_memory.h"

namespace zb {

HomeParameters::HomeParameters(const HostStoreOptions& options, std::span<const ShardSpec> shards, PinnedPool& pool,
                               std::shared_ptr<Device> device, HostLink& link, Ledger* ledger)
    : device_(std::move(device)), link_(link), pool_(pool) {
  if (options.parameters != ParameterHome::kFiles) return;
  const std::vector<ParameterShard> parameters = parameters_of(shards);
  const PagedStateOptions pages = pages_of_parameters(options);
  frames_ = pool_.allocate(paged_parameters_bytes(parameters, chunk_numel_of(options), pages), Category::kStaging);
  const std::span<std::byte> frames{frames_.data(), frames_.bytes()};
  paged_ = std::make_unique<PagedParameters>(parameters, chunk_numel_of(options), pages, frames, device_, ledger,
                                             *options.system);
}

void HomeParameters::add_shard(const ShardSpec& spec) {
  Shard shard{.dtype = spec.param_dtype, .unit = spec.unit, .memory = {}, .fetches = {}};
  if (!paged_) {
    shard.memory =
        pool_.allocate(spec.numel * dtype_bytes(spec.param_dtype), Category::kParameters, PinnedPool::kLineAlignment);
  }
  shards_.push_back(std::move(shard));
}

void HomeParameters::fetch(std::size_t index, Lane lane, void* destination) {
  Shard& shard = shards_.at(index);
  if (paged_) {
    fetch_from_files(index, lane, static_cast<std::byte*>(destination));
  } else {
    link_.to_device(lane, destination, shard.memory.data(), shard.memory.bytes());
  }
  shard.fetches[static_cast<std::size_t>(lane)] = device_->mark_for_host(lane);
}

void HomeParameters::fetch_from_files(std::size_t index, Lane lane, std::byte* destination) {
  const TimelineScope recorded(timeline_, "computing thread", "wait for files", shards_[index].unit);
  const double before_s = paged_->stats().wait_s;
  try {
    paged_->fetch(index, [&](std::size_t offset_bytes, std::span<const std::byte> chunk) {
      link_.to_device(lane, destination + offset_bytes, chunk.data(), chunk.size());
      return device_->mark_for_host(lane);
    });
  } catch (const std::exception&) {
    failure_ = std::current_exception();
    throw;
  }
  waited_ms_ += (paged_->stats().wait_s - before_s) * 1e3;
}

void HomeParameters::begin_update(std::size_t index) {
  if (paged_) paged_->begin_update(index);
}

void HomeParameters::end_fetches(std::size_t index, const Fetches& fetches) {
  for (const MarkPtr& mark : fetches) device_->synchronize(mark);
  if (paged_) paged_->release(index);
}

void HomeParameters::write(std::size_t index, std::size_t begin, const Fill& fill) {
  if (paged_) return paged_->write(index, begin, fill);
  const Shard& shard = shards_.at(index);
  fill(shard.memory.data() + begin * dtype_bytes(shard.dtype));
}

}  // namespace zb
