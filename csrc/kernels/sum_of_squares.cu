// Sums of squares in double, many by one launch. Which thread adds which element follows from dtype and the sizes of a
// sum's pieces alone, not from addresses, the device, other sums or what else runs: every sum has its own blocks, and
// the one of them that ends last adds their parts in a fixed tree.
#include <algorithm>
#include <cstdint>

#include "common/cuda_check.h"
#include "common/dtype_dispatch.h"
#include "kernels/cuda_kernels.h"
#include "kernels/cuda_vector.h"

namespace zb {
namespace {

constexpr int kThreadNum = 256;
constexpr int kWarpNum = kThreadNum / 32;
constexpr int kUnroll = 4;                  // groups that a thread loads before it adds
constexpr std::size_t kMaxBlockNum = 1024;  // of a sum

struct TablePiece {
  const void* data;
  std::size_t numel;
  unsigned first_tile;  // of its sum
  bool is_aligned;      // to groups
};

struct TableSum {
  double* result;
  unsigned first_block;
  unsigned first_piece;
  unsigned piece_num;
  unsigned tile_num;
  bool adds;  // to what the launch before left
};

// Kernel parameters take 4 KiB on every device.
constexpr std::size_t kTablePieceNum = 120;
constexpr std::size_t kTableSumNum = 30;

struct Table {
  TablePiece pieces[kTablePieceNum];
  TableSum sums[kTableSumNum];
  unsigned piece_num;
  unsigned sum_num;
  unsigned block_num;
};
static_assert(sizeof(Table) <= 4096 - 64);

struct Scratch {
  double block_sums[kTableSumNum][kMaxBlockNum];
  unsigned ended_block_num[kTableSumNum];  // 0 between calls
};

// The sum over a block's threads, in thread 0.
__device__ double block_sum(double value) {
  __shared__ double warp_sums[kWarpNum];
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) value += __shfl_down_sync(0xFFFFFFFFU, value, apart);
  __syncthreads();  // an earlier call's sums have been read
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = value;
  __syncthreads();
  double sum = warp_sums[0];
#pragma unroll
  for (int warp = 1; warp < kWarpNum; ++warp) sum += warp_sums[warp];
  return sum;
}

// Elements [index * kNumel, ...) of the piece; zeros past its end.
template <DType kType, int kNumel>
__device__ Group<kType, kNumel> load_group(const TablePiece& piece, std::size_t index) {
  Group<kType, kNumel> group{};
  if (piece.is_aligned && (index + 1) * kNumel <= piece.numel) {
    group.load(piece.data, index * kNumel);
    return group;
  }
#pragma unroll
  for (int i = 0; i < kNumel; ++i) {
    const std::size_t at = index * kNumel + i;
    if (at < piece.numel) group.bits[i] = static_cast<const typename Element<kType>::Bits*>(piece.data)[at];
  }
  return group;
}

template <DType kType, int kNumel>
__device__ void add_squares(double (&sums)[kNumel], const Group<kType, kNumel>& group) {
#pragma unroll
  for (int i = 0; i < kNumel; ++i) {
    const double value = group.get(i);
    sums[i] = __fma_rn(value, value, sums[i]);
  }
}

// Every `block_num`-th tile of a sum, from the `block`-th on.
template <DType kType>
__device__ double thread_sum(const Table& table, const TableSum& of, unsigned block, unsigned block_num) {
  constexpr int kNumel = kGroupNumel<kType>;
  double sums[kNumel] = {};
  unsigned at = of.first_piece;
  const unsigned last = of.first_piece + of.piece_num - 1;  // not read where there are no tiles
  for (unsigned tile = block; tile < of.tile_num; tile += block_num) {
    while (at < last && table.pieces[at + 1].first_tile <= tile) ++at;
    const TablePiece& piece = table.pieces[at];
    const std::size_t first = static_cast<std::size_t>(tile - piece.first_tile) * (kThreadNum * kUnroll) + threadIdx.x;
    const bool is_whole = piece.is_aligned && (first - threadIdx.x + kThreadNum * kUnroll) * kNumel <= piece.numel;
    Group<kType, kNumel> groups[kUnroll];
    if (is_whole) {
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) groups[k].load(piece.data, (first + k * kThreadNum) * kNumel);
    } else {
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) groups[k] = load_group<kType, kNumel>(piece, first + k * kThreadNum);
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) add_squares(sums, groups[k]);
  }
