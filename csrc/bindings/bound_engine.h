// The engine as Python holds it: with the tensors, hooks and memory of torch that it works on.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/scope_exit.h"
#include "zero/engine.h"
#include "zero/torch_gradient_guards.h"
#include "zero/torch_hooks.h"
#include "zero/torch_memory.h"

namespace zb {

// What Python gives for a parameter.
struct ParameterArgument {
  std::string name;
  at::Tensor tensor;
  std::string param_dtype;
  std::string reduce_dtype;
  std::string accumulate_dtype;
  bool trainable;
  int param_group;
  std::size_t unit;
};

class BoundEngine {
 public:
  BoundEngine(const EngineOptions& options, std::vector<std::string> unit_names, std::size_t root_unit,
              const std::vector<ParameterArgument>& parameters, const pybind11::object& gather_communicator,
              const pybind11::object& reduce_communicator, const std::string& device, DeviceParts parts,
              const pybind11::object& materialise, std::vector<std::string> unit_cures);

  Engine& get() const {
    ZB_EXPECT_STATE(engine_ != nullptr, "the engine was closed: make another with zerobench.initialize()");
    return *engine_;
  }
  void close();
  void stop(const std::string& why, bool for_good) noexcept;

  void set_compute_stream(void* stream);
  // What touches gradients, or lets compiled code see them, first takes their guards away. Throws StateError where a
  // script has put something in the place of some; where it has dropped all, the engine drops its gradients.
  void begin_forward(bool train);
  void end_forward();
  void abandon_forward();
  // Of a unit that computes in the calling thread's current stream, whatever stream the others compute in.
  void pre_forward(std::size_t unit);
  void pre_forward_with_root(std::size_t unit);
  void post_forward(std::size_t unit);
  void pre_backward(std::size_t unit);
  void inputs_done(std::size_t unit);
  // For the calling thread's current stream, too.
  bool try_wait_updates();
  void begin_backward(bool last, const std::vector<AdamHyperparameters>& groups);
  void end_backward();
  void abort_backward();
  void begin_input_backward();
  void step(const std::vector<AdamHyperparameters>& groups);
  void end_window();
  double gradient_norm();
  double clip_gradients(double max_norm);
  void drop_gradients();
  // Looks at what a script has made of the guards, as the calls above do.
  void check_gradients();
  // Averaged and unscaled, by name, on `device`; see Engine::write_gradients for the rest.
  std::map<std::string, at::Tensor> read_gradients(const std::string& device);
  void write_gradients(const std::map<std::string, at::Tensor>& gradients, const std::vector<std::string>& held,
                       int source_rank);
  // Throws what a gradient hook threw in the last backward, with its own type.
  void rethrow_hook_error();

  std::map<std::string, at::Tensor> full_state(const std::string& kind, bool rank0_only) const;
  void load_full_state(const std::map<std::string, std::map<std::string, at::Tensor>>& states, long step,
                       const std::optional<std::pair<double, long>>& loss_scale,
                       const std::map<std::string, long>& held_steps);
  // Applied steps that left a parameter alone, by name, of those with any.
  std::map<std::string, long> held_steps() const;

 private:
  void take_guards();
  void place_guards();
  at::Tensor floats_at(float* values, at::IntArrayRef sizes) const;
  // Whatever the body does, guards are back where gradients wait for a step.
  template <typename Body>
  auto on_gradients(const Body& body) {
    take_guards();
    const ScopeExit back([this] { place_guards(); });
    return body(get());
  }

  std::shared_ptr<TorchMemory> memory_;  // null where the device's own memory serves
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<GradientGuards> guards_;
  std::unique_ptr<GradientHooks> hooks_;
  c10::Device device_;
  std::size_t unit_num_ = 0;
  std::vector<bool> is_called_;  // by unit, in the running training forward; empty outside
  std::vector<std::vector<std::int64_t>> sizes_;
};

// What counts, states and names of an engine Python may ask for.
void bind_engine_facts(pybind11::class_<BoundEngine>& engine);

}  // namespace zb
