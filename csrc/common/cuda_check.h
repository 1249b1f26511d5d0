// ZB_CUDA(call): throws when a CUDA runtime call fails: OutOfMemoryError where memory ran out, else CudaError. Only
// files of the CUDA module include this.
#pragma once

#include <cuda_runtime.h>

#include <source_location>
#include <string>

#include "common/error.h"

namespace zb::detail {

[[noreturn]] inline void throw_cuda(cudaError_t code, const char* call, std::source_location where) {
  const std::string message = std::string(call) + ": " + cudaGetErrorName(code) + ", " + cudaGetErrorString(code) +
                              " (" + where.file_name() + ":" + std::to_string(where.line()) + ")";
  if (code == cudaErrorMemoryAllocation) throw OutOfMemoryError(message);
  throw CudaError(message, code);
}

}  // namespace zb::detail

// The failed call's error is also cleared from the runtime's last-error slot, so that a later launch check does not
// report it again.
#define ZB_CUDA(call)                                                            \
  do {                                                                           \
    const cudaError_t zb_code = (call);                                          \
    if (zb_code != cudaSuccess) [[unlikely]] {                                   \
      static_cast<void>(cudaGetLastError());                                     \
      ::zb::detail::throw_cuda(zb_code, #call, std::source_location::current()); \
    }                                                                            \
  } while (false)
