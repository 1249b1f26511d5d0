// Launchers of the kernels behind CudaDevice. They return after the launch; arguments mean what device.h says.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "common/error.h"
#include "kernels/device.h"

namespace zb {

// An address in elements. Two of them can be aligned to groups of elements together when they differ by whole groups.
inline std::size_t element_index(const void* address, DType dtype) {
  const auto position = reinterpret_cast<std::uintptr_t>(address);
  ZB_EXPECT(position % dtype_bytes(dtype) == 0,
            "the address " + std::to_string(position) + " is not one of a " + std::string(dtype_name(dtype)));
  return position / dtype_bytes(dtype);
}

// One launch per kPackItemNum items (pack.cu).
void launch_pack(std::span<const PackItem> items, cudaStream_t stream);

void launch_sum(void* destination, std::span<const void* const> sources, DType dtype, std::size_t numel,
                cudaStream_t stream);

// Bytes of device memory, zero-filled once, that calls of one stream share.
std::size_t sum_scratch_bytes();
void launch_sums_of_squares(DType dtype, std::span<const SquareSum> sums, void* scratch, cudaStream_t stream);

void launch_combine_norm(const NormArguments& arguments, cudaStream_t stream);

}  // namespace zb
