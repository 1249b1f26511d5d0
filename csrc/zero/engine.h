// The ZeRO engine of one rank: units, their gathers and reductions, and the optimizer step.
//
// Knows no torch: parameters come as ParameterBinding, gradients as pointers. Calls are serialised by a mutex; hooks
// call from autograd's threads. Collective calls (construction, forwards and backwards of stage 3, step, full states,
// gathers) must be made equally often on every rank; at stages 1 and 2 also the first forward after a step, where the
// store does not issue updates at once.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "common/error.h"
#include "common/interrupts.h"
#include "kernels/device_buffer.h"
#include "memory/ledger.h"
#include "optim/adam.h"
#include "optim/device_adam.h"
#include "stores/store.h"
#include "zero/clock.h"
#include "zero/entry.h"
#include "zero/gather_scheduler.h"
#include "zero/loss_scaler.h"
#include "zero/policy.h"
#include "zero/reduce_scheduler.h"
#include "zero/unit.h"

namespace zb {

struct EngineOptions {
  ZeroStage stage = ZeroStage::kZero0;
  long accumulation_steps = 1;
  double clip = 0.0;               // maximum global gradient norm; 0 is off
  std::size_t prefetch_bytes = 0;  // unsharded units started ahead of use
  bool default_prefetch = true;    // one largest non-root unit, instead of prefetch_bytes
  bool reshard_after_forward = true;
  // Stage 3 with low-precision parameters: their shards are kept beside the masters, instead of rounded before each
  // gather.
  bool keep_parameter_shards = false;
  // Masters of bfloat16 parameters are kept as what their roundings lack ([Note: remainders] in master_remainder.h).
  // Needs a store that takes them, and at stage 3 kept shards.
  bool store_param_remainders = false;
  // Stages 1 and 2 gather updated units together up to this size, since starting a collective costs the host more than
  // moving a few MiB.
  std::size_t publish_bytes = std::size_t{64} << 20;
  LossScaleOptions loss_scale;
  // Stage 3: up to this size the root unit stays unsharded between forward and backward.
  std::size_t keep_root_bytes = std::size_t{512} << 20;
  // Over a communicator that takes pushes: units that consist mostly of gradients of this size or more push them to the
  // ranks that reduce them, instead of packing them for those to read.
  std::size_t push_gradient_bytes = GradientPacker::kCopyBytes;
  // Stage 3, gathers of final shards: a unit's own parts are copied in the lane of reductions where they have this size
  // or more, else in the compute lane ([Note: final shards] in gather_scheduler.h, [Note: gathers of final shards] in
  // peer_transport.h).
  std::size_t own_part_beside_bytes = std::size_t{16} << 20;
  // Stage 3 over a communicator that splices: shards of this size or more are not copied into the slots that they are
  // gathered in ([Note: spliced slots] in spliced_slot.h).
  std::size_t splice_bytes = std::size_t{2} << 20;
  // Updates start in backward, as soon as a unit is reduced. Without clipping and loss scale.
  bool optimizer_in_backward = false;
  // Updates may run beside the next forward; else a step ends with the compute lane behind all of them.
  bool overlap_updates = true;
  // Memory for the compute lane and what is ordered with it, not zeroed: once its owner lets go, what is put into that
  // lane later may get it. Empty: the device's own memory.
  std::function<std::shared_ptr<std::byte>(std::size_t bytes)> allocate_in_compute = nullptr;
  // Where optimizer state lives.
  std::function<std::unique_ptr<Store>(Ledger*, const DeviceParts&)> make_store = make_device_store;
  // The store is the parameters' home (stage 3): nothing of them stays on the device between uses, on one rank either.
  bool parameters_away = false;
};

struct EngineModel {
  std::vector<std::string> unit_names;
  std::size_t root_unit = 0;
  // By unit: what an error tells to do where a forward uses it without a call of its module. May be empty.
  std::vector<std::string> unit_cures = {};
  std::vector<ParameterSpec> parameters;
  std::vector<std::unique_ptr<ParameterBinding>> bindings;  // one a parameter
  // Called before a unit's values are read, one unit at a time: gives values to parameters that have none yet. May be
  // empty.
  std::function<void(std::size_t unit)> materialise;
};

struct StepOutcome {
  bool applied = false;    // false: fp16 overflow, the update was skipped
  double grad_norm = 0.0;  // global, averaged and unscaled, before clipping; not finite when skipped
};

// What read_full_state can assemble.
enum class FullState : std::uint8_t { kParameters, kMaster, kExpAvg, kExpAvgSq };

// What a full state has beside its values.
struct FullStateFacts {
  long steps_applied = 0;
  std::optional<LossScaleState> loss_scale = {};  // none: the scale stays as the last step left it
};

// What write_gradients makes of a window's gradients. Values are averaged and unscaled, in device memory and for the
// compute lane.
struct GradientChange {
  int source_rank = -1;  // whose values become everybody's; -1: each rank fills in the same ones
  // Writes a parameter's values (row-major). Called on the source rank alone where there is one.
  std::function<void(std::size_t parameter, float* values)> fill = nullptr;
  // Puts new values into a piece of the sums that an update reads, where they differ from what is there.
  std::function<void(const float* values, void* sums, DType dtype, std::size_t numel)> merge = nullptr;
  std::vector<std::size_t> held = {};  // parameters that the step leaves alone, the same on all ranks
};

class Engine {
 public:
  // Takes rank 0's parameter values. Two communicators, so that gathers and reductions need no common order.
  Engine(const EngineOptions& options, EngineModel model, DeviceParts parts,
         std::unique_ptr<Communicator> gather_communicator, std::unique_ptr<Communicator> reduce_communicator);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Forward of the whole model; `train` when gradients are recorded.
  void begin_forward(bool train);
  void end_forward();
  // Instead of end_forward when an exception ended the forward. Collective like it; does nothing outside a forward.
  void abandon_forward();
  void pre_forward(std::size_t unit);
  // In a forward at stage 3 that uses the unit's parameters without a call of its module: gathers them now and, from
  // the next forward on, together with the root.
  void pre_forward_with_root(std::size_t unit);
  // Something has used the unit's parameters in this forward before its module is called. Throws StateError where the
  // last step's updates of them may be under way; from then on forwards wait for them at their beginning.
  void note_earlier_use(std::size_t unit);
  void post_forward(std::size_t unit);
  void pre_backward(std::size_t unit);
  // For units with frozen parameters, whose own gradients do not tell when they are needed no more: gradients towards
  // the inputs of a use are expected, and are there.
  void await_inputs(std::size_t unit);
  void inputs_done(std::size_t unit);

