#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <string>
#include <thread>
#include <utility>

#include "comm/cuda_watchdog.h"
#include "comm/nccl_transport.h"
#include "common/cuda_check.h"
#include "common/error.h"

namespace zb {
namespace {

constexpr std::chrono::milliseconds kSlice{20};
// Far longer than putting operations in takes.
constexpr std::chrono::milliseconds kPatience{200};
constexpr const char* kAborted = "the NCCL communicator was aborted";

ncclDataType_t nccl_type(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return ncclBfloat16;
    case DType::kFloat16:
      return ncclFloat16;
    case DType::kFloat32:
      break;
  }
  return ncclFloat32;
}

std::string explain(ncclResult_t result) {
  const char* const last = ncclGetLastError(nullptr);
  std::string text = ncclGetErrorString(result);
  if (last != nullptr && *last != '\0') text.append(": ").append(last);
  while (text.ends_with('\n')) text.pop_back();
  return text;
}

// What the thread that connects needs.
struct Plan {
  std::shared_ptr<Device> device;
  int rank = 0;
  int world_size = 1;
  ncclUniqueId id{};
  cudaStream_t stream = nullptr;
  std::shared_ptr<std::byte> scratch;  // kNcclTrialBytes a rank
};
constexpr std::size_t kNcclTrialBytes = 16;

// What that thread and the one that waits for it share.
struct Connecting {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_done = false;
  bool is_given_up = false;
  ncclComm_t comm = nullptr;
  std::string error;
};

// Waits where the environment (NCCL_COMM_BLOCKING=0) has made the communicator one that does not block.
ncclResult_t finished(ncclResult_t result, ncclComm_t comm) {
  while (result == ncclInProgress) {
    std::this_thread::yield();
    const ncclResult_t asked = ncclCommGetAsyncError(comm, &result);
    if (asked != ncclSuccess) return asked;
  }
  return result;
}

ncclComm_t initialise(const Plan& plan) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 1;
  ncclComm_t comm = nullptr;
  const ncclResult_t result = ncclCommInitRankConfig(&comm, plan.world_size, plan.id, plan.rank, &config);
  check_nccl(finished(result, comm), "ncclCommInitRankConfig");
  return comm;
}

// NCCL connects the ranks' rings at the first operation, and then a dead peer holds up who puts it in, for as long as a
// minute and without a look at the abort flag. So that operation is put in here, where the thread can be left behind.
void run_first_operation(Connecting& shared, const Plan& plan, ncclComm_t comm) {
  const std::byte* const source = plan.scratch.get() + static_cast<std::size_t>(plan.rank) * kNcclTrialBytes;
  const ncclResult_t result = ncclAllGather(source, plan.scratch.get(), kNcclTrialBytes, ncclUint8, comm, plan.stream);
  check_nccl(finished(result, comm), "the first ncclAllGather");
  cudaError_t code = cudaStreamQuery(plan.stream);
  for (; code == cudaErrorNotReady; code = cudaStreamQuery(plan.stream)) {
    static_cast<void>(cudaGetLastError());
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const std::lock_guard lock(shared.mutex);
    if (shared.is_given_up) return;
  }
  ZB_CUDA(code);
}

void run_connecting(Connecting& shared, const Plan& plan) {
  ncclComm_t comm = nullptr;
  std::string error;
  try {
    plan.device->bind_thread();
    comm = initialise(plan);
    run_first_operation(shared, plan, comm);
  } catch (const std::exception& failure) {
    error = failure.what();
  }
  std::unique_lock lock(shared.mutex);
  if (comm != nullptr && (shared.is_given_up || !error.empty())) {
    lock.unlock();  // aborting takes its time
    static_cast<void>(ncclCommAbort(std::exchange(comm, nullptr)));
    lock.lock();
  }
  shared.is_done = true;
  shared.error = std::move(error);
  shared.comm = comm;
  shared.changed.notify_all();
}

}  // namespace

void check_nccl(ncclResult_t result, const char* what) {
  if (result != ncclSuccess) throw NcclError(std::string(what) + ": " + explain(result), result);
}

NcclTransport::NcclTransport(std::shared_ptr<Device> device, Lane lane, NcclBuffers buffers)
    : device_(std::move(device)), lane_(lane), buffers_(buffers) {}

NcclTransport::~NcclTransport() { static_cast<void>(abort()); }

void NcclTransport::connect(int rank, int world_size, const ncclUniqueId& id,
                            const std::function<void()>& keep_waiting) {
  const auto shared = std::make_shared<Connecting>();
  Plan plan{
      .device = device_,
      .rank = rank,
      .world_size = world_size,
      .id = id,
      .stream = static_cast<cudaStream_t>(device_->stream(lane_)),
      .scratch = device_->allocate(kNcclTrialBytes * static_cast<std::size_t>(world_size), "NCCL's first operation")};
  std::thread([shared, plan = std::move(plan)] { run_connecting(*shared, plan); }).detach();
  std::unique_lock lock(shared->mutex);
  while (!shared->changed.wait_for(lock, kSlice, [&] { return shared->is_done; })) {
    lock.unlock();
    try {
      keep_waiting();
    } catch (...) {
      lock.lock();
      shared->is_given_up = true;
      if (shared->comm != nullptr) static_cast<void>(ncclCommAbort(shared->comm));
      throw;
    }
    lock.lock();
  }
  if (!shared->error.empty()) throw NcclError(shared->error, ncclInternalError);
  handle_->comm = shared->comm;
}