#pragma unroll
  for (int half = kNumel / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

template <DType kType>
__global__ void __launch_bounds__(kThreadNum, 4)
    sums_of_squares_kernel(const __grid_constant__ Table table, Scratch* scratch) {
  __shared__ bool ends_last;
  unsigned index = 0;
  while (index + 1 < table.sum_num && table.sums[index + 1].first_block <= blockIdx.x) ++index;
  const TableSum& of = table.sums[index];
  const unsigned end = index + 1 < table.sum_num ? table.sums[index + 1].first_block : table.block_num;
  const unsigned block_num = end - of.first_block;
  const unsigned block = blockIdx.x - of.first_block;
  const double sum = block_sum(thread_sum<kType>(table, of, block, block_num));
  if (threadIdx.x == 0) {
    scratch->block_sums[index][block] = sum;
    __threadfence();
    // Back to 0 by itself with the last block.
    ends_last = atomicInc(&scratch->ended_block_num[index], block_num - 1) == block_num - 1;
  }
  __syncthreads();
  if (!ends_last) return;
  __threadfence();
  double total = 0.0;
  for (unsigned other = threadIdx.x; other < block_num; other += kThreadNum) {
    total += __ldcg(&scratch->block_sums[index][other]);  // past this multiprocessor's own cache
  }
  total = block_sum(total);
  if (threadIdx.x == 0) *of.result = of.adds ? *of.result + total : total;
}

// A table that is launched when it is full.
template <DType kType>
class Launcher {
 public:
  Launcher(void* scratch, cudaStream_t stream) : scratch_(static_cast<Scratch*>(scratch)), stream_(stream) { clear(); }

  // Sums of more pieces than a table takes are taken part by part, which no other sum changes.
  void add(const SquareSum& sum) {
    std::span<const FlatPiece> left = sum.pieces;
    bool adds = false;
    do {
      const auto part = left.first(std::min(left.size(), kTablePieceNum));
      left = left.subspan(part.size());
      if (adds || table_.sum_num == kTableSumNum || table_.piece_num + part.size() > kTablePieceNum) launch();
      add_part(sum.result, part, adds);
      adds = true;
    } while (!left.empty());
  }
  void launch() {
    if (table_.sum_num == 0) return;
    sums_of_squares_kernel<kType><<<table_.block_num, kThreadNum, 0, stream_>>>(table_, scratch_);
    ZB_CUDA(cudaGetLastError());
    clear();
  }

 private:
  static constexpr std::size_t kTileNumel = std::size_t{kThreadNum} * kUnroll * kGroupNumel<kType>;

  void clear() { table_.piece_num = table_.sum_num = table_.block_num = 0; }
  void add_part(double* result, std::span<const FlatPiece> pieces, bool adds) {
    const unsigned first_piece = table_.piece_num;
    std::size_t tile_num = 0;
    for (const FlatPiece& piece : pieces) {
      if (piece.numel == 0) continue;
      table_.pieces[table_.piece_num++] = {.data = piece.data,
                                           .numel = piece.numel,
                                           .first_tile = static_cast<unsigned>(tile_num),
                                           .is_aligned = reinterpret_cast<std::uintptr_t>(piece.data) % 16 == 0};
      tile_num += (piece.numel + kTileNumel - 1) / kTileNumel;
    }
    table_.sums[table_.sum_num++] = {.result = result,
                                     .first_block = table_.block_num,
                                     .first_piece = first_piece,
                                     .piece_num = table_.piece_num - first_piece,
                                     .tile_num = static_cast<unsigned>(tile_num),
                                     .adds = adds};
    table_.block_num += static_cast<unsigned>(std::clamp<std::size_t>(tile_num, 1, kMaxBlockNum));
  }

  Scratch* scratch_;
  cudaStream_t stream_;
  Table table_;  // the part that is not filled is not read
};

}  // namespace

std::size_t sum_scratch_bytes() { return sizeof(Scratch); }

void launch_sums_of_squares(DType dtype, std::span<const SquareSum> sums, void* scratch, cudaStream_t stream) {
  with_dtype(dtype, [&]<DType kType>() {
    Launcher<kType> launcher(scratch, stream);
    for (const SquareSum& sum : sums) launcher.add(sum);
    launcher.launch();
  });
}

}  // namespace zb