  // `groups` of the step that this backward ends, where the optimizer runs in backward.
  void begin_backward(bool last, std::span<const AdamHyperparameters> groups = {});
  // `graph_task` tells the backward from backwards inside it (reentrant checkpointing).
  // `owner` keeps the gradient's memory, which is ready for the compute lane, where the device works in lanes.
  void gradient_arrived(std::size_t parameter, const void* gradient, DType dtype, int graph_task,
                        std::shared_ptr<const void> owner = nullptr);
  void end_backward();
  void abort_backward();

  // A backward towards inputs, of an engine that trains nothing: gathers units again where parameters are sharded. Its
  // end does nothing where none has begun. Collective.
  void begin_input_backward();
  void end_input_backward();

  // One optimizer step with these hyperparameters by param group. Throws NonFiniteGradientError where no loss scale can
  // retry; the gradients are dropped then and the engine stays usable. Where the device works in lanes, this step's
  // outcome is not known yet when the call returns: the next step, or outcome(), waits for it and throws.
  // Where the optimizer runs in backward, the updates were started there, with its hyperparameters.
  void step(std::span<const AdamHyperparameters> groups);
  // Of the last step. Blocks until it is known.
  StepOutcome outcome();

  // Backwards whose gradients wait for a step.
  long window_backwards() const;
  // Whether a step may follow: the last of them was the accumulation boundary, or end_window() made it so.
  bool is_window_reduced() const { return reduces_->is_window_reduced(); }
  // Between the last backward of a window and its step. All are collective, and throw StateError at another moment.
  //
  // The global norm of the averaged and unscaled gradients, as the step would find it. Blocks until it is known.
  double gradient_norm();
  // Scales the gradients by min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ does; the norm before.
  double clip_gradients(double max_norm);
  // What a sum of gradients is multiplied with to average, unscale and clip it.
  float gradient_factor() const { return static_cast<float>(1.0 / gradient_divisor()); }
  // Calls `visit` with the full sums of every trainable parameter, in float, unit by unit.
  using VisitGradient = std::function<void(std::size_t parameter, float* sums)>;
  void read_gradients(const VisitGradient& visit);
  void write_gradients(const GradientChange& change);
  // Ends a window after fewer backwards than accumulation_steps: reduces what has come. Collective; nothing where the
  // window is empty or its last backward was the accumulation boundary.
  void end_window();
  // Forgets the gradients that wait for a step. Nothing where there are none.
  void drop_gradients();
  // Whether the store waits for place_state, which must come before the first step.
  bool awaits_share() const { return store_->awaits_share(); }
  // Chooses the share of optimizer state on the host, behind a backward: all but what fits on the device of every rank,
  // of which each gives its own. Returns the share. Collective.
  double place_state(double fitting_share);

