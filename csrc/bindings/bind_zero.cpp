#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bindings/bound_engine.h"
#include "bindings/capsules.h"
#include "bindings/exchange.h"
#include "bindings/offload.h"
#include "kernels/cpu_device.h"

namespace py = pybind11;

namespace zb {
namespace {

void bind_engine_training(py::class_<BoundEngine>& engine) {
  using Release = py::call_guard<py::gil_scoped_release>;
  engine.def("begin_forward", &BoundEngine::begin_forward, py::arg("train"), Release())
      .def("end_forward", &BoundEngine::end_forward, Release())
      .def("abandon_forward", &BoundEngine::abandon_forward, Release())
      .def("pre_forward", &BoundEngine::pre_forward, py::arg("unit"), Release())
      .def("pre_forward_with_root", &BoundEngine::pre_forward_with_root, py::arg("unit"), Release(),
           "Gathers a unit that a forward of stage 3 uses without a call of its module; later forwards gather it with "
           "the root.")
      .def("post_forward", &BoundEngine::post_forward, py::arg("unit"), Release())
      .def("pre_backward", &BoundEngine::pre_backward, py::arg("unit"), Release())
      .def(
          "await_inputs", [](BoundEngine& e, std::size_t unit) { e.get().await_inputs(unit); }, py::arg("unit"),
          Release())
      .def("inputs_done", &BoundEngine::inputs_done, py::arg("unit"), Release())
      .def(
          "begin_backward",
          [](BoundEngine& e, bool last, const std::vector<AdamHyperparameters>& groups) {
            e.begin_backward(last, groups);
          },
          py::arg("last"), py::arg("groups"), Release(),
          "groups are the hyperparameters of the step that this backward ends, where the optimizer runs in backward.")
      .def("end_backward", &BoundEngine::end_backward, Release())
      .def("abort_backward", &BoundEngine::abort_backward, Release())
      .def("begin_input_backward", &BoundEngine::begin_input_backward, Release(),
           "Begins a backward towards inputs of an engine that trains nothing. Collective.")
      .def(
          "end_input_backward", [](BoundEngine& e) { e.get().end_input_backward(); }, Release(),
          "Ends it; does nothing where none has begun. Collective.")
      .def("rethrow_hook_error", &BoundEngine::rethrow_hook_error)
      .def("step", &BoundEngine::step, py::arg("groups"), Release())
      .def("end_window", &BoundEngine::end_window, Release(),
           "Reduces what a window of fewer micro-batches has brought. Collective.")
      .def("gradient_norm", &BoundEngine::gradient_norm, Release(),
           "Global norm of the gradients that the next step will use. Collective.")
      .def(
          "clip_gradients", &BoundEngine::clip_gradients, py::arg("max_norm"), Release(),
          "Scales the gradients that the next step will use to at most this norm; returns the norm before. Collective.")
      .def("drop_gradients", &BoundEngine::drop_gradients, Release())
      .def("check_gradients", &BoundEngine::check_gradients, Release(),
           "Raises StateError where a script has put something in the place of gradients' guards, and drops gradients "
           "where it has dropped all guards.")
      .def("read_gradients", &BoundEngine::read_gradients, py::arg("device"), Release(),
           "Full gradients by name: averaged, unscaled, float32, on this device. Collective.")
      .def("write_gradients", &BoundEngine::write_gradients, py::arg("gradients"), py::kw_only(), py::arg("held"),
           py::arg("source_rank"), Release(),
           "The next step uses these (those of source_rank, or where it is -1 each rank's own, which are the same) and "
           "leaves the held parameters alone. Collective.")
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
      .def_property_readonly("window_backwards", [](const BoundEngine& e) { return e.get().window_backwards(); })
      .def_property_readonly("window_is_reduced", [](const BoundEngine& e) { return e.get().is_window_reduced(); })
      .def_property_readonly(
          "is_updating", [](const BoundEngine& e) { return e.get().is_updating(); },
          "Whether the last step's updates may be under way.")
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

void bind_engine_state(py::class_<BoundEngine>& engine) {
  using Release = py::call_guard<py::gil_scoped_release>;
  engine
      .def("full_state", &BoundEngine::full_state, py::arg("kind"), py::kw_only(), py::arg("rank0_only"), Release(),
           "Full values by parameter name, fp32; with rank0_only none on other ranks. Collective.")
      .def("load_full_state", &BoundEngine::load_full_state, py::arg("states"), py::kw_only(), py::arg("step"),
           py::arg("loss_scale"), py::arg("held_steps"), Release(),
           "Rank 0's full values by kind and parameter name, its loss_scale_state (None: it stays) and its held_steps, "
           "for all. Collective.")
      .def("held_steps", &BoundEngine::held_steps, Release(),
           "Applied steps that left a parameter alone, by name, of those with any.")
      .def(
          "await_all_updates", [](BoundEngine& e) { e.get().await_all_updates(); }, Release(),
          "Parameters that are not sharded can be read from here on in the compute stream. Collective.")
      .def("try_wait_updates", &BoundEngine::try_wait_updates, Release(),
           "Makes what is not sharded readable as the last step left it; False if that takes a forward or a gather.")
      .def(
          "gather",
          [](BoundEngine& e, const std::vector<std::size_t>& units, bool may_change) {
            e.get().gather(units, may_change);
          },
          py::arg("units"), py::kw_only(), py::arg("may_change"), Release())
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
      .def(
          "exchange",
          [](BoundEngine& e, const py::bytes& mine) {
            return exchanged(mine, e.get().world_size(), [&](auto own, auto all) { e.get().exchange(own, all); });
          },
          py::arg("mine"), "Every rank's bytes, one after the other; all ranks give equally many. Collective.")
      .def(
          "abort", [](BoundEngine& e, const std::string& reason) { e.get().abort(reason); }, py::arg("reason"),
          Release())
      .def("stop", &BoundEngine::stop, py::arg("why"), py::kw_only(), py::arg("for_good") = false, Release(),
           "Tells peers that wait for this rank that it has stopped, until it makes its next collective call; `why` "
           "follows its name. Nothing once the engine was closed. From any thread.")
      .def("close", &BoundEngine::close, Release());
}

}  // namespace

void bind_zero(py::module_& m) {
  py::class_<ParameterArgument>(m, "ParameterArgument", "A parameter as the engine takes it over.")
      .def(py::init([](std::string name, at::Tensor tensor, std::string param_dtype, std::string reduce_dtype,
                       std::string accumulate_dtype, bool trainable, int param_group, std::size_t unit) {
             return ParameterArgument{std::move(name),
                                      std::move(tensor),
                                      std::move(param_dtype),
                                      std::move(reduce_dtype),
                                      std::move(accumulate_dtype),
                                      trainable,
                                      param_group,
                                      unit};
           }),
           py::arg("name"), py::arg("tensor"), py::kw_only(), py::arg("param_dtype"), py::arg("reduce_dtype"),
           py::arg("accumulate_dtype"), py::arg("trainable"), py::arg("param_group"), py::arg("unit"));
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
                       bool reshard_after_forward, bool keep_parameter_shards, bool store_param_remainders,
                       std::size_t keep_root_bytes, std::size_t push_gradient_bytes, bool optimizer_in_backward,
                       bool overlap_updates, const LossScaleOptions& loss_scale,
                       const std::optional<OffloadOptions>& offload) {
             EngineOptions options{.stage = zero_stage_from_int(stage),
                                   .accumulation_steps = accumulation_steps,
                                   .clip = clip,
                                   .prefetch_bytes = prefetch_bytes.value_or(0),
                                   .default_prefetch = !prefetch_bytes.has_value(),
                                   .reshard_after_forward = reshard_after_forward,
                                   .keep_parameter_shards = keep_parameter_shards,
                                   .store_param_remainders = store_param_remainders,
                                   .loss_scale = loss_scale,
                                   .keep_root_bytes = keep_root_bytes,
                                   .push_gradient_bytes = push_gradient_bytes,
                                   .optimizer_in_backward = optimizer_in_backward,
                                   .overlap_updates = overlap_updates};
             if (offload) {
               options.parameters_away = offload->host.parameters != ParameterHome::kDevice;
               options.make_store = [held = *offload](Ledger* ledger, const DeviceParts& parts) {
                 return held.make_store(ledger, parts);
               };
             }
             return options;
           }),
           py::kw_only(), py::arg("stage"), py::arg("accumulation_steps"), py::arg("clip"), py::arg("prefetch_bytes"),
           py::arg("reshard_after_forward"), py::arg("keep_parameter_shards"), py::arg("store_param_remainders"),
           py::arg("keep_root_bytes"), py::arg("push_gradient_bytes"), py::arg("optimizer_in_backward"),
           py::arg("overlap_updates"), py::arg("loss_scale"), py::arg("offload"),
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
                         const py::object& materialise, std::vector<std::string> unit_cures) {
               return std::make_unique<BoundEngine>(options, std::move(unit_names), root_unit, parameters,
                                                    gather_communicator, reduce_communicator, device,
                                                    in_capsule<DeviceParts>(parts), materialise, std::move(unit_cures));
             }),
             py::kw_only(), py::arg("options"), py::arg("unit_names"), py::arg("root_unit"), py::arg("parameters"),
             py::arg("gather_communicator"), py::arg("reduce_communicator"), py::arg("device"), py::arg("parts"),
             py::arg("materialise"), py::arg("unit_cures") = std::vector<std::string>{},
             "device is torch's name of where parameters live; parts is a capsule that makes the engine compute there; "
             "materialise(unit), or None, is called before a unit is built and returns tensors by parameter index; "
             "unit_cures are what errors tell to do where a forward uses a unit without a call of its module.");
  bind_engine_training(engine);
  bind_engine_state(engine);
  bind_engine_facts(engine);
}

}  // namespace zb
