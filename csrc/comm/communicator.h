// Communicators: collectives over registered buffers, as pairs of start and wait.
//
// Rules that hold for every kind:
// - All ranks make the same calls in the same order with the same sizes (allocate with a shared role, start_*, barrier,
//   exchange). A mismatch that is noticed raises CommunicationError on every rank.
// - `start_*` returns at once; the operation may run later, inside `Work::test`, `Work::wait`, `progress` or on a
//   thread or stream of the communicator. Operations of one communicator complete in the order they were started.
// - A buffer named as source may be written again once `source_free`; a destination is readable after `wait`.
// - Where the device works in lanes (kernels/device.h), an operation is put into the communicator's own lane: sources
//   and destinations must be ready for that lane, and `wait` and `wait_source_free` hold back a lane, not the caller.
// - Reductions give the same bits on all ranks and in every stage. On CPU they add in rank order in float and round
//   once to the element type; NCCL adds in an order of its own, which depends on sizes and its configuration alone.
// - After an error the communicator is poisoned: later calls raise the original cause.
// - Calls come from one thread at a time (the engine serialises them).
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/dtype.h"
#include "common/error.h"
#include "kernels/device.h"
#include "memory/ledger.h"

namespace zb {

// Who touches a registered buffer besides its owner.
enum class BufferRole : std::uint8_t {
  kShared,       // peers may read it (a source of collectives); allocation is collective
  kPrivate,      // only this rank touches it (a destination); allocation is local
  kSharedAlone,  // shared, and alone in its pages: of communicators that splice
};

// Memory that collectives may name. Zero-filled at creation, aligned to 256 bytes or more. Destruction is local and
// waits for no peer: peers' views stay valid until they drop theirs.
class RegisteredBuffer {
 public:
  virtual ~RegisteredBuffer() = default;
  RegisteredBuffer(const RegisteredBuffer&) = delete;
  RegisteredBuffer& operator=(const RegisteredBuffer&) = delete;

  std::byte* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return bytes_; }
  virtual bool is_on_device() const noexcept { return false; }  // the host must not touch it

 protected:
  RegisteredBuffer() = default;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// A place in a registered buffer.
struct Region {
  std::shared_ptr<RegisteredBuffer> buffer;
  std::size_t offset_bytes = 0;