  // Collective; calls `visit` with every parameter's values (row-major) in registration order of the flats, and keeps
  // nothing on the host of a rank that gives none. Frozen parameters have values and masters, but no moments.
  using VisitState = std::function<void(std::size_t parameter, const float* values)>;
  void read_full_state(FullState kind, const VisitState& visit);

  // The other way round: rank 0's values become everybody's, moments and facts included, and nothing stays of what the
  // engine was at, so that one that was torn goes on. `read` writes a parameter's values of a kind; frozen parameters
  // have no moments. Collective, and not inside a forward, backward or gather.
  using ReadState = std::function<void(FullState kind, std::size_t parameter, float* values)>;
  // `held_steps` by parameter, of rank 0; empty where none was held.
  void write_full_state(const FullStateFacts& facts, std::vector<std::int64_t> held_steps, const ReadState& read);
  // By parameter: applied steps that left it alone.
  std::vector<std::int64_t> held_steps();

  // Makes rank 0's bytes everybody's. Collective.
  void broadcast(std::byte* data, std::size_t bytes);
  // Every rank's message, one after the other; all are equally long. Collective.
  void exchange(std::span<const std::byte> mine, std::span<std::byte> all);

  // Outside of passes: lets the compute lane read parameters that are not sharded as the last step left them, where
  // that needs no other rank. False where it does: then a forward or gather() does it.
  bool try_wait_updates();
  // The same, whatever it takes. Collective.
  void await_all_updates();
  // Whether the last step's updates may be under way.
  bool is_updating() const {
    return std::any_of(units_.begin(), units_.end(), [](const Unit& unit) { return unit.is_updating; });
  }
  // `may_change` where the caller may end it with a modifier, then on all ranks.
  void gather(const std::vector<std::size_t>& units, bool may_change = true);
  // Ends a gather. With a modifier rank, that rank's values of the units become everybody's first.
  void end_gather(const std::vector<std::size_t>& units, int modifier_rank);

  // These wait for the last step's outcome where a loss scale makes it uncertain.
  double loss_scale() { return loss_scale_state().scale; }
  LossScaleState loss_scale_state();
  bool scales_loss() const { return scaler_.enabled(); }
  long steps_applied();
  // The native stream that the caller computes on from now on.
  void set_compute_stream(void* stream);
  Device& device() { return *parts_.device; }
  const Ledger& ledger() const { return ledger_; }
  Ledger& ledger() { return ledger_; }
  CommunicationCounters counters() const;
  void reset_counters();
  double communication_ms() const { return clock_.elapsed_ms(); }
  // Both since the engine was made; the first waits for updates that are under way.
  StoreTraffic store_traffic();
  double store_waited_ms();
  double store_waited_for_files_ms();
  PinnedStats store_pinned();
  std::size_t store_chunk_numel() const { return store_->chunk_numel(); }
  Timeline& timeline() { return timeline_; }
  const Unit& unit(std::size_t index) const { return units_[index]; }
  std::size_t unit_num() const { return units_.size(); }
  const Parameter& parameter(std::size_t index) const { return parameters_[index]; }
  StagePolicy policy() const { return policy_; }
  SwapStats swap_stats() const { return store_->swap_stats(); }
  std::size_t prefetch_bytes() const { return prefetch_bytes_; }
  int rank() const { return reduce_communicator_->rank(); }
  int world_size() const { return reduce_communicator_->world_size(); }
  bool has_frozen(std::size_t unit) const { return units_[unit].has_frozen(); }
  // Returns once no peer reads this rank's updated parameters any more, or the communicator has failed: before they are
  // written other than by the engine. Throws Interrupted, and StateError where a call is under way in this thread.
  void quiesce();
  // Wakes and fails the peers, when this rank cannot go on.
  void abort(const std::string& reason) noexcept;
  // Tells the peers that a call was left by an exception, or (`for_good`) that this rank ends: see Communicator::stop.
  // The next pass, step or other collective call goes on. From any thread.
  void stop(const std::string& why, bool for_good) noexcept;

