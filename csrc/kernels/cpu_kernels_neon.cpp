#if defined(__aarch64__)

#include "common/simd_neon.h"
#include "kernels/cpu_kernels_forms.h"
#include "kernels/cpu_kernels_impl.h"

namespace zb {

const CpuKernels kNeonKernels{VectorKernels<Neon>::cast, VectorKernels<Neon>::add, VectorKernels<Neon>::reduce,
                              VectorKernels<Neon>::sum_of_squares, VectorKernels<Neon>::copy};

}  // namespace zb

#endif
