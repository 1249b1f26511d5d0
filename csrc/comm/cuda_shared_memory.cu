#include <fcntl.h>

#include <string>
#include <utility>

#include "comm/cuda_shared_memory.h"
#include "common/error.h"

namespace zb {
namespace {

CUmemAllocationProp properties_of(const CudaDevice& device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device.ordinal();
  return properties;
}

bool has(const CudaDevice& device, CUdevice_attribute attribute) {
  int value = 0;
  check_driver(cuda_driver().device_get_attribute(&value, attribute, device.ordinal()), "cuDeviceGetAttribute");
  return value != 0;
}

}  // namespace

MappedMemory::MappedMemory(MappedMemory&& other) noexcept
    : handle_(other.handle_),
      has_handle_(std::exchange(other.has_handle_, false)),
      address_(std::exchange(other.address_, 0)),
      bytes_(other.bytes_),
      is_mapped_(std::exchange(other.is_mapped_, false)) {}

MappedMemory& MappedMemory::operator=(MappedMemory&& other) noexcept {
  if (this != &other) {
    reset();
    handle_ = other.handle_;
    has_handle_ = std::exchange(other.has_handle_, false);
    address_ = std::exchange(other.address_, 0);
    bytes_ = other.bytes_;
    is_mapped_ = std::exchange(other.is_mapped_, false);
  }
  return *this;
}

MappedMemory MappedMemory::create(CudaDevice& device, std::size_t bytes, std::string_view what) {
  MappedMemory memory;
  const CUmemAllocationProp properties = properties_of(device);
  device.bind_thread();
  device.take_memory(bytes, what, [&] {
    const CUresult code = cuda_driver().mem_create(&memory.handle_, bytes, &properties, 0);
    if (code == CUDA_ERROR_OUT_OF_MEMORY) return cudaErrorMemoryAllocation;
    check_driver(code, "cuMemCreate");
    return cudaSuccess;
  });
  memory.has_handle_ = true;
  memory.map(device, bytes);
  device.zero_fresh_memory(memory.data(), bytes);
  return memory;
}

MappedMemory MappedMemory::import(CudaDevice& device, std::size_t bytes, const shm::FileDescriptor& descriptor) {
  MappedMemory memory;
  device.bind_thread();
  void* const number = reinterpret_cast<void*>(static_cast<std::uintptr_t>(descriptor.get()));
  check_driver(cuda_driver().mem_import(&memory.handle_, number, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
               "cuMemImportFromShareableHandle");
  memory.has_handle_ = true;
  memory.map(device, bytes);
  return memory;
}

void MappedMemory::map(CudaDevice& device, std::size_t bytes) {
  const CudaDriver& driver = cuda_driver();
  CUdeviceptr address = 0;
  check_driver(driver.mem_address_reserve(&address, bytes, 0, 0, 0), "cuMemAddressReserve");
  address_ = address;
  bytes_ = bytes;
  check_driver(driver.mem_map(address_, bytes_, 0, handle_, 0), "cuMemMap");
  is_mapped_ = true;
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device.ordinal();
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  check_driver(driver.mem_set_access(address_, bytes_, &access, 1), "cuMemSetAccess");
}

shm::FileDescriptor MappedMemory::export_descriptor() const {
  int number = -1;
  check_driver(cuda_driver().mem_export(&number, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
               "cuMemExportToShareableHandle");
  shm::FileDescriptor descriptor(number);
  ZB_SYS(::fcntl(descriptor.get(), F_SETFD, FD_CLOEXEC));
  return descriptor;
}

// Errors mean that the driver is on its way out, or that this is a forked child: nothing is left to do then.
void MappedMemory::reset() noexcept {
  if (address_ == 0 && !has_handle_) return;
  const CudaDriver& driver = cuda_driver();
  if (std::exchange(is_mapped_, false)) static_cast<void>(driver.mem_unmap(address_, bytes_));
  if (address_ != 0) static_cast<void>(driver.mem_address_free(std::exchange(address_, 0), bytes_));
  if (std::exchange(has_handle_, false)) static_cast<void>(driver.mem_release(handle_));
}

std::size_t mapping_granularity_bytes(const CudaDevice& device) {
  const CUmemAllocationProp properties = properties_of(device);
  std::size_t bytes = 0;
  check_driver(cuda_driver().mem_granularity(&bytes, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
               "cuMemGetAllocationGranularity");
  return bytes;
}

std::string sharing_obstacle(const CudaDevice& device) {
  const std::string who = "cuda:" + std::to_string(device.ordinal());
  if (!has(device, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) ||
      !has(device, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)) {
    return who + " cannot share its memory with other processes by file descriptors";
  }
  if (!has(device, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS)) {
    return who + " has no 64-bit memory operations of streams";
  }
  return {};
}

}  // namespace zb
