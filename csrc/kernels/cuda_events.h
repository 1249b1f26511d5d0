// Marks of CUDA streams: events without timing, taken from a pool and returned to it with the last reference.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/device.h"

namespace zb {

// How a host thread waits for an event. Sleeping costs an interrupt with every record, and some 20 us to wake up;
// spinning takes the core from whoever computes on it.
enum class HostWait : std::uint8_t { kSpins, kSleeps };

// Events of one device. Creating one takes many times as long as recording it, so they are kept. Thread-safe, since the
// last reference to a mark may go anywhere.
class EventPool {
 public:
  explicit EventPool(HostWait host_wait) : host_wait_(host_wait) {}
  ~EventPool();
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  cudaEvent_t take();  // the calling thread's current device must be the pool's
  void give_back(cudaEvent_t event) noexcept;

 private:
  HostWait host_wait_;
  std::mutex mutex_;
  std::vector<cudaEvent_t> free_;
};

// The point that a stream has reached when this is made. Streams that were told to wait keep waiting for that point
// when the event is recorded again, so the event may go back to the pool at any time.
class CudaMark final : public Mark {
 public:
  CudaMark(std::shared_ptr<EventPool> pool, cudaStream_t stream);
  ~CudaMark() override;
  CudaMark(const CudaMark&) = delete;
  CudaMark& operator=(const CudaMark&) = delete;

  cudaEvent_t event() const noexcept { return event_; }
  cudaStream_t stream() const noexcept { return stream_; }

 private:
  std::shared_ptr<EventPool> pool_;
  cudaEvent_t event_;
  cudaStream_t stream_;
};

}  // namespace zb
