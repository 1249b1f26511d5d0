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

MemoryHandle::MemoryHandle(MemoryHandle&& other) noexcept
    : handle_(other.handle_), bytes_(std::exchange(other.bytes_, 0)) {}

MemoryHandle& MemoryHandle::operator=(MemoryHandle&& other) noexcept {
  if (this != &other) {
    reset();
    handle_ = other.handle_;
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

MemoryHandle MemoryHandle::create(CudaDevice& device, std::size_t bytes, std::string_view what) {
  MemoryHandle memory;
  const CUmemAllocationProp properties = properties_of(device);
  device.bind_thread();
  device.take_memory(bytes, what, [&] {
    const CUresult code = cuda_driver().mem_create(&memory.handle_, bytes, &properties, 0);
    if (code == CUDA_ERROR_OUT_OF_MEMORY) return cudaErrorMemoryAllocation;
    check_driver(code, "cuMemCreate");
    return cudaSuccess;
  });
  memory.bytes_ = bytes;
  return memory;
}

MemoryHandle MemoryHandle::import(CudaDevice& device, std::size_t bytes, const shm::FileDescriptor& descriptor) {
  MemoryHandle memory;
  device.bind_thread();
  void* const number = reinterpret_cast<void*>(static_cast<std::uintptr_t>(descriptor.get()));
  check_driver(cuda_driver().mem_import(&memory.handle_, number, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
               "cuMemImportFromShareableHandle");
  memory.bytes_ = bytes;
  return memory;
}

shm::FileDescriptor MemoryHandle::export_descriptor() const {
  int number = -1;
  check_driver(cuda_driver().mem_export(&number, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
               "cuMemExportToShareableHandle");
  shm::FileDescriptor descriptor(number);
  ZB_SYS(::fcntl(descriptor.get(), F_SETFD, FD_CLOEXEC));
  return descriptor;
}

// Here and below errors mean that the driver is on its way out, or that this is a forked child: nothing is left to do
// then.
void MemoryHandle::reset() noexcept {
  if (std::exchange(bytes_, 0) != 0) static_cast<void>(cuda_driver().mem_release(handle_));
}

AddressRange::AddressRange(AddressRange&& other) noexcept
    : address_(std::exchange(other.address_, 0)),
      bytes_(other.bytes_),
      mapped_bytes_(std::exchange(other.mapped_bytes_, {})) {}

AddressRange& AddressRange::operator=(AddressRange&& other) noexcept {
  if (this != &other) {
    reset();
    address_ = std::exchange(other.address_, 0);
    bytes_ = other.bytes_;
    mapped_bytes_ = std::exchange(other.mapped_bytes_, {});
  }
  return *this;
}

AddressRange::AddressRange(CudaDevice& device, std::span<const MemoryHandle* const> handles) {
  const CudaDriver& driver = cuda_driver();
  AddressRange range;  // gives back what it has where the next step fails
  for (const MemoryHandle* handle : handles) range.bytes_ += handle->bytes();
  device.bind_thread();
  CUdeviceptr address = 0;
  check_driver(driver.mem_address_reserve(&address, range.bytes_, 0, 0, 0), "cuMemAddressReserve");
  range.address_ = address;
  for (const MemoryHandle* handle : handles) {
    check_driver(driver.mem_map(address, handle->bytes(), 0, handle->get(), 0), "cuMemMap");
    range.mapped_bytes_.push_back(handle->bytes());
    address += handle->bytes();
  }
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device.ordinal();
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  check_driver(driver.mem_set_access(range.address_, range.bytes_, &access, 1), "cuMemSetAccess");
  *this = std::move(range);
}

void AddressRange::reset() noexcept {
  if (address_ == 0) return;
  const CudaDriver& driver = cuda_driver();
  CUdeviceptr address = address_;
  for (const std::size_t bytes : mapped_bytes_) {
    static_cast<void>(driver.mem_unmap(address, bytes));
    address += bytes;
  }
  mapped_bytes_.clear();
  static_cast<void>(driver.mem_address_free(std::exchange(address_, 0), bytes_));
}

MappedMemory::MappedMemory(CudaDevice& device, MemoryHandle handle) : handle_(std::move(handle)) {
  const MemoryHandle* const all = &handle_;
  range_ = AddressRange(device, {&all, 1});
}

MappedMemory MappedMemory::create(CudaDevice& device, std::size_t bytes, std::string_view what) {
  MappedMemory memory(device, MemoryHandle::create(device, bytes, what));
  device.zero_fresh_memory(memory.data(), bytes);
  return memory;
}

MappedMemory MappedMemory::import(CudaDevice& device, std::size_t bytes, const shm::FileDescriptor& descriptor) {
  return MappedMemory(device, MemoryHandle::import(device, bytes, descriptor));
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
