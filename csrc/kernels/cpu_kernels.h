// Elementwise and reduction kernels for CPU memory, one table of function pointers per instruction set.
//
// Every form gives the same bits: conversions round to nearest even, sums run in the written order. bf16 and fp16 are
// raw 16-bit words. Pointers need only element alignment; destination and source ranges may be the same
// range where noted, and never overlap otherwise.
#pragma once

#include <cstddef>
#include <span>

#include "common/cpu_features.h"
#include "common/dtype.h"

namespace zb {

struct CpuKernels {
  // destination[i] = convert(source[i])
  void (*cast)(void* destination, DType destination_dtype, const void* source, DType source_dtype, std::size_t numel);
  // destination[i] = convert(float(destination[i]) + float(source[i]))
  void (*add)(void* destination, DType destination_dtype, const void* source, DType source_dtype, std::size_t numel);
  // destination[i] = convert(((s0[i] + s1[i]) + s2[i]) + ...), added in float in the order of `sources`.
  // destination may be one of the sources.
  void (*reduce)(void* destination, const void* const* sources, std::size_t source_num, DType dtype, std::size_t numel);
  // Sum of squares in double in a fixed order: 16 lanes (lane = index mod 16) over blocks of kSumBlockNumel elements,
  // lanes folded pairwise (8, 4, 2, 1), blocks added in order. Not finite if any element is not.
  double (*sum_of_squares)(const void* source, DType dtype, std::size_t numel);
  // Plain copy that passes the caches for large sizes (non-temporal stores where the instruction set has them).
  void (*copy)(void* destination, const void* source, std::size_t bytes);
};

inline constexpr std::size_t kSumBlockNumel = 4096;

// The table for an instruction set; throws ArgumentError where this machine or build lacks it.
const CpuKernels& cpu_kernels(Isa isa);
// The table for the best instruction set of this machine.
const CpuKernels& cpu_kernels();

}  // namespace zb
