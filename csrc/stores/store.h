// Stores: where the optimizer state of a flat buffer's shard lives, and how it is updated there.
//
// One store object per tier serves all flat buffers of an engine. Adding a tier means one new file here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "common/dtype.h"
#include "common/timeline.h"
#include "memory/ledger.h"
#include "memory/pinned_pool.h"
#include "optim/adam.h"
#include "optim/device_adam.h"
#include "partition/flat_layout.h"

namespace zb {

enum class StateKind : std::uint8_t { kMaster, kExpAvg, kExpAvgSq };

// What a store is told about one shard at setup.
struct ShardSpec {
  std::size_t numel = 0;
  DType param_dtype = DType::kFloat32;
  DType gradient_dtype = DType::kFloat32;
  std::vector<Segment> segments;  // relative to the shard
  std::string unit = {};          // its name, for who looks on
  // Where the parameters lie for good, which hold the rounding of the initial values: a store that takes remainders
  // keeps those of them instead of masters ([Note: remainders] in master_remainder.h). bfloat16; null for whole
  // masters.
  void* parameters = nullptr;
  bool is_frozen = false;  // parameters alone, never updated: only for a store that keeps frozen parameters
};

// Throws ArgumentError for segments that are out of order, outside the shard, or of no param group.
void check_segments(const ShardSpec& spec);

// A shard's reduced gradient in device memory.
struct ShardGradient {
  const void* data = nullptr;  // numel elements, not yet scaled
  DType dtype = DType::kFloat32;
  MarkPtr ready = nullptr;  // behind which it is there
};

// One update of one shard. Pointers are device memory, ready for `lane`, but for the scalars on the host. `rows`,
// `segments` and the list of pieces need not outlive the call; all else stays as it is until the shard's update was
// waited for.
struct ShardUpdate {
  Lane lane = Lane::kCompute;      // that the update is put into, or starts behind
  const void* gradient = nullptr;  // numel elements, reduced, not yet scaled
  DType gradient_dtype = DType::kFloat32;
  // Or instead, where the store takes pieces: what lies in none of them is padding.
  std::span<const FlatPiece> gradient_pieces = {};
  // The shard's parameters in param_dtype, which are the master where the store keeps none. Null where they are fetched
  // from the store (fetch_parameters) instead.
  void* parameters = nullptr;
  std::span<const AdamScalars> rows;  // by segment row; grad_factor is not read
  // Instead of the shard's own: what lies in none of them keeps its values and states.
  const std::vector<Segment>* segments = nullptr;
  const StepScalars* step = nullptr;
  const StepScalars* step_on_host = nullptr;  // the same in pinned memory
  MarkPtr step_arrived = nullptr;             // behind which they are there
  std::size_t turn = 0;  // smaller: its parameters are expected to be awaited earlier in the next forward
};

// The segments that an update of a shard with such `own` ones updates.
inline const std::vector<Segment>& segments_of(const ShardUpdate& update, const std::vector<Segment>& own) {
  return update.segments == nullptr ? own : *update.segments;
}

// Throws ArgumentError where a segment of an update of `shard` names a row that the update lacks.
void check_rows(std::size_t shard, std::span<const Segment> segments, std::size_t row_num);

// What a store in files has moved since it was made.
struct SwapStats {
  std::uint64_t read_bytes = 0;
  std::uint64_t written_bytes = 0;
  double wait_s = 0;               // in which updates waited for transfers
  std::string engine;              // what moves it; empty where nothing swaps
  std::vector<std::string> notes;  // what runs otherwise than asked for
};

// What a store moved between device and host since it was made.
struct StoreTraffic {
  std::uint64_t to_host_bytes = 0;
  std::uint64_t to_device_bytes = 0;
};

// [Note: updates that are issued later]
// A store whose updates run on host threads cannot put them into a lane at once. Its start_update only begins one, and
// wait_update blocks the host until what is left of it stands in a lane. So the engine waits as late as it can: when a
// unit is first used after the step. A store whose updates are issued at once never blocks there.
//
// Calls come from one thread at a time. The destructor returns when nothing of the store is under way any more.
class Store {
 public:
  virtual ~Store() = default;
  virtual Tier tier() const noexcept = 0;
  // Whether start_update puts the whole update into its lane.
  virtual bool issues_at_once() const noexcept { return true; }
  // Whether updates take gradients in pieces (ShardUpdate::gradient_pieces).
  virtual bool takes_pieces() const noexcept { return false; }
  // Whether the store holds a master of parameters of this dtype. Else they are fp32 and their own master.
  virtual bool keeps_master(DType param_dtype) const noexcept { return param_dtype != DType::kFloat32; }