 private:
  struct RankReport;
  // Where an update finds its step's scalars.
  struct StepPlaces {
    const StepScalars* on_device = nullptr;
    const StepScalars* on_host = nullptr;
    MarkPtr arrived = nullptr;
  };

  // Every call goes through here: one at a time, and none after communicators or store failed.
  template <typename Body>
  auto enter(const Body& body) -> decltype(body()) {
    return enter_torn([&] {
      if (is_torn_) throw_torn();
      return body();
    });
  }
  template <typename Body>
  auto enter_torn(const Body& body) -> decltype(body()) {
    const Entry::Scope inside(entry_);
    if (failure_) throw CommunicationError(*failure_);
    if (store_failure_) std::rethrow_exception(store_failure_);
    try {
      return body();
    } catch (const std::exception& error) {
      note(error);
      throw;
    }
  }
  // What all ranks do: the peers of one that fails at it alone wait for its part, and learn why it does not come.
  template <typename Body>
  auto or_abort(const Body& body) -> decltype(body()) {
    go_on();
    try {
      return body();
    } catch (const std::exception& error) {
      if (world_size() > 1 && !ends_engine(error)) abort(error.what());
      throw;
    }
  }
  // A part of a backward. One that fails on this rank alone is left, so that peers can end theirs.
  template <typename Body>
  void or_leave_backward(const Body& body) {
    try {
      body();
    } catch (const std::exception& error) {
      if (ends_engine(error)) {
        reduces_->drop_backward();
      } else {
        leave_failed_backward();
      }
      throw;
    }
  }
  // Whether no rank can go on behind it, which note() tells them.
  static bool ends_engine(const std::exception& error) noexcept;
  // An error of a call, which may be one that ends this rank's later calls, and those of the peers.
  void note(const std::exception& error);
  void fail(const CommunicationError& error) noexcept;
  // What later calls and the peers raise.
  CommunicationError cause_of(const Interrupted& interrupt) const;
  void fail_with_store() noexcept;
  void go_on() noexcept;
  void build(EngineModel& model);
  void build_unit(Unit& unit, EngineModel& model);
  void build_flat(FlatBuffer& flat);
  ShardSpec shard_spec(const FlatBuffer& flat) const;
  void reserve_store();
  void build_norms();
  void make_gradient_shards(Unit& unit);
  void end_open_forward();
  bool in_input_backward() const {
    return trainable_flats_.empty() && gathers_->in_pass() && gathers_->pass_kind() == PassKind::kBackward;
  }
  void use_root_in_backward();
  void leave_backward();
  void leave_failed_backward();
  void start_backward_range(Unit& unit);
  void end_pass_ranges() noexcept;
  void await_gathers_of_forward();
  void finish_backward_if_done(std::size_t unit);
  void check_bindings() const;
  void check_communicators() const;
  void exchange_reports(std::span<const AdamHyperparameters> groups);
  void finish_reports();
  [[noreturn]] void throw_other_window(int other, const RankReport& theirs, const RankReport& ours);
  WorkPtr put_in_norm();
  void combine_norm();
  double gradient_divisor() const {
    return static_cast<double>(world_size()) * static_cast<double>(window_backwards()) * scaler_.scale() /
           window_multiplier_;
  }
  void expect_whole_window(const char* what) const;
  void begin_window();
  std::vector<FlatPiece> own_gradients(const FlatBuffer& flat) const;
  std::vector<AdamScalars> make_rows(std::span<const AdamHyperparameters> groups, long step);
  void make_update_segments(FlatBuffer& flat, std::span<const AdamHyperparameters> groups, long step,
                            std::map<std::pair<int, long>, int>& row_of, std::vector<AdamScalars>& rows);
  void guard_updating();
  void unguard(Unit& unit);
  void wait_step();
  void expect_possible(std::span<const AdamHyperparameters> groups) const;
  [[noreturn]] void throw_torn() const;
  void expect_no_updates() const;
  void expect_not_updated(const Unit& unit) const;
  void expect_not_updating(const Unit& unit) const;
  void expect_not_gathered(const char* what) const;
  void open_forward(std::size_t unit, bool joins_root = false);
  void close_forward(std::size_t unit);
  [[noreturn]] static void throw_missed(const Unit& unit);
  bool updates_in_backward(bool last) const;
  void begin_updates(bool last, std::span<const AdamHyperparameters> groups);
  void on_reduced(Unit& unit);
  void start_updates_behind_peers();
  void start_update_in_backward(Unit& unit);
  void finish_updates_in_backward();
  void tear();
  void publish_updates();
  void release_gradients(Unit& unit);
  void release_passed_gradients();
  void offer_gradients(Unit& unit);
  void drop_offers();
  void update(std::span<const AdamHyperparameters> groups);
  void update_units(std::span<Unit> units, Lane lane, std::span<const AdamScalars> rows, const StepPlaces& step);
  void meet_behind_updates();
  void finish_where_nothing_runs_beside();
  void await_reads();
  void publish_small_together(std::size_t end);
  void publish_through(std::size_t unit);
  void publish_all();
  void publish_as_far(std::size_t end);
  void take_update_order();
  void publish_before(std::size_t end);
  void wait_updated(Unit& unit);
  void await_updates(std::size_t unit);
  void finish_updates();
  void drop_everything_under_way();
  void assemble_full_state(FullState kind, const VisitState& visit);
  void take_full_state(FullStateFacts facts, std::vector<std::int64_t> held_steps, const ReadState& read);
  void write_flat(FlatBuffer& flat, FullState kind, std::span<const float> on_host);
  void broadcast_bytes(std::byte* data, std::size_t bytes);
  void read_own_parameters(const FlatBuffer& flat, std::span<float> values);
  void write_back(Unit& unit, int modifier_rank);
  void write_back_flat(FlatBuffer& flat, const std::byte* values);
  void write_frozen(const FlatBuffer& flat, const std::byte* values);
  bool has_remainders(const FlatBuffer& flat) const {
    return options_.store_param_remainders && flat.trainable && flat.param_dtype == DType::kBFloat16;
  }
  // This rank's piece of a flat buffer, or all where state is replicated: what its store's shard updates.
  Region updated_parameters(const FlatBuffer& flat) const {
    return state_sharded() ? flat.shard_parameters : flat.full_parameters;
  }
  void remember_parameters(Unit& unit);
  void restore_parameters(Unit& unit) noexcept;
  bool parameters_sharded() const { return policy_.parameters == Placement::kSharded; }
  bool state_sharded() const { return policy_.state == Placement::kSharded; }
  std::byte* update_gradient(const FlatBuffer& flat) const {
    return (state_sharded() ? flat.shard_gradients : flat.full_gradients).data();
  }
  // [Note: gradients in place] (in_place_gradients.h).
  bool leaves_gradients_in_place() const {
    return world_size() == 1 && parts_.device->is_async() && options_.accumulation_steps == 1 && store_->takes_pieces();
  }
  // Gradients that updates read then live from reduction to update alone.
  bool makes_gradients_each_step() const {
    const bool shares_each = policy_.gradients == GradientPlacement::kShardedEachMicroBatch;
    return (shares_each && options_.accumulation_steps == 1) || leaves_gradients_in_place();
  }
  // Updates in backward follow gathers by no meeting of all ranks.
  std::optional<Lane> own_part_lane() const {
    const bool tracks_final = parameters_sharded() && world_size() > 1 && gather_communicator_->gathers_final_shards();
    return tracks_final && !options_.optimizer_in_backward ? std::optional(reduce_communicator_->lane()) : std::nullopt;
  }
  bool publishes() const { return state_sharded() && !parameters_sharded(); }
  // Sharded state is updated beside the next forward, whose units wait for their own parameters; so is what a store
  // does not issue at once. Elsewhere parameters stay readable right after a step.
  Lane update_lane() const {
    return state_sharded() || !store_->issues_at_once() ? reduce_communicator_->lane() : Lane::kCompute;
  }

