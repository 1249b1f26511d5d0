// ZB_CUDA(call): throws CudaError when a CUDA runtime call fails. Only files of the CUDA module include this.
#pragma once

#include <cuda_runtime.h>

#include <source_location>
#include <stdexcept>
#include <string>

namespace zb {

// A CUDA runtime call failed (zerobench.Error; zerobench.OutOfMemoryError for cudaErrorMemoryAllocation).
class CudaError : public std::runtime_error {
 public:
  CudaError(const std::string& message, cudaError_t code) : std::runtime_error(message), code_(code) {}
  cudaError_t code() const noexcept { return code_; }

 private:
  cudaError_t code_;
};

namespace detail {

[[noreturn]] inline void throw_cuda(cudaError_t code, const char* call, std::source_location where) {
  throw CudaError(std::string(call) + ": " + cudaGetErrorName(code) + ", " + cudaGetErrorString(code) + " (" +
                      where.file_name() + ":" + std::to_string(where.line()) + ")",
                  code);
}

}  // namespace detail
}  // namespace zb

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
