// What the CUDA runtime says about this machine: versions and devices.
#pragma once

#include <cstddef>
#include <string>

namespace zb {

struct CudaVersions {
  int driver;   // 1000 * major + 10 * minor, the newest CUDA that the driver serves; 0 where no driver is installed
  int runtime;  // of the runtime linked into this module
};

struct DeviceInfo {
  std::string name;
  std::string pci_bus_id;  // domain:bus:device.function
  int compute_major;
  int compute_minor;
  int multiprocessor_num;
  std::size_t total_bytes;
  std::size_t l2_cache_bytes;
  int memory_bus_width_bits;
};

CudaVersions cuda_versions();

// 0 where no driver or no device is there; throws CudaError where a driver is there and does not answer.
int device_count();

DeviceInfo device_info(int device);

}  // namespace zb
