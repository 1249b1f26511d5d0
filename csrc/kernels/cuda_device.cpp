#include "kernels/cuda_device.h"

#include <nvtx3/nvToolsExt.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>

#include "common/cuda_check.h"
#include "common/error.h"
#include "kernels/cuda_device_info.h"
#include "kernels/cuda_kernels.h"

namespace zb {
namespace {

constexpr double kMiB = 1024.0 * 1024.0;

std::string in_mib(std::size_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", static_cast<double>(bytes) / kMiB);
  return text;
}

OwnStream make_stream() {
  int least = 0;
  int greatest = 0;
  ZB_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  cudaStream_t stream = nullptr;
  ZB_CUDA(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest));
  return OwnStream(stream);
}

const CudaMark& cuda_mark(const MarkPtr& mark) { return static_cast<const CudaMark&>(*mark); }

}  // namespace

CudaDevice::CudaDevice(int ordinal, std::function<void()> on_out_of_memory)
    : ordinal_(ordinal), on_out_of_memory_(std::move(on_out_of_memory)) {
  const int count = device_count();
  ZB_EXPECT(ordinal >= 0 && ordinal < count, "device " + std::to_string(ordinal) +
                                                 " is out of range: this machine has " + std::to_string(count) +
                                                 " devices, numbered from 0");
  bind_thread();
  for (std::size_t lane = 0; lane < kLaneNum; ++lane) {
    if (lane == static_cast<std::size_t>(Lane::kCompute)) continue;
    own_streams_[lane] = make_stream();
    streams_[lane] = own_streams_[lane].get();
  }
  host_stream_ = make_stream();
  for (auto& scratch : sum_scratch_) scratch = allocate(sum_scratch_bytes(), "partial sums of gradient norms");
}

void CudaDevice::bind_thread() {
  int current = -1;
  ZB_CUDA(cudaGetDevice(&current));
  if (current != ordinal_) ZB_CUDA(cudaSetDevice(ordinal_));
}

void CudaDevice::set_compute_stream(void* stream) {
  streams_[static_cast<std::size_t>(Lane::kCompute)] = static_cast<cudaStream_t>(stream);
}

MarkPtr CudaDevice::mark_stream(cudaStream_t stream) {
  bind_thread();
  return std::make_shared<const CudaMark>(events_, stream);
}

MarkPtr CudaDevice::mark_for_host(Lane lane) {
  bind_thread();
  return std::make_shared<const CudaMark>(events_for_host_, cuda_stream(lane));
}

void CudaDevice::hold_stream(cudaStream_t stream, const MarkPtr& mark) {
  if (mark == nullptr || cuda_mark(mark).stream() == stream) return;  // a stream runs in order
  bind_thread();
  ZB_CUDA(cudaStreamWaitEvent(stream, cuda_mark(mark).event(), 0));
}

bool CudaDevice::has_passed(const MarkPtr& mark) {
  if (mark == nullptr) return true;
  bind_thread();
  const cudaError_t code = cudaEventQuery(cuda_mark(mark).event());
  if (code == cudaErrorNotReady) {
    static_cast<void>(cudaGetLastError());
    return false;
  }
  ZB_CUDA(code);
  return true;
}

void CudaDevice::synchronize(const MarkPtr& mark) {
  if (mark == nullptr) return;
  bind_thread();
  ZB_CUDA(cudaEventSynchronize(cuda_mark(mark).event()));
}

void CudaDevice::synchronize() {
  bind_thread();
  for (cudaStream_t stream : streams_) ZB_CUDA(cudaStreamSynchronize(stream));
}

std::shared_ptr<std::byte> CudaDevice::allocate(std::size_t bytes, std::string_view what) {
  bind_thread();
  bytes = std::max<std::size_t>(bytes, 1);  // so that nothing has an address too
  void* taken = nullptr;
  take_memory(bytes, what, [&] { return cudaMalloc(&taken, bytes); });
  std::shared_ptr<std::byte> memory(static_cast<std::byte*>(taken),
                                    [](std::byte* held) { static_cast<void>(cudaFree(held)); });
  zero_fresh_memory(memory.get(), bytes);
  return memory;
}

void CudaDevice::zero_fresh_memory(void* memory, std::size_t bytes) {
  ZB_CUDA(cudaMemsetAsync(memory, 0, bytes, host_stream_.get()));
  ZB_CUDA(cudaStreamSynchronize(host_stream_.get()));
}

void CudaDevice::take_memory(std::size_t bytes, std::string_view what, const std::function<cudaError_t()>& take) {
  cudaError_t code = take();
  if (code == cudaErrorMemoryAllocation && on_out_of_memory_) {
    static_cast<void>(cudaGetLastError());
    on_out_of_memory_();
    bind_thread();
    code = take();
  }
  if (code == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    ZB_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
    throw OutOfMemoryError("cuda:" + std::to_string(ordinal_) + " ran out of memory: " + std::string(what) + " needs " +
                           in_mib(bytes) + " MiB, and " + in_mib(free_bytes) + " of " + in_mib(total_bytes) +
                           " MiB are free; use a higher ZeRO stage, more devices, a smaller model or a smaller batch");
  }
  ZB_CUDA(code);
}

