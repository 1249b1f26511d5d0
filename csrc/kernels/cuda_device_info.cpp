#include "kernels/cuda_device_info.h"

#include "common/cuda_check.h"
#include "common/error.h"

namespace zb {

CudaVersions cuda_versions() {
  CudaVersions versions{};
  ZB_CUDA(cudaDriverGetVersion(&versions.driver));
  ZB_CUDA(cudaRuntimeGetVersion(&versions.runtime));
  return versions;
}

int device_count() {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  // Without a driver the runtime reports cudaErrorInsufficientDriver, as it does for one that is too old.
  if (code == cudaErrorNoDevice || (code == cudaErrorInsufficientDriver && cuda_versions().driver == 0)) {
    static_cast<void>(cudaGetLastError());
    return 0;
  }
  ZB_CUDA(code);
  return count;
}

DeviceInfo device_info(int device) {
  const int count = device_count();
  ZB_EXPECT(device >= 0 && device < count, "device " + std::to_string(device) + " is out of range: this machine has " +
                                               std::to_string(count) + " devices, numbered from 0");
  cudaDeviceProp properties{};
  ZB_CUDA(cudaGetDeviceProperties(&properties, device));
  char pci_bus_id[32] = {};
  ZB_CUDA(cudaDeviceGetPCIBusId(pci_bus_id, sizeof pci_bus_id, device));
  return {.name = properties.name,
          .pci_bus_id = pci_bus_id,
          .compute_major = properties.major,
          .compute_minor = properties.minor,
          .multiprocessor_num = properties.multiProcessorCount,
          .total_bytes = properties.totalGlobalMem,
          .l2_cache_bytes = static_cast<std::size_t>(properties.l2CacheSize),
          .memory_bus_width_bits = properties.memoryBusWidth};
}

}  // namespace zb
