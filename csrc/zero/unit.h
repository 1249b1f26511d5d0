// Units: the modules whose parameters are gathered and whose gradients are reduced together, and the memory they hold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "common/dtype.h"
#include "kernels/device_buffer.h"
#include "kernels/device_range.h"
#include "memory/ledger.h"
#include "partition/flat_layout.h"
#include "zero/policy.h"
#include "zero/range_names.h"
#include "zero/slot_pool.h"
#include "zero/unit_state.h"

namespace zb {

// How a parameter's tensor finds its data. Implemented over torch storages (zero/torch_parameter.h).
class ParameterBinding {
 public:
  virtual ~ParameterBinding() = default;
  // Points the parameter at memory that stays valid until the next attach or detach.
  virtual void attach(std::byte* data) = 0;
  // The same for good: the buffer lives as long as the parameter needs it.
  virtual void attach_owned(const Region& region) = 0;
  // Takes the data away; touching the parameter then raises `message`.
  virtual void detach(const std::string& message) = 0;
  // Leaves the data where they are, but touching the parameter raises `message`, always the same one, until unguard().
  virtual void guard(const std::string& message) = 0;
  virtual void unguard() = 0;
  // False when the user replaced the parameter's storage.
  virtual bool intact() const = 0;
  // Copies the current values, converted to float, in row-major order into device memory, for the compute lane. Needs
  // data.
  virtual void read(float* destination) const = 0;
  // Makes the tensor one of param_dtype with a storage of its own and no data yet (touching it raises); its old data is
  // freed.
  virtual void adopt(DType param_dtype) = 0;
};

struct Parameter {
  std::string name;
  std::size_t numel = 0;
  bool trainable = true;
  std::size_t unit = 0;
  std::size_t flat = 0;          // index into the unit's flats
  std::size_t offset_numel = 0;  // in the flat buffer
  std::unique_ptr<ParameterBinding> binding;
  std::string sharded_message;
  std::string updating_message;
  long held_steps = 0;   // applied steps that left it alone: its own count of steps is that much lower
  bool is_held = false;  // the next step leaves it alone

  // Arrivals of the gradient in the running backward, and the fewest in recorded ones with the same uses of its unit.
  std::uint32_t arrivals = 0;
  std::uint32_t expected_arrivals = 0;
  std::uint32_t most_arrivals = 0;  // in any recorded backward
  bool arrived_in_window = false;   // since the flat gradient was last started afresh
};

// The parameters of a unit that share dtype and trainability.
struct FlatBuffer {
  FlatLayout layout;
  DType param_dtype = DType::kFloat32;
  DType reduce_dtype = DType::kFloat32;      // that gradients are packed and reduced in
  DType accumulate_dtype = DType::kFloat32;  // of the reduced sum over micro-batches, which updates read
  bool trainable = true;
  std::vector<std::size_t> parameters;  // engine-wide indices, in span order
  std::string label;                    // for errors: the unit's name

  std::size_t gather_offset_bytes = 0;    // within the unit's gather slot
  std::size_t fetch_offset_bytes = 0;     // within the unit's staging shard, where is_fetched
  std::size_t gradient_offset_bytes = 0;  // within the unit's gradient slot

  Region full_parameters;   // replicated parameters
  Region shard_parameters;  // this rank's piece: a slice of full_parameters, or a buffer of its own; or none:
  bool is_fetched = false;  // the store gives this rank's piece before each gather
  bool is_spliced = false;  // gathers find this rank's piece in place ([Note: spliced slots] in spliced_slot.h)
  // What the masters' remainders belong to, while a gather lets its caller change parameters in place.
  DeviceBuffer remembered_parameters;
  Region full_gradients;   // where full gradients persist
  Region shard_gradients;  // this rank's reduced piece; none between update and reduction where it is made for a step
  std::vector<FlatPiece> in_place_pieces;  // instead of both where gradients stay in place: in span order
  std::size_t store_shard = 0;
  // Segments of the next update, where a parameter has a step count of its own or is held; else those of the layout.
  std::optional<std::vector<Segment>> update_segments;
  double* sum_of_squares = nullptr;  // device memory: of shard_gradients, once reduced
  bool is_final = false;  // [Note: final shards] (gather_scheduler.h): behind a mark all ranks know it to be final
  MarkPtr final_after;
  MarkPtr written;  // behind a change of shard_parameters by others than the store, until a gather has waited for it

