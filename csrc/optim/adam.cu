// A launch takes many runs of the same dtypes: a block updates one tile of one run of the table in its parameters.
#include <cstdint>
#include <utility>

#include "common/cuda_check.h"
#include "common/dtype_dispatch.h"
#include "kernels/cuda_grid_stride.h"
#include "kernels/cuda_kernels.h"
#include "kernels/cuda_vector.h"
#include "optim/cuda_adam.h"
#include "optim/master_remainder.h"

namespace zb {
namespace {

constexpr int kThreadNum = 256;
constexpr int kUnroll = 2;  // groups that a thread loads before it computes
constexpr int kTileNumel = kThreadNum * kUnroll * kGroupNumel<DType::kFloat32>;

struct TableRun {
  AdamRun run;
  unsigned first_tile;  // of the launch
  bool is_grouped;      // all arrays can be aligned to groups together; else elements are moved singly
};

// Kernel parameters take 4 KiB on every device.
constexpr std::size_t kTableRunNum = 33;

struct Table {
  TableRun runs[kTableRunNum];
  unsigned run_num;
  const StepScalars* step;
};
static_assert(sizeof(Table) <= 4096);

// The sequence of adam_scalar.cpp.
__device__ void update_element(float& p, float& m, float& v, float gradient, const AdamScalars& s, float factor) {
  float g = __fmul_rn(gradient, factor);
  if (s.l2 != 0.0F) g = __fmaf_rn(s.l2, p, g);
  m = __fmaf_rn(s.beta1, m, __fmul_rn(s.one_minus_beta1, g));
  v = __fmaf_rn(s.beta2, v, __fmul_rn(__fmul_rn(s.one_minus_beta2, g), g));
  const float d = __fmaf_rn(__fsqrt_rn(v), s.inv_sqrt_bias2, s.eps);
  p = __fmul_rn(p, s.decay_factor);
  p = __fmaf_rn(-s.step_size, __fdiv_rn(m, d), p);
}

// Where masters are, and what their roundings are written to.
enum class Masters : std::uint8_t { kAlone, kBesideLow, kRemainders };

// kNumel elements of a run in registers.
template <DType kGradient, DType kLow, Masters kMasters, int kNumel>
struct Registers {
  Group<DType::kFloat32, kNumel> master, exp_avg, exp_avg_sq;
  Group<kGradient, kNumel> gradient;

  __device__ void load(const AdamSpan& span, std::size_t element) {
    if constexpr (kMasters != Masters::kRemainders) master.load(span.master, element);
    exp_avg.load(span.exp_avg, element);
    exp_avg_sq.load(span.exp_avg_sq, element);
    gradient.load(span.gradient, element);
    if constexpr (kMasters == Masters::kRemainders) {
      low.load(span.low_precision, element);
      remainder.load(span.remainder, element);
    }
  }

  __device__ void update(const AdamScalars& scalars, float factor) {
    if constexpr (kMasters == Masters::kRemainders) join();
#pragma unroll
    for (int i = 0; i < kNumel; ++i) {
      float p = master.get(i), m = exp_avg.get(i), v = exp_avg_sq.get(i);
      update_element(p, m, v, gradient.get(i), scalars, factor);
      master.set(i, p);
      exp_avg.set(i, m);
      exp_avg_sq.set(i, v);
    }
  }

  __device__ void store(const AdamSpan& span, std::size_t element) {
    if constexpr (kMasters != Masters::kAlone) {
#pragma unroll
      for (int i = 0; i < kNumel; ++i) low.set(i, master.get(i));
    }
    if constexpr (kMasters == Masters::kRemainders) split();
    exp_avg.store(span.exp_avg, element);
    exp_avg_sq.store(span.exp_avg_sq, element);
    if constexpr (kMasters == Masters::kRemainders) {
      remainder.store(span.remainder, element);
    } else {
      master.store(span.master, element);
    }
    if constexpr (kMasters != Masters::kAlone) low.store(span.low_precision, element);
  }

