// The vector forms of cpu_kernels.h, written once over a register type (common/simd_*.h).
#pragma once

#include <cstring>

#include "common/dtype_dispatch.h"
#include "common/ieee_scope.h"
#include "common/simd_loop.h"
#include "kernels/cpu_kernels.h"

namespace zb {
namespace {  // internal linkage: included by sources with different instruction set flags

template <class Simd>
struct VectorKernels {
  using Float = typename Simd::Float;

  // Larger outputs pass the caches: they would not stay in them until they are read, and a line that is written whole
  // need not be read first.
  static constexpr std::size_t kStreamBytes = std::size_t{4} << 20;
  // Sources of more bytes in all do not lie in a core's own cache.
  static constexpr std::size_t kFarBytes = std::size_t{2} << 20;

  template <DType kTo, DType kFrom>
  [[gnu::noinline]] static void cast_loop(void* destination, const void* source, std::size_t numel) {
    for_each_register<Simd>(0, numel, [=](auto access, std::size_t i) __attribute__((always_inline)) {
      access.template store<kTo>(destination, i, access.template load<kFrom>(source, i));
    });
  }

  static void cast(void* destination, DType destination_dtype, const void* source, DType source_dtype,
                   std::size_t numel) {
    const IeeeScope scope;
    with_dtype(destination_dtype, [&]<DType kTo>() {
      with_dtype(source_dtype, [&]<DType kFrom>() { cast_loop<kTo, kFrom>(destination, source, numel); });
    });
  }

  template <DType kTo, DType kFrom>
  [[gnu::noinline]] static void add_loop(void* destination, const void* source, std::size_t numel) {
    for_each_register<Simd>(0, numel, [=](auto access, std::size_t i) __attribute__((always_inline)) {
      const Float before = access.template load<kTo>(destination, i);
      access.template store<kTo>(destination, i, Simd::add(before, access.template load<kFrom>(source, i)));
    });
  }

  static void add(void* destination, DType destination_dtype, const void* source, DType source_dtype,
                  std::size_t numel) {
    const IeeeScope scope;
    with_dtype(destination_dtype, [&]<DType kTo>() {
      with_dtype(source_dtype, [&]<DType kFrom>() { add_loop<kTo, kFrom>(destination, source, numel); });
    });
  }

  // Note: sums in passes. Hardware prefetchers follow a handful of streams. More sources than kPassSourceNum are added
  // in several passes over a block, whose partial sums stay in the L2 cache as float: the same additions in the same
  // order as in one pass.
  static constexpr std::size_t kPassSourceNum = 8;
  static constexpr std::size_t kBlockNumel = 16384;
  // Registers read from one source before the next one's turn: with single registers from four sources at once, sums
  // from the L3 cache took up to twice as long on Zen 4.
  static constexpr std::size_t kBurstRegisters = 4;

  // Where sources are expected to lie. Prefetching what is in a cache costs more than it saves.
  enum class Distance { kNear, kFar };

  // `out` and `partial` begin at element `begin` of the sources.
  struct Pass {
    const void* const* sources;
    const float* partial;
    void* out;
    std::size_t begin;
    std::size_t numel;
  };

