// The CPU as a device: work runs at once, in the calling thread.
#pragma once

#include <memory>

#include "kernels/device.h"

namespace zb {

std::shared_ptr<Device> make_cpu_device();

}  // namespace zb
