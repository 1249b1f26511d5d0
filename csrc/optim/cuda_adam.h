// Adam on CUDA devices: the bits of the scalar form (docs/decisions/0001-one-sequence-for-adam.md) at the speed of
// memory.
#pragma once

#include <memory>

#include "kernels/cuda_device.h"
#include "optim/device_adam.h"

namespace zb {

std::shared_ptr<DeviceAdam> make_cuda_adam(std::shared_ptr<CudaDevice> device);

}  // namespace zb