  std::byte* data() const noexcept { return buffer->data() + offset_bytes; }
  Region at(std::size_t more_bytes) const { return {buffer, offset_bytes + more_bytes}; }
  explicit operator bool() const noexcept { return buffer != nullptr; }
};

// A started collective. Destroying an unfinished handle does not cancel it. Operations in lanes are ready for `test` as
// soon as they are started.
class Work {
 public:
  virtual ~Work() = default;
  virtual bool test() = 0;  // makes progress without blocking; true once the destination is readable after a wait
  // The destination is readable for what comes after in this lane; on CPU, blocks. Raises the operation's error.
  virtual void wait(Lane reader = Lane::kCompute) = 0;
  virtual bool test_source_free() = 0;  // true once no peer reads this rank's source any more; never blocks
  // The source may be written by what comes after in this lane; on CPU, blocks.
  virtual void wait_source_free(Lane writer = Lane::kCompute) = 0;
};
using WorkPtr = std::shared_ptr<Work>;

// Time that a rank which stopped has to go on before its peers give it up.
inline constexpr std::chrono::milliseconds kReturnTime{600};
// The stop number of a rank that never goes on, such as one whose process ends.
inline constexpr std::uint32_t kStopsForGood = UINT32_MAX;

// A rank that has not put an operation into its lane.
struct AbsentPeer {
  int rank = 0;
  // Stands between the rank and the operation in an error ("left during", "raised ValueError (...) and did not come
  // to"). Empty where the rank may still put the operation in.
  std::string how;
};

enum class Collective : std::uint8_t { kAllGather, kReduceScatter, kAllReduce, kBroadcast, kExchange, kBarrier };
inline constexpr std::size_t kCollectiveNum = 6;
std::string_view collective_name(Collective collective) noexcept;

// Bytes are what the algorithm moves per rank by the usual accounting: (n-1)/n of the full buffer for all_gather and
// reduce_scatter, 2(n-1)/n for all_reduce, the buffer for broadcast, (n-1) messages for exchange.
struct CommunicationCounters {
  std::array<std::uint64_t, kCollectiveNum> calls{};
  std::array<std::uint64_t, kCollectiveNum> bytes{};
};

struct AllGather {
  Region source;       // shard_bytes of this rank
  Region destination;  // world_size * shard_bytes in rank order; source may be its own slice of it
  std::size_t shard_bytes = 0;
  std::string_view label;  // names the unit in errors; must outlive the operation
  // Where the communicator gathers_final_shards(): all ranks' sources are final by now, and stay until the ranks have
  // met behind this operation. So they do not meet for it, and other ranks need not start it. `wait_source_free` tells
  // of this rank alone, and the caller puts this rank's own part into the destination.
  bool is_final = false;
  // The destination's slice of this rank is the source's memory ([Note: spliced slots] in spliced_slot.h).
  bool holds_own_part = false;
};

struct ReduceScatter {
  Region source;       // world_size * shard_numel elements
  Region destination;  // shard_numel elements; may be this rank's slice of source
  std::size_t shard_numel = 0;
  DType dtype = DType::kFloat32;
  std::string_view label;
  bool is_pushed = false;  // the source holds what all ranks pushed into it for this rank
};

// A rank's contribution to the next reduce_scatter of `source`, which is then no source but where the peers push theirs
// to. `items` are what would be written there, all of it. Large ones for this rank's own shard may stay where they are:
// all must until the reduction has read them.
struct Push {
  Region source;  // world_size * shard_numel elements, shared
  std::size_t shard_numel = 0;
  DType dtype = DType::kFloat32;
  std::string_view label;
  std::span<const PackItem> items;
  std::size_t copy_bytes = 0;  // items from this size on are copied, the others are packed by a kernel
};

struct AllReduce {
  Region buffer;  // in place
  std::size_t numel = 0;
  DType dtype = DType::kFloat32;
  std::string_view label;
};

struct Broadcast {
  Region buffer;  // in place
  std::size_t bytes = 0;
  int root = 0;
  std::string_view label;
};

class SplicedSlot;

class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const noexcept { return rank_; }
  int world_size() const noexcept { return world_size_; }
  virtual std::string_view kind() const noexcept = 0;
  // Whether started operations advance while the caller computes (a stream or thread of their own). Where they do not,
  // the engine waits in step() instead of behind the next forward.
  virtual bool runs_in_background() const noexcept = 0;

  // Whether all_gathers of final shards need no meeting.
  virtual bool gathers_final_shards() const noexcept { return false; }

