// NCCL as the transport of a LaneCommunicator: the owner of one ncclComm_t. Only files of the CUDA module include this.
//
// The communicator is a blocking one, since NCCL runs each group of one that does not block on a thread made for it. So
// connecting happens on a thread that is left behind when it takes too long, and abort() is what brings back a thread
// that does not return from put_in().
#pragma once

#include <nccl.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>

#include "comm/lane_transport.h"
#include "comm/nccl_communicator.h"

namespace zb {

class NcclTransport final : public LaneTransport {
 public:
  NcclTransport(std::shared_ptr<Device> device, Lane lane, NcclBuffers buffers);
  ~NcclTransport() override;

  // Blocks until all ranks have connected and a first small operation has run in the lane. `keep_waiting` is called
  // several times a second and throws to give up. Throws NcclError.
  void connect(int rank, int world_size, const ncclUniqueId& id, const std::function<void()>& keep_waiting);

  std::shared_ptr<std::byte> allocate(std::size_t bytes, BufferRole role, std::string_view what) override;
  void put_in(std::span<const LaneCall> calls) override;
  void enter_thread() override;
  std::optional<std::string> failure() override;
  bool abort() noexcept override;
  void finish() noexcept override;

 private:
  // Shared with buffers that are registered with the communicator.
  struct Handle {
    std::mutex mutex;                       // held while a thread is inside of NCCL
    std::atomic<ncclComm_t> comm{nullptr};  // null before connect() and after the end
  };

  ncclResult_t enqueue(const LaneCall& call, ncclComm_t comm) const;
  std::shared_ptr<std::byte> allocate_symmetric(std::size_t bytes);

  std::shared_ptr<Device> device_;
  Lane lane_;
  NcclBuffers buffers_;
  std::shared_ptr<Handle> handle_ = std::make_shared<Handle>();
};

// A throw of NcclError with NCCL's own explanation, unless `result` is ncclSuccess.
void check_nccl(ncclResult_t result, const char* what);

}  // namespace zb
