// One binder per part of the CUDA module; cuda_module.cpp calls them all.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>

#include "kernels/cuda_device.h"
#include "optim/device_adam.h"

namespace zb {

// What Python holds of a device. Addresses of device memory are whole numbers there.
struct BoundDevice {
  std::shared_ptr<CudaDevice> device;
  std::shared_ptr<DeviceAdam> adam;
};
using BoundDeviceClass = pybind11::class_<BoundDevice>;

BoundDeviceClass bind_cuda_device(pybind11::module_& m);
void bind_cuda_kernels(pybind11::module_& m, BoundDeviceClass& device);
void bind_cuda_comm(pybind11::module_& m);

// "compute", "gather" or "reduce"; throws ArgumentError.
Lane lane_from_name(const std::string& name);

}  // namespace zb
