// What moves the data of a LaneCommunicator: collectives put into a device's lane.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.h"
#include "kernels/device.h"

namespace zb {

struct LaneCall {
  Collective kind{};
  const std::byte* source = nullptr;
  std::byte* destination = nullptr;
  std::size_t num = 0;  // bytes of all_gather (a shard) and broadcast, elements of reductions (of a shard)
  DType dtype{};        // of reductions
  int root = 0;
  bool is_final = false;        // of all_gather (communicator.h)
  bool is_pushed = false;       // of reduce_scatter
  bool holds_own_part = false;  // of all_gather
};

// The memory of a spliced slot (spliced_slot.h).
class SplicedMemory {
 public:
  struct Part {
    const std::byte* own = nullptr;  // null: all of it is the slot's
    std::size_t shard_bytes = 0;
  };

  virtual ~SplicedMemory() = default;
  SplicedMemory() = default;
  SplicedMemory(const SplicedMemory&) = delete;
  SplicedMemory& operator=(const SplicedMemory&) = delete;

  // SplicedSlot::destinations.
  virtual std::vector<std::shared_ptr<std::byte>> destinations(std::span<const Part> parts) = 0;
  virtual std::size_t bytes() const noexcept = 0;  // of the slot by now
};

class LaneTransport {
 public:
  virtual ~LaneTransport() = default;
  LaneTransport() = default;
  LaneTransport(const LaneTransport&) = delete;
  LaneTransport& operator=(const LaneTransport&) = delete;

  // The role matters where peers read each other's memory.
  virtual std::shared_ptr<std::byte> allocate(std::size_t bytes, BufferRole role, std::string_view what) = 0;
  // What must be the same on all ranks about where a call's data lies. Throws ArgumentError for memory that peers
  // cannot read.
  virtual std::uint64_t place_of(const LaneCall& call) const {
    static_cast<void>(call);
    return 0;
  }
  // Communicator::gathers_final_shards.
  virtual bool gathers_final_shards() const noexcept { return false; }
  // Communicator::takes_pushes and push. `call` is the reduce_scatter to come, which has no destination yet.
  virtual bool takes_pushes() const noexcept { return false; }
  virtual void push(const LaneCall& call, std::span<const PackItem> items, std::size_t copy_bytes) {
    static_cast<void>(call), static_cast<void>(items), static_cast<void>(copy_bytes);
    throw StateError("this transport does not support pushes");
  }
  // Communicator::splices and make_spliced_slot.
  virtual bool splices() const noexcept { return false; }
  virtual std::unique_ptr<SplicedMemory> make_spliced_memory(std::string_view what) {
    static_cast<void>(what);
    throw StateError("this transport does not support spliced slots");
  }
  // Puts all calls into the lane, as one group. Throws when that fails, and after abort().
  virtual void put_in(std::span<const LaneCall> calls) = 0;

  // The rest is called by the watchdog's thread, beside put_in().
  virtual void enter_thread() {}
  // An error of operations that are under way, in words.
  virtual std::optional<std::string> failure() { return std::nullopt; }
  // Ends what is under way, so that whoever waits for the lane comes back. May take its time. False where more may be
  // needed, which another call then does.
  virtual bool abort() noexcept { return true; }
  // The orderly end, once all operations have passed.
  virtual void finish() noexcept {}
};

}  // namespace zb
