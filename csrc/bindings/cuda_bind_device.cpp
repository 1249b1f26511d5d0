// make_device, and lanes, marks and memory of what it makes.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <functional>
#include <utility>

#include "bindings/capsules.h"
#include "bindings/cuda_bindings.h"
#include "optim/cuda_adam.h"

namespace py = pybind11;

namespace zb {
namespace {

using Release = py::call_guard<py::gil_scoped_release>;

// A mark, which may be none.
struct BoundMark {
  MarkPtr mark;
};

struct BoundMemory {
  std::shared_ptr<std::byte> bytes;
};

BoundDevice make_device(int ordinal, std::function<void()> on_out_of_memory) {
  auto device = std::make_shared<CudaDevice>(ordinal, std::move(on_out_of_memory));
  return {device, make_cuda_adam(device)};
}

void bind_lanes(BoundDeviceClass& device) {
  device
      .def(
          "stream",
          [](const BoundDevice& self, const std::string& lane) {
            return reinterpret_cast<std::uintptr_t>(self.device->stream(lane_from_name(lane)));
          },
          py::arg("lane"), "The handle of a lane's stream; lanes are compute, gather, reduce, to_host and from_host.")
      .def(
          "set_compute_stream",
          [](BoundDevice& self, std::uintptr_t stream) {
            self.device->set_compute_stream(reinterpret_cast<void*>(stream));
          },
          py::arg("stream"), "The handle of the stream that the caller computes on from now on.")
      .def(
          "mark",
          [](BoundDevice& self, const std::string& lane) { return BoundMark{self.device->mark(lane_from_name(lane))}; },
          py::arg("lane"), Release())
      .def(
          "wait",
          [](BoundDevice& self, const std::string& lane, const BoundMark& mark) {
            self.device->wait(lane_from_name(lane), mark.mark);
          },
          py::arg("lane"), py::arg("mark"), Release(), "Holds back what is put into the lane later.")
      .def(
          "has_passed", [](BoundDevice& self, const BoundMark& mark) { return self.device->has_passed(mark.mark); },
          py::arg("mark"), Release())
      .def(
          "synchronize", [](BoundDevice& self) { self.device->synchronize(); }, Release(),
          "Blocks until every lane is empty.")
      .def(
          "synchronize", [](BoundDevice& self, const BoundMark& mark) { self.device->synchronize(mark.mark); },
          py::arg("mark"), Release(), "Blocks until the mark has passed.");
}

void bind_memory(BoundDeviceClass& device) {
  device
      .def(
          "allocate",
          [](BoundDevice& self, std::size_t size_bytes, const std::string& what) {
            return BoundMemory{self.device->allocate(size_bytes, what)};
          },
          py::arg("size_bytes"), py::kw_only(), py::arg("what"), Release(), "Zero-filled device memory.")
      .def(
          "allocate_pinned",
          [](BoundDevice& self, std::size_t size_bytes) {
            return BoundMemory{self.device->allocate_pinned(size_bytes)};
          },
          py::arg("size_bytes"), Release())
      .def(
          "download",
          [](BoundDevice& self, std::uintptr_t source, std::size_t size_bytes) {
            std::string bytes(size_bytes, '\0');
            {
              const py::gil_scoped_release release;
              self.device->download(bytes.data(), reinterpret_cast<const void*>(source), size_bytes);
            }
            return py::bytes(bytes);
          },
          py::arg("source"), py::kw_only(), py::arg("size_bytes"), "Device memory, after all work put in before.")
      .def(
          "upload",
          [](BoundDevice& self, std::uintptr_t destination, const std::string& bytes) {
            self.device->upload(reinterpret_cast<void*>(destination), bytes.data(), bytes.size());
          },
          py::arg("destination"), py::arg("data"), Release(), "Into device memory, after all work put in before.");
}

}  // namespace

Lane lane_from_name(const std::string& name) {
  if (name == "compute") return Lane::kCompute;
  if (name == "gather") return Lane::kGather;
  if (name == "reduce") return Lane::kReduce;
  if (name == "to_host") return Lane::kToHost;
  if (name == "from_host") return Lane::kFromHost;
  throw ArgumentError("'" + name + "' is not a lane; use compute, gather, reduce, to_host or from_host");
}

BoundDeviceClass bind_cuda_device(py::module_& m) {
  py::class_<BoundMark>(m, "Mark", "A point in a lane.");
  py::class_<BoundMemory>(m, "Memory", "Device or pinned memory, given back with the last reference.")
      .def_property_readonly(
          "address", [](const BoundMemory& self) { return reinterpret_cast<std::uintptr_t>(self.bytes.get()); });
  BoundDeviceClass device(m, "CudaDevice", "One device with its lanes, what computes on it, and its kernels.");
  device.def_property_readonly("ordinal", [](const BoundDevice& self) { return self.device->ordinal(); })
      .def(
          "parts", [](const BoundDevice& self) { return to_capsule(DeviceParts{self.device, self.adam}); },
          "What the core takes as its device.");
  bind_lanes(device);
  bind_memory(device);
  m.def("make_device", &make_device, py::arg("device"), py::kw_only(), py::arg("on_out_of_memory"),
        "`on_out_of_memory` gives back device memory that others hold unused; an allocation that fails calls it and is "
        "tried once more.",
        Release());
  return device;
}

}  // namespace zb