  // Whether the store has a shard of it.
  bool is_stored() const { return trainable || is_fetched; }
  std::size_t full_parameter_bytes() const { return layout.padded_numel() * dtype_bytes(param_dtype); }
  std::size_t shard_parameter_bytes() const { return layout.shard_numel() * dtype_bytes(param_dtype); }
  std::size_t full_gradient_bytes() const { return layout.padded_numel() * dtype_bytes(reduce_dtype); }
  std::size_t shard_gradient_bytes() const { return layout.shard_numel() * dtype_bytes(reduce_dtype); }
  // Of shard_gradients, which have the same size wherever full gradients persist.
  std::size_t accumulated_shard_bytes() const { return layout.shard_numel() * dtype_bytes(accumulate_dtype); }
  // Whether a reduction in reduce_dtype cannot be received where it is accumulated.
  bool accumulates_in_another_dtype() const { return accumulate_dtype != reduce_dtype; }
};

// A gradient as autograd left it, and the owner that keeps its memory alive.
struct ArrivedGradient {
  std::size_t parameter = 0;
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  bool accumulate = false;
  std::shared_ptr<const void> owner;
};

// Throws StateError for a parameter whose storage the user replaced.
void check_intact(const Parameter& parameter);

struct Unit {
  std::string name;
  RangeNames ranges;
  bool is_root = false;
  bool goes_with_root = false;  // gathered and released together with the root, since forwards use it without a call
  std::vector<FlatBuffer> flats;
  std::size_t gather_bytes = 0;    // size of a gather slot
  std::size_t gradient_bytes = 0;  // size of a gradient slot; 0 when nothing is trainable
  std::size_t fetch_bytes = 0;     // size of a staging shard; 0 when nothing is fetched
  std::size_t trainable_parameters = 0;
  bool is_push_worthwhile = false;  // [Note: pushed reductions] (peer_transport.h)

  UnitState<ParameterStates> parameter_state;
  SlotLease gather_slot;
  std::vector<Region> gathered;  // where its flats are in that slot; empty without one
  std::vector<WorkPtr> gathering;
  MarkPtr own_parts_copied;          // of a gather of final shards, until the compute lane waits for it
  bool lacks_own_parts = false;      // the compute lane has to copy them itself
  std::vector<WorkPtr> reads;        // the last gather of its shard, where an update may follow in the same backward
  std::vector<WorkPtr> publishing;   // stages 1 and 2: all-gathers of updated parameters that nobody has waited for yet
  bool is_updating = false;          // the last step's updates of its parameters may be under way
  bool is_guarded = false;           // so touching its trainable parameters raises
  bool needed_for_backward = false;  // kept unsharded between forward and backward
  bool is_awaited_early = false;     // a forward used it before any hook told; forwards wait for it at their beginning
  bool missed_update = false;        // nothing in the forwards of the running backward has waited for its updates
  int pins = 0;                      // explicit gathers that hold it
  std::uint32_t open_forwards = 0;   // calls of its module that have not returned, where parameters are sharded
  OpenRange in_forward;              // open while its module computes
  OpenRange in_backward;             // from when backward reaches it until its gradients are there
  std::uint32_t awaited_inputs = 0;  // uses whose gradients towards the unit's inputs are still to come

  UnitState<GradientStates> gradient_state;
  bool gradients_spent = false;             // the updates that read them were started
  SlotLease gradient_slot;                  // shared slot, or empty while the gradients persist in full
  std::shared_ptr<RegisteredBuffer> spare;  // private stand-in while the slot is not this unit's yet
  std::vector<ArrivedGradient>
      pending_gradients;  // where the device works in lanes: packed together, in one piece of work
  std::vector<ArrivedGradient> in_place_gradients;  // or left where they are: their update reads them there
  Allocation in_place_bytes;
  std::vector<WorkPtr> reducing;
  std::uint32_t uses = 0;                    // forward calls since the last backward ended
  std::uint32_t expected_uses = 0;           // of the backward that expected_arrivals come from
  std::uint32_t expected_arrivals = 0;       // of all its parameters together
  std::uint32_t arrivals = 0;                // of those expected
  bool is_reduced_at_end = false;            // a gradient once came after the expected ones
  const Parameter* last_arrived = nullptr;   // whose gradient came last in the running backward
  const Parameter* expected_last = nullptr;  // and in the last recorded one that brought any
  bool last_varies = false;                  // it was not the same in all of them
  int graph_task = -1;                       // the backward (or checkpoint inside it) that its first gradient came from
  bool complete = false;                     // all gradients of this backward are there

  bool has_frozen() const;
  // Where a flat buffer's gradients are reduced from, in its own buffer or in the unit's slot, which it must have.
  Region gradients_of(const FlatBuffer& flat) const;
  // Those of its flats are fetched from the store whose parameters or master it keeps.
  void fetch_parameters_of(const std::function<bool(const FlatBuffer&)>& is_kept);
  // Those are spliced whose shards have so many bytes or more.
  void splice_parameters(std::size_t min_bytes);
  bool is_spliced() const;
  bool has_trainable() const { return trainable_parameters > 0; }
  // Forgets gradients left in place. Nothing that reads them may be under way.
  void drop_in_place() noexcept;
  // Throw StateError for a transition that does not exist ([Note: state of a unit] in unit_state.h).
  void set_parameter_state(ParameterState next) { parameter_state.go(next, "parameters", name); }
  void set_gradient_state(GradientState next) { gradient_state.go(next, "gradients", name); }
};

// What the engine knows of a parameter before layouts exist.
struct ParameterSpec {
  std::string name;
  std::size_t numel = 0;
  DType param_dtype = DType::kFloat32;
  DType reduce_dtype = DType::kFloat32;
  std::optional<DType> accumulate_dtype = {};  // none: reduce_dtype
  bool trainable = true;
  int param_group = 0;
  std::size_t unit = 0;
};

// Cuts parameters into units and flat layouts. Fills Parameter::unit, flat and offset_numel. Pure arithmetic.
std::vector<Unit> make_units(const std::vector<std::string>& unit_names, std::size_t root_unit,
                             const std::vector<ParameterSpec>& specs, int world_size,
                             std::vector<Parameter>& parameters);

}  // namespace zb