std::shared_ptr<std::byte> CudaDevice::allocate_pinned(std::size_t bytes) {
  bind_thread();
  void* memory = nullptr;
  ZB_CUDA(cudaHostAlloc(&memory, std::max<std::size_t>(bytes, 1), cudaHostAllocPortable));
  return {static_cast<std::byte*>(memory), [](std::byte* held) { static_cast<void>(cudaFreeHost(held)); }};
}

void CudaDevice::register_host(std::byte* data, std::size_t bytes) {
  bind_thread();
  const cudaError_t code = cudaHostRegister(data, bytes, cudaHostRegisterPortable);
  if (code == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    throw OutOfMemoryError("the driver cannot pin " + in_mib(bytes) + " MiB of host memory for cuda:" +
                           std::to_string(ordinal_) + "; offload less, or use more ranks or hosts");
  }
  ZB_CUDA(code);
}

void CudaDevice::unregister_host(std::byte* data) noexcept {
  try {
    bind_thread();  // on another device's thread that one would get a context, and an error
    static_cast<void>(cudaHostUnregister(data));
  } catch (const std::exception&) {
    // The driver is on its way out, or this is a forked child.
  }
}

void CudaDevice::cast(Lane lane, void* destination, DType destination_dtype, const void* source, DType source_dtype,
                      std::size_t numel) {
  const PackItem item{destination, destination_dtype, source, source_dtype, numel, false};
  pack(lane, {&item, 1});
}

void CudaDevice::add(Lane lane, void* destination, DType destination_dtype, const void* source, DType source_dtype,
                     std::size_t numel) {
  const PackItem item{destination, destination_dtype, source, source_dtype, numel, true};
  pack(lane, {&item, 1});
}

void CudaDevice::sum(Lane lane, void* destination, std::span<const void* const> sources, DType dtype,
                     std::size_t numel) {
  bind_thread();
  launch_sum(destination, sources, dtype, numel, cuda_stream(lane));
}

void CudaDevice::pack(Lane lane, std::span<const PackItem> items) {
  bind_thread();
  launch_pack(items, cuda_stream(lane));
}

void CudaDevice::zero(Lane lane, void* destination, std::size_t bytes) {
  if (bytes == 0) return;
  bind_thread();
  ZB_CUDA(cudaMemsetAsync(destination, 0, bytes, cuda_stream(lane)));
}

void CudaDevice::copy(Lane lane, void* destination, const void* source, std::size_t bytes) {
  if (bytes == 0) return;
  bind_thread();
  ZB_CUDA(cudaMemcpyAsync(destination, source, bytes, cudaMemcpyDefault, cuda_stream(lane)));
}

void CudaDevice::copy_to_pinned(Lane lane, std::byte* host, const void* source, std::size_t bytes) {
  if (bytes == 0) return;
  bind_thread();
  ZB_CUDA(cudaMemcpyAsync(host, source, bytes, cudaMemcpyDeviceToHost, cuda_stream(lane)));
}

void CudaDevice::copy_from_pinned(Lane lane, void* destination, const std::byte* host, std::size_t bytes) {
  if (bytes == 0) return;
  bind_thread();
  ZB_CUDA(cudaMemcpyAsync(destination, host, bytes, cudaMemcpyHostToDevice, cuda_stream(lane)));
}

void CudaDevice::sums_of_squares(Lane lane, DType dtype, std::span<const SquareSum> sums) {
  bind_thread();
  launch_sums_of_squares(dtype, sums, sum_scratch_[static_cast<std::size_t>(lane)].get(), cuda_stream(lane));
}

void CudaDevice::combine_norm(Lane lane, const NormArguments& arguments) {
  bind_thread();
  launch_combine_norm(arguments, cuda_stream(lane));
}

void CudaDevice::download(void* host, const void* source, std::size_t bytes) {
  blocking_copy(host, source, bytes, cudaMemcpyDeviceToHost);
}

void CudaDevice::upload(void* destination, const void* host, std::size_t bytes) {
  blocking_copy(destination, host, bytes, cudaMemcpyHostToDevice);
}

void CudaDevice::blocking_copy(void* destination, const void* source, std::size_t bytes, cudaMemcpyKind kind) {
  if (bytes == 0) return;
  synchronize();
  ZB_CUDA(cudaMemcpyAsync(destination, source, bytes, kind, host_stream_.get()));
  // Also where the host's memory is pageable: the call above may return before the device has its data.
  ZB_CUDA(cudaStreamSynchronize(host_stream_.get()));
}

void CudaDevice::push_range(const char* name) { nvtxRangePushA(name); }

void CudaDevice::pop_range() noexcept { nvtxRangePop(); }

RangeId CudaDevice::start_range(const char* name) { return nvtxRangeStartA(name); }

void CudaDevice::end_range(RangeId id) noexcept { nvtxRangeEnd(id); }

}  // namespace zb
