// Kernels that hold a stream back until what it sent would have come over a slower link (comm/paced_link.h). Only files
// of the CUDA module include this.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace zb {

// Times of one link, by the GPU's own clock. Zero-filled device memory.
struct LinkTimes {
  unsigned long long free_ns = 0;  // of what was sent so far
};

// Notes when an operation comes that begins now: writes `arrival_ns`, device memory of this stream.
void put_in_departure(LinkTimes* link, unsigned long long* arrival_ns, std::uint64_t transfer_ns,
                      std::uint64_t latency_ns, cudaStream_t stream);
// Holds the stream back until then.
void put_in_arrival(const unsigned long long* arrival_ns, cudaStream_t stream);

}  // namespace zb
