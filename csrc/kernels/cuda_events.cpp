#include <utility>

#include "common/cuda_check.h"
#include "kernels/cuda_events.h"

namespace zb {

EventPool::~EventPool() {
  for (cudaEvent_t event : free_) static_cast<void>(cudaEventDestroy(event));
}

cudaEvent_t EventPool::take() {
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      cudaEvent_t event = free_.back();
      free_.pop_back();
      return event;
    }
    free_.reserve(free_.capacity() + 1);  // giving back must not allocate
  }
  cudaEvent_t event = nullptr;
  const unsigned wait = host_wait_ == HostWait::kSleeps ? cudaEventBlockingSync : cudaEventDefault;
  ZB_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | wait));
  return event;
}

void EventPool::give_back(cudaEvent_t event) noexcept {
  const std::lock_guard lock(mutex_);
  free_.push_back(event);
}

CudaMark::CudaMark(std::shared_ptr<EventPool> pool, cudaStream_t stream)
    : pool_(std::move(pool)), event_(pool_->take()), stream_(stream) {
  const cudaError_t code = cudaEventRecord(event_, stream_);
  if (code != cudaSuccess) [[unlikely]] {
    pool_->give_back(event_);  // no destructor runs after a constructor that throws
    ZB_CUDA(code);
  }
}

CudaMark::~CudaMark() { pool_->give_back(event_); }

}  // namespace zb
