// A CUDA device with its lanes, for the engine and for communicators that work in them.
//
// Calls come from one thread at a time, of any thread (bind_thread and has_passed beside them, too, and a second thread
// in lanes of its own, see Device), and make the device that thread's current one. (They do not put back another
// device: making a device current for the first time takes memory on it.)
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <functional>
#include <memory>
#include <span>
#include <string_view>

#include "kernels/cuda_events.h"
#include "kernels/device.h"

namespace zb {

struct StreamDestroyer {
  void operator()(cudaStream_t stream) const noexcept { static_cast<void>(cudaStreamDestroy(stream)); }
};
using OwnStream = std::unique_ptr<CUstream_st, StreamDestroyer>;

class CudaDevice final : public Device, public HostRegistrar {
 public:
  // `on_out_of_memory` gives back device memory that others hold unused; an allocation that fails calls it and is tried
  // once more. Throws ArgumentError for a device that is not there.
  CudaDevice(int ordinal, std::function<void()> on_out_of_memory);

  int ordinal() const noexcept { return ordinal_; }
  cudaStream_t cuda_stream(Lane lane) const noexcept { return streams_[static_cast<std::size_t>(lane)]; }

  bool is_async() const noexcept override { return true; }
  void bind_thread() override;
  // What is put in from now on must not run beside what was put in before: the caller orders its streams.
  void set_compute_stream(void* stream) override;
  void* stream(Lane lane) const noexcept override { return cuda_stream(lane); }

  // Marks given to the calls below were made by a CudaDevice.
  MarkPtr mark(Lane lane) override { return mark_stream(cuda_stream(lane)); }
  MarkPtr mark_for_host(Lane lane) override;
  void wait(Lane lane, const MarkPtr& mark) override { hold_stream(cuda_stream(lane), mark); }
  bool has_passed(const MarkPtr& mark) override;
  void synchronize(const MarkPtr& mark) override;
  void synchronize() override;
  // The same for a stream of a communicator's own.
  MarkPtr mark_stream(cudaStream_t stream);
  void hold_stream(cudaStream_t stream, const MarkPtr& mark);

  std::shared_ptr<std::byte> allocate(std::size_t bytes, std::string_view what) override;
  // Another way to take device memory: tried once more when caches are empty. Throws OutOfMemoryError naming `what`.
  void take_memory(std::size_t bytes, std::string_view what, const std::function<cudaError_t()>& take);
  void zero_fresh_memory(void* memory, std::size_t bytes);  // blocks the host, and waits for no lane
  std::shared_ptr<std::byte> allocate_pinned(std::size_t bytes) override;
  HostRegistrar* host_registrar() noexcept override { return this; }
  // For every device of the process. From any thread, beside other calls.
  void register_host(std::byte* data, std::size_t bytes) override;
  void unregister_host(std::byte* data) noexcept override;

  void cast(Lane lane, void* destination, DType destination_dtype, const void* source, DType source_dtype,
            std::size_t numel) override;
  void add(Lane lane, void* destination, DType destination_dtype, const void* source, DType source_dtype,
           std::size_t numel) override;
  void sum(Lane lane, void* destination, std::span<const void* const> sources, DType dtype, std::size_t numel) override;
  void pack(Lane lane, std::span<const PackItem> items) override;
  void zero(Lane lane, void* destination, std::size_t bytes) override;
  void copy(Lane lane, void* destination, const void* source, std::size_t bytes) override;
  void copy_to_pinned(Lane lane, std::byte* host, const void* source, std::size_t bytes) override;
  void copy_from_pinned(Lane lane, void* destination, const std::byte* host, std::size_t bytes) override;
  void sums_of_squares(Lane lane, DType dtype, std::span<const SquareSum> sums) override;
  void combine_norm(Lane lane, const NormArguments& arguments) override;

  void download(void* host, const void* source, std::size_t bytes) override;
  void upload(void* destination, const void* host, std::size_t bytes) override;

  void push_range(const char* name) override;
  void pop_range() noexcept override;
  RangeId start_range(const char* name) override;
  void end_range(RangeId id) noexcept override;

 private:
  void blocking_copy(void* destination, const void* source, std::size_t bytes, cudaMemcpyKind kind);

  int ordinal_;
  std::function<void()> on_out_of_memory_;
  std::shared_ptr<EventPool> events_ = std::make_shared<EventPool>(HostWait::kSpins);
  std::shared_ptr<EventPool> events_for_host_ = std::make_shared<EventPool>(HostWait::kSleeps);
  std::array<cudaStream_t, kLaneNum> streams_{};  // by lane; the first is the caller's
  std::array<OwnStream, kLaneNum> own_streams_;   // of the other lanes
  OwnStream host_stream_;                         // of calls that block: fresh memory and copies from and to the host
  // Partial sums of sums_of_squares, one place a lane: a lane's calls run in order.
  std::array<std::shared_ptr<std::byte>, kLaneNum> sum_scratch_;
};

}  // namespace zb
