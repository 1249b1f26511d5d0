// Communicators of GPUs: they go in and out as capsules, which zerobench._core holds for Python.
#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "bindings/capsules.h"
#include "bindings/cuda_bindings.h"
#include "comm/cuda_paced_transport.h"
#include "comm/cuda_peer_communicator.h"
#include "comm/nccl_communicator.h"

namespace py = pybind11;

namespace zb {
namespace {

std::unique_ptr<Communicator> control_of(const py::object& capsule) {
  auto held = std::move(in_capsule<std::unique_ptr<Communicator>>(capsule));
  ZB_EXPECT_STATE(held != nullptr, "the control communicator was taken out of its capsule before");
  return held;
}

std::chrono::milliseconds timeout_of(double timeout_s) {
  ZB_EXPECT(timeout_s > 0 && std::isfinite(timeout_s),
            "timeout_s must be a positive number of seconds, got " + std::to_string(timeout_s));
  return std::chrono::milliseconds(static_cast<std::int64_t>(timeout_s * 1e3));
}

py::capsule bound_make_nccl_communicator(const BoundDevice& device, const std::string& lane, const py::object& control,
                                         double timeout_s, bool symmetric, std::shared_ptr<DeviceLink> link) {
  NcclOptions options{.device = device.device,
                      .lane = lane_from_name(lane),
                      .control = control_of(control),
                      .timeout = timeout_of(timeout_s),
                      .buffers = symmetric ? NcclBuffers::kSymmetric : NcclBuffers::kPlain,
                      .link = std::move(link)};
  std::unique_ptr<Communicator> communicator;
  {
    const py::gil_scoped_release release;
    communicator = make_nccl_communicator(std::move(options));
  }
  return to_capsule(std::move(communicator));
}

std::string bound_peer_obstacle(const BoundDevice& device, const py::object& control, double timeout_s) {
  Communicator* const held = in_capsule<std::unique_ptr<Communicator>>(control).get();
  ZB_EXPECT_STATE(held != nullptr, "the control communicator was taken out of its capsule before");
  const auto timeout = timeout_of(timeout_s);
  const py::gil_scoped_release release;
  return peer_obstacle(device.device, *held, timeout);
}

py::capsule bound_make_peer_communicator(const BoundDevice& device, const std::string& lane, const py::object& control,
                                         double timeout_s) {
  PeerOptions options{.device = device.device,
                      .lane = lane_from_name(lane),
                      .control = control_of(control),
                      .timeout = timeout_of(timeout_s)};
  std::unique_ptr<Communicator> communicator;
  {
    const py::gil_scoped_release release;
    communicator = make_peer_communicator(std::move(options));
  }
  return to_capsule(std::move(communicator));
}

}  // namespace

void bind_cuda_comm(py::module_& m) {
  py::class_<DeviceLink, std::shared_ptr<DeviceLink>>(m, "DeviceLink", "A link that ranks on GPUs pretend to have.")
      .def(py::init([](const BoundDevice& device, double bytes_per_s, double latency_s) {
             return std::make_shared<DeviceLink>(device.device, link_speed(bytes_per_s, latency_s));
           }),
           py::kw_only(), py::arg("device"), py::arg("bytes_per_s"), py::arg("latency_s"));
  m.def("make_nccl_communicator", &bound_make_nccl_communicator, py::kw_only(), py::arg("device"), py::arg("lane"),
        py::arg("control"), py::arg("timeout_s"), py::arg("symmetric") = false,
        py::arg("link") = std::shared_ptr<DeviceLink>(),
        "NCCL in a lane of the device, over the capsule of a host communicator that names the ranks. A capsule, too. "
        "Collective. `symmetric` puts buffers into NCCL's symmetric windows, whose allocation is collective. "
        "Operations take the time that `link` needs, if it is given.");
  m.def("peer_obstacle", &bound_peer_obstacle, py::kw_only(), py::arg("device"), py::arg("control"),
        py::arg("timeout_s"),
        "Why make_peer_communicator cannot connect these ranks, as one sentence; empty where it can. Collective. The "
        "capsule keeps its communicator.");
  m.def("make_peer_communicator", &bound_make_peer_communicator, py::kw_only(), py::arg("device"), py::arg("lane"),
        py::arg("control"), py::arg("timeout_s"),
        "GPUs of one host by copy engines, in a lane of the device, over the capsule of a host communicator that names "
        "the ranks. A capsule, too. Collective.");
}

}  // namespace zb
