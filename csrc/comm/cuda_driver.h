// The few calls of the CUDA driver that the runtime has no form of, found through the runtime so that nothing links
// libcuda. Only files of the CUDA module include this.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>

#include <source_location>

namespace zb {

struct CudaDriver {
  PFN_cuDeviceGetAttribute_v2000 device_get_attribute = nullptr;
  PFN_cuGetErrorString_v6000 get_error_string = nullptr;
  PFN_cuMemAddressFree_v10020 mem_address_free = nullptr;
  PFN_cuMemAddressReserve_v10020 mem_address_reserve = nullptr;
  PFN_cuMemCreate_v10020 mem_create = nullptr;
  PFN_cuMemExportToShareableHandle_v10020 mem_export = nullptr;
  PFN_cuMemGetAllocationGranularity_v10020 mem_granularity = nullptr;
  PFN_cuMemImportFromShareableHandle_v10020 mem_import = nullptr;
  PFN_cuMemMap_v10020 mem_map = nullptr;
  PFN_cuMemRelease_v10020 mem_release = nullptr;
  PFN_cuMemSetAccess_v10020 mem_set_access = nullptr;
  PFN_cuMemUnmap_v10020 mem_unmap = nullptr;
  PFN_cuStreamBatchMemOp_v11070 stream_batch_mem_op = nullptr;
};

// Throws CudaError where the driver lacks one of them.
const CudaDriver& cuda_driver();

// Throws OutOfMemoryError or CudaError unless `code` is CUDA_SUCCESS.
void check_driver(CUresult code, const char* call, std::source_location where = std::source_location::current());

}  // namespace zb