  template <DType kType, std::size_t kSourceNum, bool kPartial, DType kOut, class Access, Distance kDistance>
  [[gnu::noinline]] static void sum_pass(const Pass& pass) {
    const void* sources[kSourceNum];
    for (std::size_t k = 0; k < kSourceNum; ++k) sources[k] = pass.sources[k];
    const float* partial = pass.partial;
    void* out = pass.out;
    const std::size_t begin = pass.begin;
    std::size_t i = 0;
    for (; i + kBurstRegisters * Simd::kLanes <= pass.numel; i += kBurstRegisters * Simd::kLanes) {
      Float sums[kBurstRegisters];
#pragma GCC unroll 8
      for (std::size_t k = 0; k < kSourceNum; ++k) {
#pragma GCC unroll 4
        for (std::size_t r = 0; r < kBurstRegisters; ++r) {
          const std::size_t at = begin + i + r * Simd::kLanes;
          if constexpr (kDistance == Distance::kFar) prefetch<kType, Simd::kLanes>(sources[k], at);
          const Float value = Access{}.template load<kType>(sources[k], at);
          if (k != 0) {
            sums[r] = Simd::add(sums[r], value);
          } else if constexpr (kPartial) {
            const Float before = Access{}.template load<DType::kFloat32>(partial, i + r * Simd::kLanes);
            sums[r] = Simd::add(before, value);
          } else {
            sums[r] = value;
          }
        }
      }
#pragma GCC unroll 4
      for (std::size_t r = 0; r < kBurstRegisters; ++r) {
        Access{}.template store<kOut>(out, i + r * Simd::kLanes, sums[r]);
      }
    }
    for_each_register<Simd, Access>(i, pass.numel, [&](auto access, std::size_t at) __attribute__((always_inline)) {
      Float sum = access.template load<kType>(sources[0], begin + at);
      if constexpr (kPartial) sum = Simd::add(access.template load<DType::kFloat32>(partial, at), sum);
#pragma GCC unroll 8
      for (std::size_t k = 1; k < kSourceNum; ++k) {
        sum = Simd::add(sum, access.template load<kType>(sources[k], begin + at));
      }
      access.template store<kOut>(out, at, sum);
    });
  }

  template <DType kType, bool kPartial, class Access, Distance kDistance>
  static void last_pass(const Pass& pass, std::size_t source_num) {
    switch (source_num) {
      case 1:
        return sum_pass<kType, 1, kPartial, kType, Access, kDistance>(pass);
      case 2:
        return sum_pass<kType, 2, kPartial, kType, Access, kDistance>(pass);
      case 3:
        return sum_pass<kType, 3, kPartial, kType, Access, kDistance>(pass);
      case 4:
        return sum_pass<kType, 4, kPartial, kType, Access, kDistance>(pass);
      case 5:
        return sum_pass<kType, 5, kPartial, kType, Access, kDistance>(pass);
      case 6:
        return sum_pass<kType, 6, kPartial, kType, Access, kDistance>(pass);
      case 7:
        return sum_pass<kType, 7, kPartial, kType, Access, kDistance>(pass);
      default:
        return sum_pass<kType, 8, kPartial, kType, Access, kDistance>(pass);
    }
  }

  template <DType kType, class Access, Distance kDistance>
  static void sum_range(const Pass& range, std::size_t source_num) {
    if (source_num <= kPassSourceNum) return last_pass<kType, false, Access, kDistance>(range, source_num);
    alignas(kLineBytes) float partial[kBlockNumel];
    for (std::size_t done = 0; done < range.numel; done += kBlockNumel) {
      const std::size_t left = range.numel - done;
      Pass pass{range.sources, partial, partial, range.begin + done, left < kBlockNumel ? left : kBlockNumel};
      sum_pass<kType, kPassSourceNum, false, DType::kFloat32, Whole<Simd>, kDistance>(pass);
      std::size_t source = kPassSourceNum;
      for (; source + kPassSourceNum < source_num; source += kPassSourceNum) {
        pass.sources = range.sources + source;
        sum_pass<kType, kPassSourceNum, true, DType::kFloat32, Whole<Simd>, kDistance>(pass);
      }
      pass.sources = range.sources + source;
      pass.out = static_cast<char*>(range.out) + done * bytes_of<kType>();
      last_pass<kType, true, Access, kDistance>(pass, source_num - source);
    }
  }

