#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <map>

#include "bindings/bindings.h"
#include "bindings/capsules.h"
#include "bindings/offload.h"
#include "kernels/cpu_device.h"

#include "zero/engine.h"
#include "zero/torch_hooks.h"
#include "zero/torch_memory.h"
#include "zero/torch_parameter.h"

namespace py = pybind11;

namespace zb {

std::unique_ptr<Communicator> take_communicator(const py::object& object);

namespace {

// What Python gives for a parameter.
struct ParameterArgument {
  std::string name;
  at::Tensor tensor;
  std::string param_dtype;
  std::string reduce_dtype;
  bool trainable;
  int param_group;
  std::size_t unit;
};

// The engine with what ties it to torch.
class BoundEngine {
 public:
  BoundEngine(const EngineOptions& options, std::vector<std::string> unit_names, std::size_t root_unit,
              const std::vector<ParameterArgument>& parameters, const py::object& gather_communicator,
              const py::object& reduce_communicator, const std::string& device, DeviceParts parts,
              const py::object& materialise) {
    EngineModel model;
    model.unit_names = std::move(unit_names);
    model.root_unit = root_unit;
    std::vector<at::Tensor> tensors;
    std::vector<ParameterBinding*> bindings;
    std::vector<std::size_t> indices;  // of the trainable ones
    for (const ParameterArgument& argument : parameters) {
      if (argument.trainable) indices.push_back(tensors.size());
      tensors.push_back(argument.tensor);
      sizes_.push_back(argument.tensor.sizes().vec());
      model.parameters.push_back({.name = argument.name,
                                  .numel = static_cast<std::size_t>(argument.tensor.numel()),
                                  .param_dtype = dtype_from_name(argument.param_dtype),
                                  .reduce_dtype = dtype_from_name(argument.reduce_dtype),
                                  .trainable = argument.trainable,
                                  .param_group = argument.param_group,
                                  .unit = argument.unit});
      model.bindings.push_back(make_torch_parameter(argument.name, argument.tensor, device));
    }
    for (const auto& binding : model.bindings) bindings.push_back(binding.get());
    if (!materialise.is_none()) {
      model.materialise = [&](std::size_t unit) {
        const py::gil_scoped_acquire acquire;
        const auto made = materialise(unit).cast<std::map<std::size_t, at::Tensor>>();
        for (const auto& [index, tensor] : made) {
          tensors.at(index) = tensor;
          rebind_torch_parameter(*bindings.at(index), tensor);
        }
      };
    }
    EngineOptions with_memory = options;
    if (at::Device(device).is_cuda()) {
      memory_ = std::make_shared<TorchMemory>(device);
      with_memory.allocate_in_compute = [memory = memory_](std::size_t bytes) { return memory->allocate(bytes); };
    }
    auto gather = take_communicator(gather_communicator);
    auto reduce = take_communicator(reduce_communicator);
    const py::gil_scoped_release release;
    engine_ =
        std::make_shared<Engine>(with_memory, std::move(model), std::move(parts), std::move(gather), std::move(reduce));
    std::vector<at::Tensor> trainable;
    for (const std::size_t index : indices) trainable.push_back(tensors[index]);
    hooks_ = make_gradient_hooks(engine_, trainable, indices);
  }

  Engine& get() const {
    ZB_EXPECT_STATE(engine_ != nullptr, "the engine was closed");
    return *engine_;
  }

  void close() {
    if (engine_) engine_->quiesce();
    hooks_.reset();
    engine_.reset();
  }

  void set_compute_stream(void* stream) {
    if (memory_) memory_->follow_current_stream();
    get().set_compute_stream(stream);
  }

  void begin_backward(bool last, const std::vector<AdamHyperparameters>& groups) {
    // A plain loss.backward() may have left an error that nobody asked for.
    if (hooks_) static_cast<void>(hooks_->take_error());
    get().begin_backward(last, groups);
  }

  // Throws what a gradient hook threw in the last backward, with its own type.
  void rethrow_hook_error() {
    if (!hooks_) return;
    if (const std::exception_ptr error = hooks_->take_error()) std::rethrow_exception(error);
  }

