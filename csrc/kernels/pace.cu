#include "common/cuda_check.h"
#include "kernels/cuda_pace.h"

namespace zb {
namespace {

__device__ unsigned long long clock_ns() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// Streams share the link: whoever comes first sends first.
__global__ void departure_kernel(LinkTimes* link, unsigned long long* arrival_ns, unsigned long long transfer_ns,
                                 unsigned long long latency_ns) {
  const unsigned long long now = clock_ns();
  unsigned long long seen = link->free_ns;
  unsigned long long end = 0;
  for (unsigned long long before = seen + 1; before != seen;) {
    before = seen;
    end = max(before, now) + transfer_ns;
    seen = atomicCAS(&link->free_ns, before, end);
  }
  *arrival_ns = end + latency_ns;
}

__global__ void arrival_kernel(const unsigned long long* arrival_ns) {
  while (clock_ns() < *arrival_ns) __nanosleep(2000);
}

}  // namespace

void put_in_departure(LinkTimes* link, unsigned long long* arrival_ns, std::uint64_t transfer_ns,
                      std::uint64_t latency_ns, cudaStream_t stream) {
  departure_kernel<<<1, 1, 0, stream>>>(link, arrival_ns, transfer_ns, latency_ns);
  ZB_CUDA(cudaGetLastError());
}

void put_in_arrival(const unsigned long long* arrival_ns, cudaStream_t stream) {
  arrival_kernel<<<1, 1, 0, stream>>>(arrival_ns);
  ZB_CUDA(cudaGetLastError());
}

}  // namespace zb