  template <DType kType>
  static void reduce_typed(void* destination, const void* const* sources, std::size_t source_num, std::size_t numel) {
    const Pass all{sources, nullptr, destination, 0, numel};
    const std::size_t bytes = numel * bytes_of<kType>();
    if (bytes < kStreamBytes) {
      return source_num <= 2 || source_num * bytes < kFarBytes
                 ? sum_range<kType, Whole<Simd>, Distance::kNear>(all, source_num)
                 : sum_range<kType, Whole<Simd>, Distance::kFar>(all, source_num);
    }
    for (std::size_t k = 0; k < source_num; ++k) {
      if (sources[k] == destination) return sum_range<kType, Whole<Simd>, Distance::kFar>(all, source_num);
    }
    const std::size_t head = numel_to_line(destination, bytes_of<kType>(), numel);
    sum_range<kType, Whole<Simd>, Distance::kFar>({sources, nullptr, destination, 0, head}, source_num);
    void* rest = static_cast<char*>(destination) + head * bytes_of<kType>();
    sum_range<kType, Streamed<Simd>, Distance::kFar>({sources, nullptr, rest, head, numel - head}, source_num);
    Simd::stream_fence();
  }

  static void reduce(void* destination, const void* const* sources, std::size_t source_num, DType dtype,
                     std::size_t numel) {
    const IeeeScope scope;
    with_dtype(dtype, [&]<DType kType>() { reduce_typed<kType>(destination, sources, source_num, numel); });
  }

  static constexpr std::size_t kSumLaneNum = 16;

  template <DType kType>
  ZB_ALWAYS_INLINE static double block_sum(const void* source, std::size_t begin, std::size_t end) {
    constexpr std::size_t kRegisterNum = kSumLaneNum / Simd::kLanes;
    typename Simd::Squares squares;
    std::size_t i = begin;
    for (; i + kSumLaneNum <= end; i += kSumLaneNum) {
#pragma GCC unroll 4
      for (std::size_t k = 0; k < kRegisterNum; ++k) {
        squares.add(k, Simd::template load<kType>(source, i + k * Simd::kLanes));
      }
    }
#pragma GCC unroll 4
    for (std::size_t k = 0; k < kRegisterNum; ++k) {  // zeros past the end add nothing
      const std::size_t at = i + k * Simd::kLanes;
      if (at + Simd::kLanes <= end) {
        squares.add(k, Simd::template load<kType>(source, at));
      } else if (at < end) {
        squares.add(k, Simd::template load<kType>(source, at, end - at));
      }
    }
    double lanes[kSumLaneNum];
    squares.read(lanes);
    for (std::size_t half = kSumLaneNum / 2; half > 0; half /= 2) {
      for (std::size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    return lanes[0];
  }

  template <DType kType>
  [[gnu::noinline]] static double sum_loop(const void* source, std::size_t numel) {
    double sum = 0.0;
    for (std::size_t begin = 0; begin < numel; begin += kSumBlockNumel) {
      const std::size_t left = numel - begin;
      sum += block_sum<kType>(source, begin, left < kSumBlockNumel ? numel : begin + kSumBlockNumel);
    }
    return sum;
  }

  static double sum_of_squares(const void* source, DType dtype, std::size_t numel) {
    const IeeeScope scope;
    return with_dtype(dtype, [&]<DType kType>() { return sum_loop<kType>(source, numel); });
  }

  static void copy(void* destination, const void* source, std::size_t bytes) {
    if (bytes == 0) return;
    if (bytes < kStreamBytes) {
      std::memcpy(destination, source, bytes);
      return;
    }
    auto* to = static_cast<char*>(destination);
    const auto* from = static_cast<const char*>(source);
    const std::size_t head = numel_to_line(to, 1, bytes);
    std::memcpy(to, from, head);
    std::size_t i = head;
    for (; i + 4 * kLineBytes <= bytes; i += 4 * kLineBytes) {
#pragma GCC unroll 4
      for (std::size_t line = 0; line < 4 * kLineBytes; line += kLineBytes) {
        Simd::stream_line(to + i + line, from + i + line);
      }
    }
    Simd::stream_fence();
    std::memcpy(to + i, from + i, bytes - i);
  }
};

}  // namespace
}  // namespace zb