  std::map<std::string, at::Tensor> full_state(const std::string& kind) const {
    static const std::map<std::string, FullState> kKinds{{"parameters", FullState::kParameters},
                                                         {"master", FullState::kMaster},
                                                         {"exp_avg", FullState::kExpAvg},
                                                         {"exp_avg_sq", FullState::kExpAvgSq}};
    const auto found = kKinds.find(kind);
    ZB_EXPECT(found != kKinds.end(), "'" + kind + "' is not a state; use parameters, master, exp_avg or exp_avg_sq");
    std::map<std::string, at::Tensor> result;
    get().read_full_state(found->second, [&](std::size_t index, const float* values) {
      at::Tensor tensor = at::empty(sizes_[index], at::TensorOptions().dtype(c10::ScalarType::Float));
      std::memcpy(tensor.mutable_data_ptr(), values, static_cast<std::size_t>(tensor.numel()) * sizeof(float));
      result.emplace(get().parameter(index).name, std::move(tensor));
    });
    return result;
  }

  void load_full_state(const std::map<std::string, std::map<std::string, at::Tensor>>& states, long step,
                       const std::optional<std::pair<double, long>>& loss_scale) {
    static const std::map<FullState, std::string> kKinds{
        {FullState::kMaster, "parameters"}, {FullState::kExpAvg, "exp_avg"}, {FullState::kExpAvgSq, "exp_avg_sq"}};
    FullStateFacts facts{.steps_applied = step};
    if (loss_scale) facts.loss_scale = {.scale = loss_scale->first, .good_steps = loss_scale->second};
    get().write_full_state(facts, [&](FullState kind, std::size_t index, float* values) {
      const at::Tensor& tensor = states.at(kKinds.at(kind)).at(get().parameter(index).name);
      std::memcpy(values, tensor.const_data_ptr(), static_cast<std::size_t>(tensor.numel()) * sizeof(float));
    });
  }

