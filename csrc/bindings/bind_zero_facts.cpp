// What an engine says about itself.
#include <pybind11/stl.h>

#include <map>

#include "bindings/bound_engine.h"

namespace py = pybind11;

namespace zb {
namespace {

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
    entry["accumulate_dtype"] = std::string(dtype_name(flat.accumulate_dtype));
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
  result["is_awaited_early"] = unit.is_awaited_early;
  result["flats"] = flats;
  return result;
}

}  // namespace

void bind_engine_facts(py::class_<BoundEngine>& engine) {
  using Release = py::call_guard<py::gil_scoped_release>;
  engine
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
          Release(),
          "What offloaded state moved since the engine was made. Waits for updates and transfers of files under way.")
      .def(
          "store_waited_ms", [](BoundEngine& e) { return e.get().store_waited_ms(); }, Release(),
          "How long the callers were blocked for updates since the engine was made.")
      .def(
          "store_waited_for_files_ms", [](BoundEngine& e) { return e.get().store_waited_for_files_ms(); }, Release(),
          "Of that, while the updates themselves waited for files.")
      .def(
          "store_pinned",
          [](BoundEngine& e) {
            const PinnedStats stats = [&] {
              const py::gil_scoped_release release;
              return e.get().store_pinned();
            }();
            return py::dict(py::arg("mapped_bytes") = stats.mapped_bytes,
                            py::arg("requested_bytes") = stats.requested_bytes,
                            py::arg("huge_bytes") = stats.huge_bytes, py::arg("is_registered") = stats.is_registered);
          },
          "Host memory of offloaded state, as asked for and as taken.")
      .def_property_readonly(
          "store_chunk_numel", [](const BoundEngine& e) { return e.get().store_chunk_numel(); },
          "Elements that one stage of the pipeline of offloaded state works on; 0 where there is none, or not yet.")
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
      .def(
          "reset_counters", [](BoundEngine& e) { e.get().reset_counters(); }, Release())
      .def("units",
           [](const BoundEngine& e) {
             py::list result;
             for (std::size_t index = 0; index < e.get().unit_num(); ++index)
               result.append(describe_unit(e.get(), index));
             return result;
           })
      .def("unit_state",
           [](const BoundEngine& e, std::size_t unit) {
             return py::make_tuple(state_name<ParameterStates>(e.get().unit(unit).parameter_state),
                                   state_name<GradientStates>(e.get().unit(unit).gradient_state));
           })
      .def(
          "has_frozen", [](const BoundEngine& e, std::size_t unit) { return e.get().has_frozen(unit); },
          py::arg("unit"));
}

}  // namespace zb