  // Whether the store is the home of frozen parameters, too (ShardSpec::is_frozen). They have no state:
  // fetch_parameters reads them, write_state(kMaster) gives them other values.
  virtual bool keeps_frozen() const noexcept { return false; }

  // Whether ShardSpec::parameters may be given.
  virtual bool takes_remainders() const noexcept { return false; }

  // What has ended its updates for good, since state that is half one step and half the next serves nobody; or null.
  virtual std::exception_ptr failure() const { return nullptr; }
  // Where it records what it does, and under which unit's name (ShardSpec::unit). Before any update.
  virtual void set_timeline(Timeline* timeline) { static_cast<void>(timeline); }
  // Of all updates so far, whose end it waits for, and that of all transfers of files.
  virtual StoreTraffic traffic() { return {}; }
  // How long callers were blocked for updates since the store was made.
  virtual double waited_ms() const { return 0.0; }
  // Of that, while the updates themselves waited for files.
  virtual double waited_for_files_ms() const { return 0.0; }
  // Of its pinned memory on the host, as asked for and as taken.
  virtual PinnedStats pinned() const { return {}; }
  // Elements that one stage of its pipeline works on, once shards are reserved; 0 where there is no pipeline.
  virtual std::size_t chunk_numel() const { return 0; }

  // Every shard that will be added, in order: what takes memory at once may check that it is there. Before a barrier of
  // the ranks, so that no rank takes memory while another still looks.
  virtual void reserve(std::span<const ShardSpec> shards) { static_cast<void>(shards); }
  // Registers a shard whose parameters currently hold `initial` (numel floats of device memory, the fp32 values before
  // any rounding, read in the compute lane). Returns the shard's index.
  virtual std::size_t add_shard(const ShardSpec& spec, std::span<const float> initial) = 0;

  // The shard's gradient for the next update is there: what the store wants to do before the norm is known may begin.
  // It stays as it is until that update was waited for, or drop_gradients was called.
  virtual void offer_gradient(std::size_t shard, const ShardGradient& gradient) {
    static_cast<void>(shard);
    static_cast<void>(gradient);
  }
  // No update follows on the gradients that were offered: what is put into `lane` later may write where they lie.
  virtual void drop_gradients(Lane lane) { static_cast<void>(lane); }

  // Starts an update, behind the last one of the shard. Whatever reads the shard's parameters stands before the lane's
  // present point.
  virtual void start_update(std::size_t shard, const ShardUpdate& update) = 0;
  // The same for several shards, in one lane and by the same scalars, in as few pieces of work as the store can.
  virtual void start_updates(std::span<const std::pair<std::size_t, ShardUpdate>> updates) {
    for (const auto& [shard, update] : updates) start_update(shard, update);
  }
  // Whether wait_update would not block, nor fetch_parameters of what the store brings ahead of its use.
  virtual bool is_issued(std::size_t shard) const {
    static_cast<void>(shard);
    return true;
  }
  // What is put into `lane` later sees what the last update made of the parameters, and may write to its gradient. May
  // block the host until the update was issued.
  virtual void wait_update(std::size_t shard, Lane lane) = 0;

  // Writes the shard's parameters as the last update (or write_state) left them, rounded to nearest even, into numel
  // elements of device memory, in this lane. Only where the store keeps a master. May block like wait_update.
  virtual void fetch_parameters(std::size_t shard, Lane lane, void* destination) = 0;

  // Copies a state out of or into the store (numel floats of device memory), in the compute lane and behind the last
  // update. kMaster where the store keeps none raises StateError: read the parameters. Of remainders it needs the
  // parameters as the last update left them to be read, and the rounding of what is written to be there.
  virtual void read_state(std::size_t shard, StateKind kind, std::span<float> destination) = 0;
  // States of all shards will be written: what takes memory for them may check that it is there, before a barrier of
  // the ranks as with reserve.
  virtual void expect_states() {}
  virtual void write_state(std::size_t shard, StateKind kind, std::span<const float> source) = 0;

  virtual SwapStats swap_stats() const { return {}; }

  // See [Note: a share chosen late] in trial_store.h. Whether it is yet to be chosen, before the first update.
  virtual bool awaits_share() const noexcept { return false; }
  // Chooses it and looks for the memory that it takes, before a barrier of the ranks as with reserve; take_share then
  // moves the state there. The shards keep their numbers.
  virtual void choose_share(double host_share);
  virtual void take_share();
};

std::unique_ptr<Store> make_device_store(Ledger* ledger, const DeviceParts& parts);
// The same with a master of fp32 parameters, too.
std::unique_ptr<Store> make_device_store_with_masters(Ledger* ledger, const DeviceParts& parts);

}  // namespace zb
