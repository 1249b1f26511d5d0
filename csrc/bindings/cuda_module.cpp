// zerobench._cuda: what needs the CUDA runtime and NCCL. It includes no torch header: streams come as handles and
// device memory as addresses, so it compiles beside a CPU build of torch too.
#include <cuda_runtime.h>
#include <nccl.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>

#include "bindings/cuda_bindings.h"
#include "bindings/signals.h"
#include "bindings/translate.h"
#include "comm/nccl_check.h"
#include "common/error.h"
#include "kernels/cuda_device_info.h"
#include "kernels/fill.h"

namespace py = pybind11;

namespace {

int nccl_version() {
  int version = 0;
  ZB_NCCL(ncclGetVersion(&version));
  return version;
}

void fill_float(std::uintptr_t destination, float value, std::size_t numel, std::uintptr_t stream) {
  ZB_EXPECT(destination % alignof(float) == 0, "destination is not the address of a float");
  zb::fill(reinterpret_cast<float*>(destination), value, numel, reinterpret_cast<cudaStream_t>(stream));
}

}  // namespace

PYBIND11_MODULE(_cuda, m) {
  m.doc() = "The CUDA side of zerobench; importing it needs an NVIDIA driver.";
  py::register_local_exception_translator(zb::translate_exception);
  zb::set_signal_handlers(zb::run_python_signal_handlers);

  if (zb::cuda_versions().driver == 0) {
    throw py::import_error("zerobench._cuda needs an NVIDIA driver, and none is installed on this machine");
  }

  py::class_<zb::DeviceInfo>(m, "DeviceInfo")
      .def_readonly("name", &zb::DeviceInfo::name)
      .def_readonly("pci_bus_id", &zb::DeviceInfo::pci_bus_id)
      .def_readonly("compute_major", &zb::DeviceInfo::compute_major)
      .def_readonly("compute_minor", &zb::DeviceInfo::compute_minor)
      .def_readonly("multiprocessor_num", &zb::DeviceInfo::multiprocessor_num)
      .def_readonly("total_bytes", &zb::DeviceInfo::total_bytes)
      .def_readonly("l2_cache_bytes", &zb::DeviceInfo::l2_cache_bytes)
      .def_readonly("memory_bus_width_bits", &zb::DeviceInfo::memory_bus_width_bits);

  m.def("driver_version", [] { return zb::cuda_versions().driver; }, "1000 * major + 10 * minor.");
  m.def("runtime_version", [] { return zb::cuda_versions().runtime; }, "1000 * major + 10 * minor.");
  m.def("nccl_version", &nccl_version, "As ncclGetVersion: 10000 * major + 100 * minor + patch.");
  m.def("device_count", &zb::device_count);
  m.def("device_info", &zb::device_info, py::arg("device"));
  m.def("fill", &fill_float, "destination[i] = value, on the stream; returns after the launch.", py::arg("destination"),
        py::kw_only(), py::arg("value"), py::arg("numel"), py::arg("stream"), py::call_guard<py::gil_scoped_release>());

  zb::BoundDeviceClass device = zb::bind_cuda_device(m);
  zb::bind_cuda_kernels(m, device);
  zb::bind_cuda_comm(m);
}
