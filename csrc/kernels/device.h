// The device that an engine's tensors live on: its memory, its work, and the order of that work.
//
// [Note: lanes]
// Work is put into lanes, which run in order (CUDA streams; on the CPU work runs at once in the caller, and lanes mean
// nothing). Two lanes are ordered by marks alone: `wait(lane, mark)` holds back what is put into `lane` later until
// what stood before `mark` has run. No call but those that say so blocks the host. Calls come from one thread at a
// time; beside them a second thread may copy, mark, wait in lanes that nobody else uses, and synchronize with marks.
// Memory must outlive the work that was put in; what is freed on the host while a lane still uses it is the caller's
// mistake.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "common/dtype.h"
#include "memory/pinned_mapping.h"

namespace zb {

enum class Lane : std::uint8_t {
  kCompute,   // forward, backward and the optimizer: the stream that the caller computes on
  kGather,    // all-gathers of parameters
  kReduce,    // reductions of gradients, and what works on reduced gradients
  kToHost,    // what leaves for host memory: gradients that are updated there
  kFromHost,  // what comes back: updated parameters
};
inline constexpr std::size_t kLaneNum = 5;

// A point in a lane. Null stands for a point that has passed.
class Mark {
 public:
  virtual ~Mark() = default;
};
using MarkPtr = std::shared_ptr<const Mark>;

// Of a started range of a profiler.
using RangeId = std::uint64_t;

// One tensor's way into a flat buffer.
struct PackItem {
  void* destination = nullptr;
  DType destination_dtype = DType::kFloat32;
  const void* source = nullptr;  // null: zeros
  DType source_dtype = DType::kFloat32;
  std::size_t numel = 0;
  bool accumulate = false;  // destination += source, added in float and rounded once

  std::size_t bytes() const noexcept { return numel * dtype_bytes(destination_dtype); }
  // Whether a copy does the same.
  bool is_copy() const noexcept { return source != nullptr && !accumulate && source_dtype == destination_dtype; }
};

// Elements [begin, begin + numel) of a flat buffer, wherever they lie.
struct FlatPiece {
  std::size_t begin = 0;
  std::size_t numel = 0;
  const void* data = nullptr;
};

// A sum of squares to be taken, in double.
struct SquareSum {
  double* result = nullptr;  // device memory
  std::span<const FlatPiece> pieces = {};
};

// What a step's updates read. Lies in device memory.
struct StepScalars {
  double norm = 0.0;             // of the averaged and unscaled gradient, before clipping
  float factor = 0.0F;           // what every gradient is multiplied with
  std::uint32_t is_skipped = 0;  // 1: the gradient is not finite, and nothing is updated
};

struct NormArguments {
  const double* partial_sums = nullptr;  // [rank_num][flat_num] sums of squares
  std::size_t rank_num = 0;
  std::size_t flat_num = 0;
  double divisor = 1.0;            // ranks x backwards x loss scale
  double clip = 0.0;               // maximum norm; 0 is off
  double* flat_sums = nullptr;     // [flat_num], written: sums over ranks
  StepScalars* scalars = nullptr;  // written
};

inline constexpr std::size_t kSumSourceMax = 8;

class Device {
 public:
  virtual ~Device() = default;
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // Whether work runs after the call that puts it in.
  virtual bool is_async() const noexcept = 0;
  // Makes this device the calling thread's current one, where threads have one.
  virtual void bind_thread() {}
  // The native stream that the caller computes on from now on; marks taken before stay valid.
  virtual void set_compute_stream(void* stream) { static_cast<void>(stream); }
  // The native handle of a lane's stream; null where there is none.
  virtual void* stream(Lane lane) const noexcept = 0;

  virtual MarkPtr mark(Lane lane) = 0;
  // The same, for a host thread that will wait: there it sleeps, and leaves its core to others.
  virtual MarkPtr mark_for_host(Lane lane) { return mark(lane); }
  virtual void wait(Lane lane, const MarkPtr& mark) = 0;
  virtual bool has_passed(const MarkPtr& mark) = 0;   // from any thread, beside other calls
  virtual void synchronize(const MarkPtr& mark) = 0;  // blocks the host until the mark has passed
  virtual void synchronize() = 0;                     // blocks the host until every lane is empty

  // Zero-filled, aligned to 256 bytes or more. Throws OutOfMemoryError naming `what`.
  virtual std::shared_ptr<std::byte> allocate(std::size_t bytes, std::string_view what) = 0;
  // Host memory that copies to and from the device may use without blocking.
  virtual std::shared_ptr<std::byte> allocate_pinned(std::size_t bytes) = 0;
  // What makes other host memory the same as allocate_pinned's; null where all host memory is.
  virtual HostRegistrar* host_registrar() noexcept { return nullptr; }

  // destination[i] = convert(source[i]), rounded to nearest even
  virtual void cast(Lane lane, void* destination, DType destination_dtype, const void* source, DType source_dtype,
                    std::size_t numel) = 0;
  // destination[i] = convert(float(destination[i]) + float(source[i]))
  virtual void add(Lane lane, void* destination, DType destination_dtype, const void* source, DType source_dtype,
                   std::size_t numel) = 0;
  // destination[i] = convert(((s0[i] + s1[i]) + s2[i]) + ...), added in float in the order of `sources`, of which there
  // are at most kSumSourceMax. destination may be one of them.
  virtual void sum(Lane lane, void* destination, std::span<const void* const> sources, DType dtype,
                   std::size_t numel) = 0;
  // All items as if one after the other; they do not overlap.
  virtual void pack(Lane lane, std::span<const PackItem> items) = 0;
  virtual void zero(Lane lane, void* destination, std::size_t bytes) = 0;
  virtual void copy(Lane lane, void* destination, const void* source, std::size_t bytes) = 0;
  virtual void copy_to_pinned(Lane lane, std::byte* host, const void* source, std::size_t bytes) = 0;
  virtual void copy_from_pinned(Lane lane, void* destination, const std::byte* host, std::size_t bytes) = 0;
  // All of them in few pieces of work. Each is added up in an order that depends on dtype and its pieces' sizes alone,
  // not on where they lie or on the other sums.
  virtual void sums_of_squares(Lane lane, DType dtype, std::span<const SquareSum> sums) = 0;
  // Sums over ranks in rank order, then over flats in order; norm = sqrt(total) / divisor; factor = 1 / divisor, times
  // min(1, clip / (norm + 1e-6)) where clipping is on (torch.nn.utils.clip_grad_norm_), in double, rounded to float
  // once.
  virtual void combine_norm(Lane lane, const NormArguments& arguments) = 0;

  // Blocking copies between host and device memory, after all work that was put in before.
  virtual void download(void* host, const void* source, std::size_t bytes) = 0;
  virtual void upload(void* destination, const void* host, std::size_t bytes) = 0;

  // Ranges of profilers (NVTX). What is pushed is popped by the same thread, the last one first; what is started ends
  // in any order and on any thread. (kernels/device_range.h ends them.)
  virtual void push_range(const char* name) { static_cast<void>(name); }
  virtual void pop_range() noexcept {}
  virtual RangeId start_range(const char* name) {
    static_cast<void>(name);
    return 0;
  }
  virtual void end_range(RangeId id) noexcept { static_cast<void>(id); }
};

// The device's registrar, which keeps the device; null where it has none.
inline std::shared_ptr<HostRegistrar> host_registrar(const std::shared_ptr<Device>& device) {
  HostRegistrar* registrar = device->host_registrar();
  return registrar == nullptr ? nullptr : std::shared_ptr<HostRegistrar>(device, registrar);
}

}  // namespace zb
