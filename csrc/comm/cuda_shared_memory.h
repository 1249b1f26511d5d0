// Device memory that other processes may map: the driver's allocations, passed as file descriptors. Only files of the
// CUDA module include this.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/cuda_driver.h"
#include "comm/file_descriptor.h"
#include "kernels/cuda_device.h"

namespace zb {

// The driver's handle of memory that is mapped nowhere yet. What is mapped outlives its handle.
class MemoryHandle {
 public:
  MemoryHandle() = default;
  // `bytes` is a multiple of mapping_granularity_bytes. Throws OutOfMemoryError naming `what`.
  static MemoryHandle create(CudaDevice& device, std::size_t bytes, std::string_view what);
  static MemoryHandle import(CudaDevice& device, std::size_t bytes, const shm::FileDescriptor& descriptor);
  MemoryHandle(MemoryHandle&& other) noexcept;
  MemoryHandle& operator=(MemoryHandle&& other) noexcept;
  MemoryHandle(const MemoryHandle&) = delete;
  MemoryHandle& operator=(const MemoryHandle&) = delete;
  ~MemoryHandle() { reset(); }

  CUmemGenericAllocationHandle get() const noexcept { return handle_; }
  std::size_t bytes() const noexcept { return bytes_; }
  shm::FileDescriptor export_descriptor() const;
  void reset() noexcept;

 private:
  CUmemGenericAllocationHandle handle_ = 0;
  std::size_t bytes_ = 0;  // 0: there is none
};

// Addresses at which memory appears, one handle's after the other's, where a device may read and write it. Work that
// touches it must have ended before this goes.
class AddressRange {
 public:
  AddressRange() = default;
  AddressRange(CudaDevice& device, std::span<const MemoryHandle* const> handles);
  AddressRange(AddressRange&& other) noexcept;
  AddressRange& operator=(AddressRange&& other) noexcept;
  AddressRange(const AddressRange&) = delete;
  AddressRange& operator=(const AddressRange&) = delete;
  ~AddressRange() { reset(); }

  std::byte* data() const noexcept { return reinterpret_cast<std::byte*>(address_); }
  void reset() noexcept;

 private:
  CUdeviceptr address_ = 0;  // 0: nothing is reserved
  std::size_t bytes_ = 0;
  std::vector<std::size_t> mapped_bytes_;  // of each handle, from the beginning on
};

// An allocation, or a peer's, mapped where this device may read and write it. The memory lives until the last process
// has dropped it. Work that touches it must have ended before.
class MappedMemory {
 public:
  MappedMemory() = default;
  // Zero-filled; `bytes` is a multiple of mapping_granularity_bytes. Throws OutOfMemoryError naming `what`.
  static MappedMemory create(CudaDevice& device, std::size_t bytes, std::string_view what);
  static MappedMemory import(CudaDevice& device, std::size_t bytes, const shm::FileDescriptor& descriptor);

  std::byte* data() const noexcept { return range_.data(); }
  const MemoryHandle& handle() const noexcept { return handle_; }

 private:
  MappedMemory(CudaDevice& device, MemoryHandle handle);

  MemoryHandle handle_;
  AddressRange range_;
};

std::size_t mapping_granularity_bytes(const CudaDevice& device);

// Why this device cannot take part, as one sentence; empty where it can.
std::string sharing_obstacle(const CudaDevice& device);

}  // namespace zb
