// Checks of what callers hand to the communicators whose buffers are zb::Buffer.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "comm/buffer.h"
#include "comm/communicator.h"

namespace zb {

// "all_gather of 'h.3'"
std::string operation_text(std::string_view name, std::string_view label);

// The communicator that checks.
struct Caller {
  int rank = 0;
  int world_size = 1;
  bool reads_parts = false;  // peers read sources where they lie, so these must be mapped by all ranks
};

// All throw ArgumentError. What they return is the buffer that peers read; a communicator of the same ranks may have
// allocated it.
std::shared_ptr<Buffer> check_all_gather(const Caller& caller, const AllGather& args);
std::shared_ptr<Buffer> check_reduce_scatter(const Caller& caller, const ReduceScatter& args);
std::shared_ptr<Buffer> check_all_reduce(const Caller& caller, const AllReduce& args);
std::shared_ptr<Buffer> check_broadcast(const Caller& caller, const Broadcast& args);
void check_exchange(const Caller& caller, std::size_t mine_bytes, std::size_t all_bytes, std::string_view label);

}  // namespace zb
