// The PeerLink of CUDA devices of one host: memory mapped by all ranks, copy engines, and memory operations of streams
// for meetings. The flags lie in pinned host memory, where the watchdog can raise them while the device waits.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "comm/communicator.h"
#include "comm/descriptor_mesh.h"
#include "comm/memory_overhead.h"
#include "comm/peer_flags.h"
#include "comm/peer_link.h"
#include "kernels/cuda_device.h"

namespace zb {

class CudaPeerLink final : public PeerLink {
 public:
  // Collective. `control` must outlive all calls but the destructor. `overhead` learns what allocations take.
  CudaPeerLink(std::shared_ptr<CudaDevice> device, Lane lane, Communicator& control, std::chrono::milliseconds timeout,
               std::shared_ptr<MemoryOverhead> overhead);

  ~CudaPeerLink() override;

  int rank() const noexcept override { return rank_; }
  int world_size() const noexcept override { return world_size_; }
  std::shared_ptr<PeerMemory> allocate(std::size_t bytes, std::string_view what) override;
  std::unique_ptr<PeerPages> make_pages(std::string_view what) override;
  void announce() override;
  void await() override;
  void enter_thread() override;
  void release() noexcept override;
  bool is_idle() noexcept override;

 private:
  struct Flags;

  template <typename Part>
  void agree(std::size_t bytes, std::uint64_t number, std::string_view what, const Part& part);
  // Puts one memory operation for each peer into the lane, all together.
  template <typename Describe>
  void put_in_for_peers(const Describe& describe);

  std::shared_ptr<CudaDevice> device_;
  Communicator& control_;
  cudaStream_t stream_;
  int rank_;
  int world_size_;
  std::size_t granularity_bytes_;
  std::shared_ptr<MemoryOverhead> overhead_;
  DescriptorMesh mesh_;
  std::uint64_t next_number_ = 0;
  std::unique_ptr<Flags> flags_;
  std::uint64_t meeting_ = 0;  // announced so far
};

}  // namespace zb