std::shared_ptr<std::byte> NcclTransport::allocate(std::size_t bytes, BufferRole, std::string_view what) {
  return buffers_ == NcclBuffers::kPlain ? device_->allocate(bytes, what) : allocate_symmetric(bytes);
}

std::shared_ptr<std::byte> NcclTransport::allocate_symmetric(std::size_t bytes) {
  device_->bind_thread();
  const std::lock_guard lock(handle_->mutex);
  ncclComm_t comm = handle_->comm;
  if (comm == nullptr) throw NcclError(kAborted, ncclInvalidUsage);
  void* memory = nullptr;
  bytes = std::max<std::size_t>(bytes, 1);
  check_nccl(ncclMemAlloc(&memory, bytes), "ncclMemAlloc");
  std::shared_ptr<void> owner(memory, [](void* held) { static_cast<void>(ncclMemFree(held)); });
  ZB_CUDA(cudaMemset(memory, 0, bytes));
  ZB_CUDA(cudaDeviceSynchronize());
  ncclWindow_t window = nullptr;
  check_nccl(ncclCommWindowRegister(comm, memory, bytes, &window, NCCL_WIN_COLL_SYMMETRIC), "ncclCommWindowRegister");
  return {static_cast<std::byte*>(memory), [owner, window, handle = handle_](std::byte*) {
            const std::lock_guard held(handle->mutex);
            ncclComm_t still_there = handle->comm;
            if (still_there != nullptr) static_cast<void>(ncclCommWindowDeregister(still_there, window));
          }};
}

void NcclTransport::put_in(std::span<const LaneCall> calls) {
  const std::lock_guard lock(handle_->mutex);
  ncclComm_t comm = handle_->comm;
  if (comm == nullptr) throw NcclError(kAborted, ncclInvalidUsage);
  const bool is_group = calls.size() > 1;
  if (is_group) check_nccl(ncclGroupStart(), "ncclGroupStart");
  ncclResult_t result = ncclSuccess;
  for (const LaneCall& call : calls) {
    if (call.num != 0) result = enqueue(call, comm);
    if (result != ncclSuccess && result != ncclInProgress) break;
  }
  if (is_group) {
    const ncclResult_t end = ncclGroupEnd();
    if (result == ncclSuccess || result == ncclInProgress) result = end;
  }
  check_nccl(finished(result, comm), "NCCL");
}

ncclResult_t NcclTransport::enqueue(const LaneCall& call, ncclComm_t comm) const {
  auto* const stream = static_cast<cudaStream_t>(device_->stream(lane_));
  switch (call.kind) {
    case Collective::kAllGather:
      return ncclAllGather(call.source, call.destination, call.num, ncclUint8, comm, stream);
    case Collective::kReduceScatter:
      return ncclReduceScatter(call.source, call.destination, call.num, nccl_type(call.dtype), ncclSum, comm, stream);
    case Collective::kAllReduce:
      return ncclAllReduce(call.source, call.destination, call.num, nccl_type(call.dtype), ncclSum, comm, stream);
    case Collective::kBroadcast:
      return ncclBroadcast(call.source, call.destination, call.num, ncclUint8, call.root, comm, stream);
    case Collective::kExchange:
    case Collective::kBarrier:
      break;  // over the control communicator
  }
  return ncclInvalidArgument;
}

void NcclTransport::enter_thread() { enter_watchdog_thread(*device_); }

std::optional<std::string> NcclTransport::failure() {
  const std::unique_lock lock(handle_->mutex, std::try_to_lock);
  ncclComm_t comm = handle_->comm;
  if (!lock || comm == nullptr) return std::nullopt;
  ncclResult_t result = ncclSuccess;
  const ncclResult_t asked = ncclCommGetAsyncError(comm, &result);
  if (asked != ncclSuccess) result = asked;
  if (result == ncclSuccess || result == ncclInProgress) return std::nullopt;
  return explain(result);
}

bool NcclTransport::abort() noexcept {
  // A thread that stays inside of NCCL waits for a peer or for room in the stream, and leaves once NCCL's abort flag is
  // up, long before NCCL has ended the kernels and frees what that thread uses.
  std::unique_lock lock(handle_->mutex, std::defer_lock);
  for (auto waited = kSlice; !lock.try_lock() && waited < kPatience; waited += kSlice) {
    std::this_thread::sleep_for(kSlice);
  }
  ncclComm_t comm = handle_->comm.exchange(nullptr);
  if (comm != nullptr) static_cast<void>(ncclCommAbort(comm));
  return true;
}

void NcclTransport::finish() noexcept {
  const std::lock_guard lock(handle_->mutex);
  ncclComm_t comm = handle_->comm.exchange(nullptr);
  if (comm != nullptr) static_cast<void>(ncclCommDestroy(comm));
}

}  // namespace zb
