// Device memory that other processes may map: the driver's allocations, passed as file descriptors. Only files of the
// CUDA module include this.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "comm/cuda_driver.h"
#include "comm/file_descriptor.h"
#include "kernels/cuda_device.h"

namespace zb {

// An allocation, or a peer's, mapped where this device may read and write it. The memory lives until the last process
// has dropped it. Work that touches it must have ended before.
class MappedMemory {
 public:
  MappedMemory() = default;
  // Zero-filled; `bytes` is a multiple of mapping_granularity_bytes. Throws OutOfMemoryError naming `what`.
  static MappedMemory create(CudaDevice& device, std::size_t bytes, std::string_view what);
  static MappedMemory import(CudaDevice& device, std::size_t bytes, const shm::FileDescriptor& descriptor);
  MappedMemory(MappedMemory&& other) noexcept;
  MappedMemory& operator=(MappedMemory&& other) noexcept;
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;
  ~MappedMemory() { reset(); }

  std::byte* data() const noexcept { return reinterpret_cast<std::byte*>(address_); }
  shm::FileDescriptor export_descriptor() const;
  void reset() noexcept;

 private:
  void map(CudaDevice& device, std::size_t bytes);

  CUmemGenericAllocationHandle handle_ = 0;
  bool has_handle_ = false;
  CUdeviceptr address_ = 0;  // 0: nothing is reserved
  std::size_t bytes_ = 0;
  bool is_mapped_ = false;
};

std::size_t mapping_granularity_bytes(const CudaDevice& device);

// Why this device cannot take part, as one sentence; empty where it can.
std::string sharing_obstacle(const CudaDevice& device);

}  // namespace zb
