// The kernels of a device by addresses, for tests and benchmarks; the engine calls them through DeviceParts.
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/cuda_bindings.h"
#include "common/error.h"

namespace py = pybind11;

namespace zb {
namespace {

using Release = py::call_guard<py::gil_scoped_release>;
using Address = std::uintptr_t;

template <class T = void>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

PackItem make_item(Address destination, const std::string& destination_dtype, std::optional<Address> source,
                   const std::string& source_dtype, std::size_t numel, bool accumulate) {
  return {.destination = pointer(destination),
          .destination_dtype = dtype_from_name(destination_dtype),
          .source = pointer(source.value_or(0)),
          .source_dtype = dtype_from_name(source_dtype),
          .numel = numel,
          .accumulate = accumulate};
}

struct AdamArrays {
  Address master, exp_avg, exp_avg_sq, gradient;
  std::string gradient_dtype;
  Address low_precision;
  std::string low_precision_dtype;
  std::size_t numel;
  Address remainder;
};

AdamRun make_run(const AdamArrays& arrays, const AdamHyperparameters& hyperparameters, long step) {
  return {.span = {.master = pointer<float>(arrays.master),
                   .exp_avg = pointer<float>(arrays.exp_avg),
                   .exp_avg_sq = pointer<float>(arrays.exp_avg_sq),
                   .gradient = pointer(arrays.gradient),
                   .gradient_dtype = dtype_from_name(arrays.gradient_dtype),
                   .low_precision = pointer(arrays.low_precision),
                   .low_precision_dtype = dtype_from_name(arrays.low_precision_dtype),
                   .numel = arrays.numel,
                   .remainder = pointer<std::uint16_t>(arrays.remainder)},
          .scalars = make_adam_scalars(hyperparameters, step, 1.0F)};
}

void bind_copies(BoundDeviceClass& device) {
  const auto convert = [&](const char* name, bool accumulate, const char* doc) {
    device.def(
        name,
        [accumulate](BoundDevice& self, const std::string& lane, Address destination,
                     const std::string& destination_dtype, Address source, const std::string& source_dtype,
                     std::size_t numel) {
          const DType to = dtype_from_name(destination_dtype);
          const DType from = dtype_from_name(source_dtype);
          const auto call = accumulate ? &Device::add : &Device::cast;
          (self.device.get()->*call)(lane_from_name(lane), pointer(destination), to, pointer(source), from, numel);
        },
        py::arg("lane"), py::kw_only(), py::arg("destination"), py::arg("destination_dtype"), py::arg("source"),
        py::arg("source_dtype"), py::arg("numel"), Release(), doc);
  };
  convert("cast", false, "destination[i] = convert(source[i])");
  convert("add", true, "destination[i] = convert(float(destination[i]) + float(source[i]))");
  device
      .def(
          "pack",
          [](BoundDevice& self, const std::string& lane, const std::vector<PackItem>& items) {
            self.device->pack(lane_from_name(lane), items);
          },
          py::arg("lane"), py::arg("items"), Release())
      .def(
          "zero",
          [](BoundDevice& self, const std::string& lane, Address destination, std::size_t size_bytes) {
            self.device->zero(lane_from_name(lane), pointer(destination), size_bytes);
          },
          py::arg("lane"), py::kw_only(), py::arg("destination"), py::arg("size_bytes"), Release())
      .def(
          "copy",
          [](BoundDevice& self, const std::string& lane, Address destination, Address source, std::size_t size_bytes) {
            self.device->copy(lane_from_name(lane), pointer(destination), pointer(source), size_bytes);
          },
          py::arg("lane"), py::kw_only(), py::arg("destination"), py::arg("source"), py::arg("size_bytes"), Release())
      .def(
          "copy_to_pinned",
          [](BoundDevice& self, const std::string& lane, Address host, Address source, std::size_t size_bytes) {
            self.device->copy_to_pinned(lane_from_name(lane), pointer<std::byte>(host), pointer(source), size_bytes);
          },
          py::arg("lane"), py::kw_only(), py::arg("host"), py::arg("source"), py::arg("size_bytes"), Release());
}

void bind_norms(BoundDeviceClass& device) {
  device
      .def(
          "sums_of_squares",
          [](BoundDevice& self, const std::string& lane, const std::string& dtype,
             const std::vector<std::pair<Address, std::vector<std::pair<Address, std::size_t>>>>& sums) {
            std::vector<std::vector<FlatPiece>> pieces(sums.size());
            std::vector<SquareSum> taken;
            for (std::size_t i = 0; i < sums.size(); ++i) {
              for (const auto& [source, numel] : sums[i].second) {
                pieces[i].push_back({.numel = numel, .data = pointer(source)});
              }
              taken.push_back({.result = pointer<double>(sums[i].first), .pieces = pieces[i]});
            }
            self.device->sums_of_squares(lane_from_name(lane), dtype_from_name(dtype), taken);
          },
          py::arg("lane"), py::kw_only(), py::arg("dtype"), py::arg("sums"), Release(),
          "Sums of squares in double: (address of the result, [(address, numel) of a piece]) each")
      .def(
          "combine_norm",
          [](BoundDevice& self, const std::string& lane, Address partial_sums, std::size_t rank_num,
             std::size_t flat_num, double divisor, double clip, Address flat_sums, Address scalars) {
            self.device->combine_norm(lane_from_name(lane), {.partial_sums = pointer<const double>(partial_sums),
                                                             .rank_num = rank_num,
                                                             .flat_num = flat_num,
                                                             .divisor = divisor,
                                                             .clip = clip,
                                                             .flat_sums = pointer<double>(flat_sums),
                                                             .scalars = pointer<StepScalars>(scalars)});
          },
          py::arg("lane"), py::kw_only(), py::arg("partial_sums"), py::arg("rank_num"), py::arg("flat_num"),
          py::arg("divisor"), py::arg("clip"), py::arg("flat_sums"), py::arg("scalars"), Release(),
          "Writes flat_sums and scalars: a double (norm), a float (factor), and an int (1 where the step is skipped).");
}

void bind_adam(py::module_& m, BoundDeviceClass& device) {
  py::class_<AdamRun>(m, "AdamRun", "One run of a shard and its hyperparameters.")
      .def(
          py::init([](std::optional<Address> master, Address exp_avg, Address exp_avg_sq, Address gradient,
                      const std::string& gradient_dtype, std::optional<Address> low_precision,
                      const std::string& low_precision_dtype, std::size_t numel, long step, double lr, double beta1,
                      double beta2, double eps, double weight_decay, bool decoupled, std::optional<Address> remainder) {
            ZB_EXPECT(master.has_value() != remainder.has_value(), "give exactly one of masters and remainders");
            const AdamArrays arrays{.master = master.value_or(0),
                                    .exp_avg = exp_avg,
                                    .exp_avg_sq = exp_avg_sq,
                                    .gradient = gradient,
                                    .gradient_dtype = gradient_dtype,
                                    .low_precision = low_precision.value_or(0),
                                    .low_precision_dtype = low_precision_dtype,
                                    .numel = numel,
                                    .remainder = remainder.value_or(0)};
            const auto kind = decoupled ? WeightDecayKind::kDecoupled : WeightDecayKind::kL2;
            return make_run(arrays, {lr, beta1, beta2, eps, weight_decay, kind}, step);
          }),
          py::kw_only(), py::arg("master"), py::arg("exp_avg"), py::arg("exp_avg_sq"), py::arg("gradient"),
          py::arg("gradient_dtype"), py::arg("low_precision"), py::arg("low_precision_dtype"), py::arg("numel"),
          py::arg("step"), py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"),
          py::arg("decoupled"), py::arg("remainder") = std::nullopt);
  device
      .def(
          "read_masters",
          [](BoundDevice& self, const std::string& lane, const AdamRun& run, Address destination) {
            self.adam->read_masters(lane_from_name(lane), run.span, pointer<float>(destination));
          },
          py::arg("lane"), py::arg("run"), py::kw_only(), py::arg("destination"), Release(),
          "Writes the fp32 masters of a run with remainders.")
      .def(
          "write_masters",
          [](BoundDevice& self, const std::string& lane, const AdamRun& run, Address source) {
            self.adam->write_masters(lane_from_name(lane), run.span, pointer<const float>(source));
          },
          py::arg("lane"), py::arg("run"), py::kw_only(), py::arg("source"), Release(),
          "Makes remainders of fp32 masters, whose rounding the run's parameters hold.")
      .def(
          "copy_magnitudes",
          [](BoundDevice& self, const std::string& lane, Address destination, Address source,
             std::optional<Address> signs, std::size_t numel) {
            self.adam->copy_magnitudes(lane_from_name(lane), pointer<float>(destination), pointer<const float>(source),
                                       pointer<const float>(signs.value_or(0)), numel);
          },
          py::arg("lane"), py::arg("destination"), py::arg("source"), py::kw_only(), py::arg("signs"), py::arg("numel"),
          Release(), "Copies fp32 values with the signs of others, or without.");
  device.def(
      "adam",
      [](BoundDevice& self, const std::string& lane, const std::vector<AdamRun>& runs, Address scalars) {
        self.adam->update(lane_from_name(lane), runs, pointer<const StepScalars>(scalars));
      },
      py::arg("lane"), py::arg("runs"), py::kw_only(), py::arg("scalars"), Release(),
      "Updates all runs with what combine_norm wrote to `scalars`.");
}

}  // namespace

void bind_cuda_kernels(py::module_& m, BoundDeviceClass& device) {
  py::class_<PackItem>(m, "PackItem", "One tensor's way into a flat buffer; zeros without a source.")
      .def(py::init(&make_item), py::kw_only(), py::arg("destination"), py::arg("destination_dtype"), py::arg("source"),
           py::arg("source_dtype"), py::arg("numel"), py::arg("accumulate"));
  bind_copies(device);
  bind_norms(device);
  bind_adam(m, device);
  device
      .def(
          "push_range", [](BoundDevice& self, const std::string& name) { self.device->push_range(name.c_str()); },
          py::arg("name"), "Opens an NVTX range of this thread.")
      .def("pop_range", [](BoundDevice& self) { self.device->pop_range(); })
      .def(
          "start_range",
          [](BoundDevice& self, const std::string& name) { return self.device->start_range(name.c_str()); },
          py::arg("name"), "Opens an NVTX range that any thread may end, by what this returns.")
      .def("end_range", [](BoundDevice& self, RangeId id) { self.device->end_range(id); }, py::arg("id"));
}

}  // namespace zb
