// The tables of the single forms; cpu_kernels.cpp picks among those that this build has.
#pragma once

#include "kernels/cpu_kernels.h"

namespace zb {

extern const CpuKernels kScalarKernels;
extern const CpuKernels kAvx2Kernels;
extern const CpuKernels kAvx512Kernels;
extern const CpuKernels kNeonKernels;

}  // namespace zb