 private:
  std::shared_ptr<TorchMemory> memory_;  // null where the device's own memory serves
  std::shared_ptr<Engine> engine_;
  std::unique_ptr<GradientHooks> hooks_;
  std::vector<std::vector<std::int64_t>> sizes_;
};

py::dict describe_unit(const Engine& engine, std::size_t index) {
  const Unit& unit = engine.unit(index);
  py::list flats;
  for (const FlatBuffer& flat : unit.flats) {
    py::list names;
    for (const std::size_t parameter : flat.parameters) names.append(engine.parameter(parameter).name);
    py::dict entry;
    entry["parameters"] = names;
    entry["param_dtype"] = std::string(dtype_name(flat.param_dtype));
    entry["reduce_dtype"] = std::string(dtype_name(flat.reduce_dtype));
    entry["trainable"] = flat.trainable;
    entry["numel"] = flat.layout.numel();
    entry["padded_numel"] = flat.layout.padded_numel();
    entry["shard_numel"] = flat.layout.shard_numel();
    flats.append(entry);
  }
  py::dict result;
  result["name"] = unit.name;
  result["is_root"] = unit.is_root;
  result["gather_bytes"] = unit.gather_bytes;
  result["gradient_bytes"] = unit.gradient_bytes;
  result["flats"] = flats;
  return result;
}

void bind_engine_training(py::class_<BoundEngine>& engine) {
  using Release = py::call_guard<py::gil_scoped_release>;
  engine
      .def(
          "begin_forward", [](BoundEngine& e, bool train) { e.get().begin_forward(train); }, py::arg("train"),
          Release())
      .def(
          "end_forward", [](BoundEngine& e) { e.get().end_forward(); }, Release())
      .def(
          "abandon_forward", [](BoundEngine& e) { e.get().abandon_forward(); }, Release())
      .def(
          "pre_forward", [](BoundEngine& e, std::size_t unit) { e.get().pre_forward(unit); }, py::arg("unit"),
          Release())
      .def(
          "post_forward", [](BoundEngine& e, std::size_t unit) { e.get().post_forward(unit); }, py::arg("unit"),
          Release())
      .def(
          "pre_backward", [](BoundEngine& e, std::size_t unit) { e.get().pre_backward(unit); }, py::arg("unit"),
          Release())
      .def(
          "await_inputs", [](BoundEngine& e, std::size_t unit) { e.get().await_inputs(unit); }, py::arg("unit"),
          Release())
      .def(
          "inputs_done", [](BoundEngine& e, std::size_t unit) { e.get().inputs_done(unit); }, py::arg("unit"),
          Release())
      .def(
          "begin_backward",
          [](BoundEngine& e, bool last, const std::vector<AdamHyperparameters>& groups) {
            e.begin_backward(last, groups);
          },
          py::arg("last"), py::arg("groups"), Release(),
          "groups are the hyperparameters of the step that this backward ends, where the optimizer runs in backward.")
      .def(
          "end_backward", [](BoundEngine& e) { e.get().end_backward(); }, Release())
      .def(
          "abort_backward", [](BoundEngine& e) { e.get().abort_backward(); }, Release())
      .def("rethrow_hook_error", &BoundEngine::rethrow_hook_error)
      .def(
          "step", [](BoundEngine& e, const std::vector<AdamHyperparameters>& groups) { e.get().step(groups); },
          py::arg("groups"), Release())
      .def(
          "outcome",
          [](BoundEngine& e) {
            StepOutcome outcome;
            {
              const py::gil_scoped_release release;
              outcome = e.get().outcome();
            }
            return py::make_tuple(outcome.applied, outcome.grad_norm);
          },
          "(applied, global gradient norm before clipping) of the last step. Blocks until it is known.")
      .def_property_readonly("awaits_share", [](const BoundEngine& e) { return e.get().awaits_share(); })
      .def(
          "place_state", [](BoundEngine& e, double fitting_share) { return e.get().place_state(fitting_share); },
          py::arg("fitting_share"), Release(),
          "Behind the first backward: puts the share of optimizer state on the device that fits on every rank's, of "
          "which this rank says its own, and returns the share on the host. Collective.")
      .def(
          "set_compute_stream",
          [](BoundEngine& e, std::uintptr_t stream) { e.set_compute_stream(reinterpret_cast<void*>(stream)); },
          py::arg("stream"), Release(),
          "The native stream that the caller computes on from now on, torch's current one of the calling thread.");
}

void bind_engine_reading(py::class_<BoundEngine>& engine) {
  using Release = py::call_guard<py::gil_scoped_release>;
  engine
      .def("full_state", &BoundEngine::full_state, py::arg("kind"), Release(),
           "Full values by parameter name, fp32. Collective.")
      .def("load_full_state", &BoundEngine::load_full_state, py::arg("states"), py::kw_only(), py::arg("step"),
           py::arg("loss_scale"), Release(),
           "Rank 0's full values by kind and parameter name, and its loss_scale_state (None: it stays), for all. "
           "Collective.")
      .def(
          "gather", [](BoundEngine& e, const std::vector<std::size_t>& units) { e.get().gather(units); },
          py::arg("units"), Release())
      .def(
          "end_gather",
          [](BoundEngine& e, const std::vector<std::size_t>& units, int modifier_rank) {
            e.get().end_gather(units, modifier_rank);
          },
          py::arg("units"), py::kw_only(), py::arg("modifier_rank"), Release())
      .def(
          "broadcast",
          [](BoundEngine& e, const at::Tensor& tensor) {
            ZB_EXPECT(tensor.is_contiguous() && tensor.device().is_cpu(),
                      "only contiguous CPU tensors can be broadcast");
            e.get().broadcast(static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes());
          },
          py::arg("tensor"), Release(), "Makes rank 0's values everybody's, in place. Collective.")
      .def_property_readonly("loss_scale",
                             py::cpp_function([](const BoundEngine& e) { return e.get().loss_scale(); }, Release()))
      .def_property_readonly(
          "loss_scale_state",
          [](const BoundEngine& e) -> std::optional<std::pair<double, long>> {
            const py::gil_scoped_release release;
            if (!e.get().scales_loss()) return std::nullopt;
            const LossScaleState state = e.get().loss_scale_state();
            return std::pair(state.scale, state.good_steps);
          },
          "(scale, good steps since it changed), None where no loss is scaled.")
      .def_property_readonly("steps_applied",
                             py::cpp_function([](const BoundEngine& e) { return e.get().steps_applied(); }, Release()))
      .def_property_readonly("rank", [](const BoundEngine& e) { return e.get().rank(); })
      .def_property_readonly("world_size", [](const BoundEngine& e) { return e.get().world_size(); })
      .def_property_readonly("prefetch_bytes", [](const BoundEngine& e) { return e.get().prefetch_bytes(); })
      .def_property_readonly("parameters_sharded",
                             [](const BoundEngine& e) { return e.get().policy().parameters == Placement::kSharded; })
      .def_property_readonly(
          "ledger", [](const BoundEngine& e) -> const Ledger& { return e.get().ledger(); },
          py::return_value_policy::reference_internal)
      .def("communication_bytes",
           [](const BoundEngine& e) {
             const CommunicationCounters counters = e.get().counters();
             std::map<std::string, std::uint64_t> result;
             for (std::size_t i = 0; i < kCollectiveNum; ++i) {
               result[std::string(collective_name(static_cast<Collective>(i)))] = counters.bytes[i];
             }
             return result;
           })
      .def(
          "swap_stats",
          [](const BoundEngine& e) {
            const SwapStats stats = e.get().swap_stats();
            return py::dict(py::arg("read_bytes") = stats.read_bytes, py::arg("written_bytes") = stats.written_bytes,
                            py::arg("wait_s") = stats.wait_s, py::arg("engine") = stats.engine,
                            py::arg("notes") = stats.notes);
          },
          "What state in files has moved since the engine was made; updates waited for wait_s of it.")
      .def("communication_ms", [](const BoundEngine& e) { return e.get().communication_ms(); })
      .def(
          "store_traffic",
          [](BoundEngine& e) {
            const StoreTraffic traffic = e.get().store_traffic();
            return std::map<std::string, std::uint64_t>{{"to_host_bytes", traffic.to_host_bytes},
                                                        {"to_device_bytes", traffic.to_device_bytes}};
          },
          Release(), "What offloaded state moved since the engine was made. Waits for updates that are under way.")
      .def(
          "store_waited_ms", [](BoundEngine& e) { return e.get().store_waited_ms(); },
          "How long the callers were blocked for updates since the engine was made.")
      .def(
          "store_waited_for_files_ms", [](BoundEngine& e) { return e.get().store_waited_for_files_ms(); },
          "Of that, while the updates themselves waited for files.")
      .def(
          "store_pinned",
          [](BoundEngine& e) {
            const PinnedStats stats = e.get().store_pinned();
            return py::dict(py::arg("mapped_bytes") = stats.mapped_bytes,
                            py::arg("requested_bytes") = stats.requested_bytes,
                            py::arg("huge_bytes") = stats.huge_bytes, py::arg("is_registered") = stats.is_registered);
          },
          "Host memory of offloaded state, as asked for and as taken.")
      .def(
          "start_timeline", [](BoundEngine& e) { e.get().timeline().start(); },
          "Records from now on what updates, transfers and collectives do, and when.")
      .def(
          "stop_timeline",
          [](BoundEngine& e) {
            py::list spans;
            for (const TimelineSpan& span : e.get().timeline().stop()) {
              spans.append(py::make_tuple(span.place, span.what, span.unit, span.begin_ns, span.end_ns));
            }
            return spans;
          },
          "(place, what, unit, begin, end) of each, in nanoseconds of time.perf_counter_ns.")
      .def("reset_counters", [](BoundEngine& e) { e.get().reset_counters(); })
      .def("units",
           [](const BoundEngine& e) {
             py::list result;
             for (std::size_t index = 0; index < e.get().unit_num(); ++index)
               result.append(describe_unit(e.get(), index));
             return result;
           })
      .def("unit_state",
           [](const BoundEngine& e, std::size_t unit) {
             return py::make_tuple(std::string(parameter_state_name(e.get().unit(unit).parameter_state)),
                                   std::string(gradient_state_name(e.get().unit(unit).gradient_state)));
           })
      .def(
          "has_frozen", [](const BoundEngine& e, std::size_t unit) { return e.get().has_frozen(unit); },
          py::arg("unit"))
      .def(
          "abort", [](BoundEngine& e, const std::string& reason) { e.get().abort(reason); }, py::arg("reason"),
          Release())
      .def("close", &BoundEngine::close, Release());
}

}  // namespace

void bind_zero(py::module_& m) {
  py::class_<ParameterArgument>(m, "ParameterArgument", "A parameter as the engine takes it over.")
      .def(py::init([](std::string name, at::Tensor tensor, std::string param_dtype, std::string reduce_dtype,
                       bool trainable, int param_group, std::size_t unit) {
             return ParameterArgument{std::move(name),
                                      std::move(tensor),
                                      std::move(param_dtype),
                                      std::move(reduce_dtype),
                                      trainable,
                                      param_group,
                                      unit};
           }),
           py::arg("name"), py::arg("tensor"), py::kw_only(), py::arg("param_dtype"), py::arg("reduce_dtype"),
           py::arg("trainable"), py::arg("param_group"), py::arg("unit"));
  py::class_<LossScaleOptions>(m, "LossScaleOptions", "Loss scale of fp16 training.")
      .def(py::init([](bool enabled, bool dynamic, double initial_scale, double growth_factor, double backoff_factor,
                       long growth_interval_steps, double min_scale) {
             return LossScaleOptions{
                 enabled, dynamic, initial_scale, growth_factor, backoff_factor, growth_interval_steps, min_scale};
           }),
           py::kw_only(), py::arg("enabled"), py::arg("dynamic"), py::arg("initial_scale"), py::arg("growth_factor"),
           py::arg("backoff_factor"), py::arg("growth_interval_steps"), py::arg("min_scale"));
  py::class_<EngineOptions>(m, "EngineOptions", "How an engine keeps and moves its state.")
      .def(py::init([](int stage, long accumulation_steps, double clip, std::optional<std::size_t> prefetch_bytes,
                       bool reshard_after_forward, bool keep_parameter_shards, std::size_t keep_root_bytes,
                       bool optimizer_in_backward, const LossScaleOptions& loss_scale,
                       const std::optional<OffloadOptions>& offload) {
             EngineOptions options{.stage = zero_stage_from_int(stage),
                                   .accumulation_steps = accumulation_steps,
                                   .clip = clip,
                                   .prefetch_bytes = prefetch_bytes.value_or(0),
                                   .default_prefetch = !prefetch_bytes.has_value(),
                                   .reshard_after_forward = reshard_after_forward,
                                   .keep_parameter_shards = keep_parameter_shards,
                                   .loss_scale = loss_scale,
                                   .keep_root_bytes = keep_root_bytes,
                                   .optimizer_in_backward = optimizer_in_backward};
             if (offload) {
               options.parameters_away = offload->host.parameters != ParameterHome::kDevice;
               options.make_store = [held = *offload](Ledger* ledger, const DeviceParts& parts) {
                 return held.make_store(ledger, parts);
               };
             }
             return options;
           }),
           py::kw_only(), py::arg("stage"), py::arg("accumulation_steps"), py::arg("clip"), py::arg("prefetch_bytes"),
           py::arg("reshard_after_forward"), py::arg("keep_parameter_shards"), py::arg("keep_root_bytes"),
           py::arg("optimizer_in_backward"), py::arg("loss_scale"), py::arg("offload"),
           "offload: OffloadOptions, or None for state on the device.");
  m.def(
      "cpu_device_parts",
      [](std::size_t thread_num, std::vector<int> cpus) {
        return to_capsule(DeviceParts{make_cpu_device(), make_cpu_adam(thread_num, std::move(cpus))});
      },
      py::kw_only(), py::arg("thread_num"), py::arg("cpus"),
      "The CPU as the device of an engine, with threads for its optimizer.");
  py::class_<BoundEngine> engine(m, "Engine", "One rank's ZeRO engine (csrc/zero/engine.h).");
  engine.def(py::init([](const EngineOptions& options, std::vector<std::string> unit_names, std::size_t root_unit,
                         const std::vector<ParameterArgument>& parameters, const py::object& gather_communicator,
                         const py::object& reduce_communicator, const std::string& device, const py::object& parts,
                         const py::object& materialise) {
               return std::make_unique<BoundEngine>(options, std::move(unit_names), root_unit, parameters,
                                                    gather_communicator, reduce_communicator, device,
                                                    in_capsule<DeviceParts>(parts), materialise);
             }),
             py::kw_only(), py::arg("options"), py::arg("unit_names"), py::arg("root_unit"), py::arg("parameters"),
             py::arg("gather_communicator"), py::arg("reduce_communicator"), py::arg("device"), py::arg("parts"),
             py::arg("materialise"),
             "device is torch's name of where parameters live; parts is a capsule that makes the engine compute there; "
             "materialise(unit), or None, is called before a unit is built and returns tensors by parameter index.");
  bind_engine_training(engine);
  bind_engine_reading(engine);
}

}  // namespace zb