  // The ranks' reports on a step. Where the device works in lanes they are read one step later, so that no rank's host
  // waits for another's.
  struct Reports {
    std::vector<std::byte> mine;
    std::vector<std::byte> all;
    WorkPtr work;  // null: none is under way
  };

  // [Note: the optimizer in backward]
  // A unit's update is put in behind its reduction. It changes parameters, so nothing of this backward may read them
  // any more. At stages 0 to 2 that holds when the unit is complete: the reduction stands behind all that was computed
  // by then. At stage 3 a peer may yet ask for a gather of the unit, unless it has brought its gradients too: there the
  // update is put in once the reduction has passed and peers have read the shard, which the host looks up when the next
  // units are reduced, and for what is left when the backward's gathers are over. The peers' updates cannot be taken
  // back, so an error from the first reduction on leaves the engine torn.
  struct BackwardUpdates {
    std::vector<AdamScalars> rows;
    float factor = 0.0F;  // that the scalars hold
    DeviceBuffer scalars;
    std::shared_ptr<std::byte> scalars_on_host;
    bool is_on = false;                             // from the backward to the end of its step
    bool has_begun = false;                         // something was reduced
    std::deque<std::pair<Unit*, MarkPtr>> reduced;  // and not updated; behind their reductions
    std::deque<std::pair<Unit*, MarkPtr>> updated;  // and with gradients yet to be freed; behind their updates
  };

