// Many tensors into a flat buffer by one launch: a block takes one tile of one item of the table in its parameters.
#include <algorithm>
#include <cstdint>

#include "common/cuda_check.h"
#include "kernels/cuda_kernels.h"
#include "kernels/cuda_vector.h"

namespace zb {
namespace {

constexpr int kThreadNum = 256;
constexpr int kTileNumel = 4096;

// How an item's elements are moved: by groups where destination and source can be aligned together, else singly.
struct TableItem {
  void* destination;
  const void* source;
  std::size_t numel;
  unsigned first_tile;  // of the launch
  DType destination_dtype;
  DType source_dtype;
  bool accumulate;
  bool is_grouped;
};

// Kernel parameters take 4 KiB on every device.
constexpr std::size_t kTableItemNum = 120;

struct Table {
  TableItem items[kTableItemNum];
  unsigned item_num;
};
static_assert(sizeof(Table) <= 4096);

enum class Operation { kZero, kCast, kAdd };

template <DType kTo, DType kFrom, Operation kOperation, int kNumel>
__device__ void move(Group<kTo, kNumel>& to, const Group<kFrom, kNumel>& from) {
  if constexpr (kOperation == Operation::kZero) {
    to = {};
  } else if constexpr (kOperation == Operation::kAdd) {
#pragma unroll
    for (int i = 0; i < kNumel; ++i) to.set(i, __fadd_rn(to.get(i), from.get(i)));
  } else if constexpr (kTo == kFrom) {
    to = from;
  } else {
#pragma unroll
    for (int i = 0; i < kNumel; ++i) to.set(i, from.get(i));
  }
}

// One tile of the groups between head and tail; the first tile moves head and tail too.
template <DType kTo, DType kFrom, Operation kOperation, int kNumel>
__device__ void move_tile(const TableItem& item, std::size_t tile) {
  constexpr int kThreadGroupNum = kTileNumel / kThreadNum / kNumel;
  constexpr int kGroupNum = kThreadGroupNum < 8 ? kThreadGroupNum : 8;  // in registers at a time
  constexpr int kPassNum = kThreadGroupNum / kGroupNum;
  const std::size_t head = min(head_numel<kTo, kNumel>(item.destination), item.numel);
  const std::size_t group_num = (item.numel - head) / kNumel;

#pragma unroll 1
  for (int pass = 0; pass < kPassNum; ++pass) {
    const std::size_t first = (tile * kPassNum + pass) * (kThreadNum * kGroupNum) + threadIdx.x;
    Group<kTo, kNumel> to[kGroupNum];
    Group<kFrom, kNumel> from[kGroupNum];
#pragma unroll
    for (int k = 0; k < kGroupNum; ++k) {  // all loads before the first store
      const std::size_t index = first + k * kThreadNum;
      if (index < group_num) {
        if constexpr (kOperation != Operation::kZero) from[k].load(item.source, head + index * kNumel);
        if constexpr (kOperation == Operation::kAdd) to[k].load(item.destination, head + index * kNumel);
      }
    }
#pragma unroll
    for (int k = 0; k < kGroupNum; ++k) {
      const std::size_t index = first + k * kThreadNum;
      if (index < group_num) {
        move<kTo, kFrom, kOperation>(to[k], from[k]);
        to[k].store(item.destination, head + index * kNumel);
      }
    }
  }

  if (tile == 0 && threadIdx.x < item.numel - group_num * kNumel) {
    const std::size_t element = threadIdx.x < head ? threadIdx.x : threadIdx.x + group_num * kNumel;
    Group<kTo, 1> single_to;
    Group<kFrom, 1> single_from;
    if constexpr (kOperation != Operation::kZero) single_from.load(item.source, element);
    if constexpr (kOperation == Operation::kAdd) single_to.load(item.destination, element);
    move<kTo, kFrom, kOperation>(single_to, single_from);
    single_to.store(item.destination, element);
  }
}

template <DType kTo, DType kFrom, Operation kOperation>
__device__ void move_tile(const TableItem& item, std::size_t tile) {
  constexpr int kNumel = kGroupNumel<kTo> < kGroupNumel<kFrom> ? kGroupNumel<kTo> : kGroupNumel<kFrom>;
  if (item.is_grouped) {
    move_tile<kTo, kFrom, kOperation, kNumel>(item, tile);
  } else {
    move_tile<kTo, kFrom, kOperation, 1>(item, tile);
  }
}

__global__ void __launch_bounds__(kThreadNum, 4) pack_kernel(const __grid_constant__ Table table) {
  unsigned low = 0;  // the last item whose first tile is not past this block's
  for (unsigned high = table.item_num; high - low > 1;) {
    const unsigned middle = (low + high) / 2;
    (table.items[middle].first_tile <= blockIdx.x ? low : high) = middle;
  }
  const TableItem& item = table.items[low];
  const std::size_t tile = blockIdx.x - item.first_tile;
  with_device_dtype(item.destination_dtype, [&]<DType kTo>() {
    if (item.source == nullptr) return move_tile<kTo, kTo, Operation::kZero, kGroupNumel<kTo>>(item, tile);
    with_device_dtype(item.source_dtype, [&]<DType kFrom>() {
      if (item.accumulate) return move_tile<kTo, kFrom, Operation::kAdd>(item, tile);
      move_tile<kTo, kFrom, Operation::kCast>(item, tile);
    });
  });
}

TableItem table_item(const PackItem& item, unsigned first_tile) {
  const std::size_t group_numel = 16 / std::max(dtype_bytes(item.destination_dtype), dtype_bytes(item.source_dtype));
  const std::size_t apart = element_index(item.destination, item.destination_dtype) -
                            element_index(item.source, item.source_dtype);  // modulo 2^64
  return {.destination = item.destination,
          .source = item.source,
          .numel = item.numel,
          .first_tile = first_tile,
          .destination_dtype = item.destination_dtype,
          .source_dtype = item.source_dtype,
          .accumulate = item.accumulate,
          .is_grouped = apart % group_numel == 0};
}

}  // namespace

void launch_pack(std::span<const PackItem> items, cudaStream_t stream) {
  while (!items.empty()) {
    Table table;  // the part that is not filled is not read
    table.item_num = 0;
    std::size_t tile_num = 0;
    std::size_t taken = 0;
    for (; taken < items.size() && table.item_num < kTableItemNum; ++taken) {
      const PackItem& item = items[taken];
      if (item.numel == 0 || (item.source == nullptr && item.accumulate)) continue;
      table.items[table.item_num++] = table_item(item, static_cast<unsigned>(tile_num));
      tile_num += (item.numel + kTileNumel - 1) / kTileNumel;
    }
    items = items.subspan(taken);
    if (tile_num == 0) continue;
    pack_kernel<<<static_cast<unsigned>(tile_num), kThreadNum, 0, stream>>>(table);
    ZB_CUDA(cudaGetLastError());
  }
}

}  // namespace zb
