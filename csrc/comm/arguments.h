// Checks of what callers hand to the communicators.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "comm/buffer.h"
#include "comm/communicator.h"

namespace zb {

// "all_gather of 'h.3'"
std::string operation_text(std::string_view name, std::string_view label);

// What a source, or a buffer that is reduced or broadcast in place, must lie in.
enum class SourceRule : std::uint8_t {
  kRegistered,  // any buffer
  kShared,      // a zb::Buffer with BufferRole::kShared
  kParts,       // such a one with parts of all ranks: peers read it where it lies
};

// The communicator that checks.
struct Caller {
  int rank = 0;
  int world_size = 1;
  SourceRule source_rule = SourceRule::kShared;
  bool takes_pushes = false;
};

// All throw ArgumentError. What they return is the buffer that peers read, null for SourceRule::kRegistered; a
// communicator of the same ranks may have allocated it.
std::shared_ptr<Buffer> check_all_gather(const Caller& caller, const AllGather& args);
std::shared_ptr<Buffer> check_reduce_scatter(const Caller& caller, const ReduceScatter& args);
void check_push(const Caller& caller, const Push& args);
std::shared_ptr<Buffer> check_all_reduce(const Caller& caller, const AllReduce& args);
std::shared_ptr<Buffer> check_broadcast(const Caller& caller, const Broadcast& args);
void check_exchange(const Caller& caller, std::size_t mine_bytes, std::size_t all_bytes, std::string_view label);

}  // namespace zb
