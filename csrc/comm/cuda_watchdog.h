// What the watchdog's thread does first, for every transport of a CUDA device. Only files of the CUDA module include
// this.
#pragma once

#include <cuda_runtime.h>

#include "common/cuda_check.h"
#include "kernels/device.h"

namespace zb {

inline void enter_watchdog_thread(Device& device) {
  device.bind_thread();
  // This thread's queries must not break a capture that another thread has begun.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  ZB_CUDA(cudaThreadExchangeStreamCaptureMode(&mode));
}

}  // namespace zb
