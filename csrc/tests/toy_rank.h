// One rank of the toy model: its engine, its tensors, and a training loop that calls the engine as hooks do. On the CPU
// or on a device whose lanes run late (sim/sim_device.h).
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "sim/sim_ranks.h"
#include "toy_model.h"
#include "zero/engine.h"

namespace zb::test {

struct ToyOptions {
  ZeroStage stage = ZeroStage::kZero0;
  int world_size = 1;
  long accumulation_steps = 1;
  double clip = 0.0;
  DType param_dtype = DType::kFloat32;
  DType reduce_dtype = DType::kFloat32;
  std::optional<DType> accumulate_dtype = {};  // none: reduce_dtype
  bool mixes_reduce_dtypes = false;            // every other parameter's gradient is reduced in bf16
  std::size_t prefetch_bytes = SIZE_MAX;       // SIZE_MAX is the default budget
  bool reshard_after_forward = true;
  bool keep_parameter_shards = false;
  bool store_param_remainders = false;
  std::size_t keep_root_bytes = SIZE_MAX;
  bool optimizer_in_backward = false;
  std::size_t publish_bytes = 0;  // every unit alone
  LossScaleOptions loss_scale;
  std::function<std::unique_ptr<Store>(Ledger*, const DeviceParts&)> make_store = make_device_store;
  double fitting_share = 0.0;               // of rank 0, the smallest, where the store waits to be told
  std::function<void()> before_allocation;  // of gradient shards; may throw
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
  // Schedules of the simulator to run in; 0 is the CPU.
  std::uint32_t sim_schedule_num = 0;
};

// The bytes that one rank's forwards and backwards read, one entry a unit's use.
using Reads = std::vector<std::vector<std::byte>>;

// Where a rank lives.
struct ToyPlace {
  std::string rendezvous = {};
  SimWorld* sim = nullptr;  // null on the CPU
  Reads* reads = nullptr;   // filled where not null
  const Reads* expected_reads = nullptr;
};

// One rank: its engine, its tensors, and a training loop that calls the engine as the hooks of a real model do.
class ToyRank {
 public:
  ToyRank(const ToyOptions& options, int rank, const ToyPlace& place);
  ~ToyRank();

  Engine& engine() { return *engine_; }
  SimDevice& sim_device() { return *sim_device_; }
  int rank() const { return engine_->rank(); }
  ToyTensor& tensor(std::size_t parameter) { return *tensors_[parameter]; }
  void close() { engine_.reset(); }
  bool sharded() const { return options_.stage == ZeroStage::kZero3 && options_.world_size > 1; }

  // Uses the units in this order, the root around them.
  void forward(
      const std::vector<std::size_t>& units, bool train = true, const std::function<void()>& before_end = [] {});

  // A forward that an exception ends after these units.
  void failing_forward(const std::vector<std::size_t>& units);

  // Every unit's parameters get a gradient, in this order of units; then the root's.
  void backward(const std::vector<std::size_t>& units, bool last = true);

  void end_backward();

  void begin_backward(bool last);

  void unit_backward(std::size_t unit);

  void give_gradient(std::size_t parameter);

  StepOutcome step();
  // In the simulator the host runs on without the outcome.
  void start_step();

  // A step as most models do it.
  void train(std::vector<std::size_t> units = {1, 2, 3, 4});
  StepOutcome train_step(const std::vector<std::size_t>& units = {1, 2, 3, 4});

  Values state(FullState kind);

  long micro_step() const { return micro_step_; }
  void set_micro_step(long value) { micro_step_ = value; }
  // From now on this parameter's gradient holds an infinity; SIZE_MAX for none.
  void spoil(std::size_t parameter) { spoiled_ = parameter; }

  // From now on nobody calls this unit's module, so no hook runs; SIZE_MAX for none.
  void hide(std::size_t unit) { hidden_ = unit; }

  // The unit's parameters as its module's work in the compute lane finds them.
  void expect_readable(std::size_t unit);

  // Lets other ranks get ahead.
  void linger(std::chrono::microseconds time);

 private:
  // That the engine keeps as autograd left them.
  void expect_no_gradients();
  void enter(std::size_t unit);

  void make_parts(int rank);

  // Reads every byte, so that sanitizers see memory that is not the unit's, and races with whoever writes it.
  void check_reads(std::size_t unit, const std::vector<Touched>& touched, std::size_t number);

  ToyOptions options_;
  ToyPlace place_;
  std::shared_ptr<SimDevice> sim_device_;  // null on the CPU
  DeviceParts parts_;
  std::unique_ptr<Communicator> gather_;  // until the engine has them
  std::unique_ptr<Communicator> reduce_;
  std::vector<std::shared_ptr<ToyTensor>> tensors_;
  std::size_t read_num_ = 0;
  std::unique_ptr<Engine> engine_;
  long micro_step_ = 0;
  std::size_t spoiled_ = SIZE_MAX;
  std::size_t hidden_ = SIZE_MAX;
};

}  // namespace zb::test