 private:
  __device__ void join() {
#pragma unroll
    for (int i = 0; i < kNumel; ++i) {
      const bool is_up = (exp_avg_sq.bits[i] & kSignBit) != 0;
      master.bits[i] = join_master(low.bits[i], remainder.bits[i], is_up);
      exp_avg_sq.bits[i] = with_sign(exp_avg_sq.bits[i], false);
    }
  }
  __device__ void split() {
#pragma unroll
    for (int i = 0; i < kNumel; ++i) {
      remainder.bits[i] = remainder_of(master.bits[i]);
      exp_avg_sq.bits[i] = with_sign(exp_avg_sq.bits[i], is_rounded_up(master.bits[i], low.bits[i]));
    }
  }

  Group<kLow, kNumel> low;                    // where there is one
  Group<DType::kBFloat16, kNumel> remainder;  // for their bits
};

// One tile of the groups between head and tail; the first tile updates head and tail too.
template <DType kGradient, DType kLow, Masters kMasters, int kNumel>
__device__ void update_tile(const AdamRun& run, std::size_t tile, const StepScalars* step) {
  constexpr int kGroupNum = kTileNumel / kThreadNum / kNumel;  // a thread's
  using Grouped = Registers<kGradient, kLow, kMasters, kNumel>;
  using Single = Registers<kGradient, kLow, kMasters, 1>;
  const AdamSpan& span = run.span;
  const float factor = __ldg(&step->factor);
  const bool is_skipped = __ldg(&step->is_skipped) != 0;
  const float* const first_array = kMasters == Masters::kRemainders ? span.exp_avg : span.master;
  const std::size_t head = min(head_numel<DType::kFloat32, kNumel>(first_array), span.numel);
  const std::size_t group_num = (span.numel - head) / kNumel;

  const std::size_t first = tile * (kTileNumel / kNumel) + threadIdx.x;
  Grouped grouped[kGroupNum];
#pragma unroll
  for (int k = 0; k < kGroupNum; ++k) {  // does not wait for what `step` says
    const std::size_t index = first + k * kThreadNum;
    if (index < group_num) grouped[k].load(span, head + index * kNumel);
  }
  if (is_skipped) return;
#pragma unroll
  for (int k = 0; k < kGroupNum; ++k) {
    const std::size_t index = first + k * kThreadNum;
    if (index < group_num) {
      grouped[k].update(run.scalars, factor);
      grouped[k].store(span, head + index * kNumel);
    }
  }

  if (tile == 0 && threadIdx.x < span.numel - group_num * kNumel) {
    const std::size_t element = threadIdx.x < head ? threadIdx.x : threadIdx.x + group_num * kNumel;
    Single single;
    single.load(span, element);
    single.update(run.scalars, factor);
    single.store(span, element);
  }
}

template <DType kGradient, DType kLow, Masters kMasters>
__global__ void __launch_bounds__(kThreadNum, 4) adam_kernel(const __grid_constant__ Table table) {
  unsigned low = 0;  // the last run whose first tile is not past this block's
  for (unsigned high = table.run_num; high - low > 1;) {
    const unsigned middle = (low + high) / 2;
    (table.runs[middle].first_tile <= blockIdx.x ? low : high) = middle;
  }
  const TableRun& at = table.runs[low];
  const std::size_t tile = blockIdx.x - at.first_tile;
  if (at.is_grouped) {
    update_tile<kGradient, kLow, kMasters, kGroupNumel<DType::kFloat32>>(at.run, tile, table.step);
  } else {
    update_tile<kGradient, kLow, kMasters, 1>(at.run, tile, table.step);
  }
}

using Kernel = void (*)(Table);

Kernel kernel_for(const AdamSpan& span) {
  return with_dtype(span.gradient_dtype, [&]<DType kGradient>() -> Kernel {
    if (span.remainder != nullptr) return adam_kernel<kGradient, DType::kBFloat16, Masters::kRemainders>;
    if (span.low_precision == nullptr) return adam_kernel<kGradient, DType::kFloat32, Masters::kAlone>;
    return with_dtype(span.low_precision_dtype,
                      [&]<DType kLow>() -> Kernel { return adam_kernel<kGradient, kLow, Masters::kBesideLow>; });
  });
}

TableRun table_run(const AdamRun& run, unsigned first_tile) {
  constexpr std::size_t kGroup = kGroupNumel<DType::kFloat32>;
  const AdamSpan& span = run.span;
  const std::size_t index = element_index(span.exp_avg, DType::kFloat32);
  const auto fits = [&](const void* address, DType dtype) {
    return (element_index(address, dtype) - index) % kGroup == 0;  // modulo 2^64
  };
  const bool is_grouped = (span.master == nullptr || fits(span.master, DType::kFloat32)) &&
                          fits(span.exp_avg_sq, DType::kFloat32) && fits(span.gradient, span.gradient_dtype) &&
                          (span.low_precision == nullptr || fits(span.low_precision, span.low_precision_dtype)) &&
                          (span.remainder == nullptr || fits(span.remainder, DType::kBFloat16));
  return {run, first_tile, is_grouped};
}

// The first runs that one launch can take; returns the others.
std::span<const AdamRun> launch_some(std::span<const AdamRun> runs, const StepScalars* step, cudaStream_t stream) {
  const Kernel kernel = kernel_for(runs.front().span);
  Table table;  // the part that is not filled is not read
  table.run_num = 0;
  table.step = step;
  std::size_t tile_num = 0;
  std::size_t taken = 0;
  for (; taken < runs.size() && table.run_num < kTableRunNum; ++taken) {
    const AdamRun& run = runs[taken];
    if (run.span.numel == 0) continue;
    if (kernel_for(run.span) != kernel) break;
    table.runs[table.run_num++] = table_run(run, static_cast<unsigned>(tile_num));
    tile_num += (run.span.numel + kTileNumel - 1) / kTileNumel;
  }
  if (tile_num != 0) {
    kernel<<<static_cast<unsigned>(tile_num), kThreadNum, 0, stream>>>(table);
    ZB_CUDA(cudaGetLastError());
  }
  return runs.subspan(taken);
}

__global__ void read_masters_kernel(AdamSpan span, float* destination) {
  const auto* const rounded = static_cast<const std::uint16_t*>(span.low_precision);
  for (std::size_t i = first_of_stride(); i < span.numel; i += grid_stride()) {
    const bool is_up = (__float_as_uint(span.exp_avg_sq[i]) & kSignBit) != 0;
    destination[i] = __uint_as_float(join_master(rounded[i], span.remainder[i], is_up));
  }
}

__global__ void write_masters_kernel(AdamSpan span, const float* source) {
  const auto* const rounded = static_cast<const std::uint16_t*>(span.low_precision);
  for (std::size_t i = first_of_stride(); i < span.numel; i += grid_stride()) {
    const std::uint32_t master = __float_as_uint(source[i]);
    const std::uint32_t square = __float_as_uint(span.exp_avg_sq[i]);
    span.remainder[i] = remainder_of(master);
    span.exp_avg_sq[i] = __uint_as_float(with_sign(square, is_rounded_up(master, rounded[i])));
  }
}

__global__ void copy_magnitudes_kernel(float* destination, const float* source, const float* signs, std::size_t numel) {
  for (std::size_t i = first_of_stride(); i < numel; i += grid_stride()) {
    const bool is_negative = signs != nullptr && (__float_as_uint(signs[i]) & kSignBit) != 0;
    destination[i] = __uint_as_float(with_sign(__float_as_uint(source[i]), is_negative));
  }
}

class CudaAdam final : public DeviceAdam {
 public:
  explicit CudaAdam(std::shared_ptr<CudaDevice> device) : device_(std::move(device)) {}

  void update(Lane lane, std::span<const AdamRun> runs, const StepScalars* step) override {
    device_->bind_thread();
    while (!runs.empty()) runs = launch_some(runs, step, device_->cuda_stream(lane));
  }

  void read_masters(Lane lane, const AdamSpan& span, float* destination) override {
    device_->bind_thread();
    launch_strided(read_masters_kernel, span.numel, device_->cuda_stream(lane), span, destination);
  }
  void write_masters(Lane lane, const AdamSpan& span, const float* source) override {
    device_->bind_thread();
    launch_strided(write_masters_kernel, span.numel, device_->cuda_stream(lane), span, source);
  }
  void copy_magnitudes(Lane lane, float* destination, const float* source, const float* signs,
                       std::size_t numel) override {
    device_->bind_thread();
    launch_strided(copy_magnitudes_kernel, numel, device_->cuda_stream(lane), destination, source, signs, numel);
  }

 private:
  std::shared_ptr<CudaDevice> device_;
};

}  // namespace

std::shared_ptr<DeviceAdam> make_cuda_adam(std::shared_ptr<CudaDevice> device) {
  return std::make_shared<CudaAdam>(std::move(device));
}

}  // namespace zb
