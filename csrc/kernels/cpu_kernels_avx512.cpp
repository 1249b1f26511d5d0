#if defined(__x86_64__)

#include "common/simd_avx512.h"
#include "kernels/cpu_kernels_forms.h"
#include "kernels/cpu_kernels_impl.h"

namespace zb {

const CpuKernels kAvx512Kernels{VectorKernels<Avx512>::cast, VectorKernels<Avx512>::add, VectorKernels<Avx512>::reduce,
                                VectorKernels<Avx512>::sum_of_squares, VectorKernels<Avx512>::copy};

}  // namespace zb

#endif
