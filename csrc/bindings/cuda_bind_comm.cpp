// make_nccl_communicator: communicators go in and out as capsules, which zerobench._core holds for Python.
#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "bindings/capsules.h"
#include "bindings/cuda_bindings.h"
#include "comm/nccl_communicator.h"

namespace py = pybind11;

namespace zb {
namespace {

py::capsule bound_make_nccl_communicator(const BoundDevice& device, const std::string& lane, const py::object& control,
                                         double timeout_s, bool symmetric) {
  ZB_EXPECT(timeout_s > 0 && std::isfinite(timeout_s), "timeout_s must be a positive number of seconds");
  auto held = std::move(in_capsule<std::unique_ptr<Communicator>>(control));
  ZB_EXPECT_STATE(held != nullptr, "the control communicator was taken out of its capsule before");
  NcclOptions options{.device = device.device,
                      .lane = lane_from_name(lane),
                      .control = std::move(held),
                      .timeout = std::chrono::milliseconds(static_cast<std::int64_t>(timeout_s * 1e3)),
                      .buffers = symmetric ? NcclBuffers::kSymmetric : NcclBuffers::kPlain};
  std::unique_ptr<Communicator> communicator;
  {
    const py::gil_scoped_release release;
    communicator = make_nccl_communicator(std::move(options));
  }
  return to_capsule(std::move(communicator));
}

}  // namespace

void bind_cuda_comm(py::module_& m) {
  m.def("make_nccl_communicator", &bound_make_nccl_communicator, py::kw_only(), py::arg("device"), py::arg("lane"),
        py::arg("control"), py::arg("timeout_s"), py::arg("symmetric") = false,
        "NCCL in a lane of the device, over the capsule of a host communicator that names the ranks. A capsule, too. "
        "Collective. `symmetric` puts buffers into NCCL's symmetric windows, whose allocation is collective.");
}

}  // namespace zb