  // What is left to learn of the last step: its scalars and the sums of its flats, on their way to the host.
  struct PendingStep {
    MarkPtr arrived;
    bool is_pending = false;
    bool was_in_backward = false;  // its updates were
  };

  EngineOptions options_;
  Entry entry_;
  std::optional<CommunicationError> failure_;  // the first one
  std::exception_ptr store_failure_;           // what ended the store
  Ledger ledger_;
  Timeline timeline_;
  CommunicationClock clock_{&timeline_};
  std::unique_ptr<Communicator> gather_communicator_;
  std::unique_ptr<Communicator> reduce_communicator_;
  StagePolicy policy_;
  DeviceParts parts_;
  std::unique_ptr<Store> store_;
  std::vector<Parameter> parameters_;
  std::vector<Unit> units_;
  OpenRange in_forward_;
  OpenRange in_backward_;
  std::size_t prefetch_bytes_ = 0;
  std::unique_ptr<GatherScheduler> gathers_;
  std::unique_ptr<ReduceScheduler> reduces_;
  LossScaler scaler_;
  bool has_offered_ = false;               // gradients that the store has and no update follows on yet
  std::size_t param_group_num_ = 0;        // that trainable parameters are of
  std::vector<std::size_t> update_order_;  // units, as the last step updated them
  std::vector<std::size_t> update_turns_;  // by unit: its place there
  std::size_t unpublished_ = 0;     // stages 1 and 2: the first turn whose updated parameters have yet to be published
  std::vector<WorkPtr> published_;  // all-gathers of the last step, whose sources peers may still read
  // Device memory (docs/decisions/0020-norm-on-the-device.md): the sums of squares of this rank and of all, and what
  // comes of them, which is also copied to the host: scalars, then a double a flat.
  Region own_sums_;
  Region all_sums_;
  DeviceBuffer norm_;
  std::shared_ptr<std::byte> norm_on_host_;
  std::vector<FlatBuffer*> trainable_flats_;  // in unit order
  PendingStep pending_;
  BackwardUpdates backward_updates_;
  bool is_torn_ = false;
  std::atomic<std::uint32_t> stop_num_{0};  // calls left by an exception since the last step
  double window_multiplier_ = 1.0;          // on this window's gradients, by clip_gradients
  bool has_own_steps_ = false;              // some parameter was held once, or is now
  std::vector<std::size_t> held_in_step_;   // by the last step, until its outcome is known
  Reports reports_;
  StepOutcome outcome_;
  long steps_applied_ = 0;
  long steps_tried_ = 0;
};

}  // namespace zb
