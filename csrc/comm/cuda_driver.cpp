#include "comm/cuda_driver.h"

#include <cuda_runtime.h>

#include <string>

#include "common/cuda_check.h"
#include "common/error.h"

namespace zb {
namespace {

// The oldest CUDA whose driver is asked for these calls: the one that gave the memory operations of streams their
// present form.
constexpr unsigned kCudaVersion = 12000;

template <typename Call>
void find(Call& call, const char* name) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  ZB_CUDA(cudaGetDriverEntryPointByVersion(name, &address, kCudaVersion, cudaEnableDefault, &result));
  if (result != cudaDriverEntryPointSuccess || address == nullptr) {
    throw CudaError(std::string("the CUDA driver has no ") + name + "; install a newer one", cudaErrorNotSupported);
  }
  call = reinterpret_cast<Call>(address);
}

CudaDriver load() {
  CudaDriver driver;
  find(driver.device_get_attribute, "cuDeviceGetAttribute");
  find(driver.get_error_string, "cuGetErrorString");
  find(driver.mem_address_free, "cuMemAddressFree");
  find(driver.mem_address_reserve, "cuMemAddressReserve");
  find(driver.mem_create, "cuMemCreate");
  find(driver.mem_export, "cuMemExportToShareableHandle");
  find(driver.mem_granularity, "cuMemGetAllocationGranularity");
  find(driver.mem_import, "cuMemImportFromShareableHandle");
  find(driver.mem_map, "cuMemMap");
  find(driver.mem_release, "cuMemRelease");
  find(driver.mem_set_access, "cuMemSetAccess");
  find(driver.mem_unmap, "cuMemUnmap");
  find(driver.stream_batch_mem_op, "cuStreamBatchMemOp");
  return driver;
}

}  // namespace

const CudaDriver& cuda_driver() {
  static const CudaDriver driver = load();
  return driver;
}

void check_driver(CUresult code, const char* call, std::source_location where) {
  if (code == CUDA_SUCCESS) return;
  const char* text = nullptr;
  if (cuda_driver().get_error_string(code, &text) != CUDA_SUCCESS || text == nullptr) text = "an unknown error";
  const std::string message = std::string(call) + ": " + text + " (" + std::to_string(code) + ", " + where.file_name() +
                              ":" + std::to_string(where.line()) + ")";
  if (code == CUDA_ERROR_OUT_OF_MEMORY) throw OutOfMemoryError(message);
  throw CudaError(message, static_cast<int>(code));
}

}  // namespace zb