  // Throws OutOfMemoryError. `ledger` may be null.
  virtual std::shared_ptr<RegisteredBuffer> allocate(std::size_t bytes, BufferRole role, Ledger* ledger,
                                                     Category category) = 0;
  // Whether it makes spliced slots (spliced_slot.h).
  virtual bool splices() const noexcept { return false; }
  virtual std::unique_ptr<SplicedSlot> make_spliced_slot(Ledger* ledger, Category category);
  // The lane that operations are put into.
  virtual Lane lane() const noexcept { return Lane::kCompute; }
  // Operations started between the two may be put in together, when the group ends; their handles may be waited for
  // from then on.
  virtual void begin_group() {}
  virtual void end_group() {}
  virtual WorkPtr start_all_gather(const AllGather& args) = 0;
  virtual WorkPtr start_reduce_scatter(const ReduceScatter& args) = 0;
  // Whether contributions may be pushed: put where they are reduced, instead of where peers read them.
  virtual bool takes_pushes() const noexcept { return false; }
  // Put in at once, ordered as an operation would be, and followed by the reduce_scatter of the same source that
  // is_pushed. From the operation before until that one has ended nobody but the communicator touches the source, but
  // for this rank's own slice.
  virtual void push(const Push& args);
  virtual WorkPtr start_all_reduce(const AllReduce& args) = 0;
  virtual WorkPtr start_broadcast(const Broadcast& args) = 0;
  virtual void barrier(std::string_view label) = 0;
  // Control plane: every rank gives `bytes_per_rank` bytes of host memory and receives those of all in rank order.
  // Blocking. Meant for small messages (bytes to kilobytes).
  virtual void exchange(std::span<const std::byte> mine, std::span<std::byte> all, std::string_view label) = 0;
  // The same, but the caller goes on: `all` is written, and errors are raised, by the handle's wait. Both messages must
  // stay until then, or as long as the handle. One such exchange at most may be unfinished.
  virtual WorkPtr start_exchange(std::span<const std::byte> mine, std::span<std::byte> all, std::string_view label);
  // Advances started operations as far as possible without blocking.
  virtual void progress() = 0;
  // While a call on this communicator blocks, `other` is advanced too, so that a rank that waits here still serves
  // peers there. Both connect the same ranks and are used by one thread at a time. Of use where operations do not run
  // in the background; elsewhere it does nothing.
  virtual void serve_while_blocked(Communicator& other) { static_cast<void>(other); }
  // Poisons the communicator on every rank with this reason; blocked peers wake up and raise. Idempotent, and callable
  // from any thread.
  virtual void abort(std::string_view reason) noexcept = 0;
  // Tells the peers that this rank has stopped taking part: `why` follows its name ("raised ValueError (...)"). One
  // that waits for it raises that once it has had kReturnTime to go on, unless it has stopped as often itself.
  // `stop_num` is how often this rank has since the ranks last met. Nothing where a kind cannot tell. Both from any
  // thread.
  virtual void stop(std::string_view why, std::uint32_t stop_num) noexcept {
    static_cast<void>(why);
    static_cast<void>(stop_num);
  }
  // This rank takes part again.
  virtual void go_on(std::uint32_t stop_num) noexcept { static_cast<void>(stop_num); }
  // Of a communicator that controls a lane: tells the peers how many operations that wait for peers this rank has put
  // into the lane so far. Nothing where a kind cannot tell.
  virtual void tell_put_in(std::uint64_t num) noexcept { static_cast<void>(num); }
  // Returns a peer that has put in fewer than `num`, one that will never put in more before one that may. None where a
  // kind cannot tell. From any thread.
  virtual std::optional<AbsentPeer> absent_peer(std::uint64_t num) {
    static_cast<void>(num);
    return std::nullopt;
  }
  // The original cause, once this communicator is poisoned; by a peer too, where a kind can tell. From any thread.
  virtual std::optional<CommunicationError> poisoned() const noexcept = 0;

  const CommunicationCounters& counters() const noexcept { return counters_; }
  void reset_counters() noexcept { counters_ = {}; }

 protected:
  Communicator(int rank, int world_size) : rank_(rank), world_size_(world_size) {}
  void count(Collective collective, std::uint64_t full_bytes) noexcept;

 private:
  int rank_;
  int world_size_;
  CommunicationCounters counters_;
};

// Puts the operations started in its lifetime in together.
class CollectiveGroup {
 public:
  explicit CollectiveGroup(Communicator& communicator) : communicator_(communicator) { communicator_.begin_group(); }
  CollectiveGroup(const CollectiveGroup&) = delete;
  CollectiveGroup& operator=(const CollectiveGroup&) = delete;
  ~CollectiveGroup() noexcept(false) {
    try {
      communicator_.end_group();
    } catch (...) {
      if (std::uncaught_exceptions() == exceptions_) throw;  // else the first error is the one to report
    }
  }

 private:
  Communicator& communicator_;
  int exceptions_ = std::uncaught_exceptions();
};

}  // namespace zb
