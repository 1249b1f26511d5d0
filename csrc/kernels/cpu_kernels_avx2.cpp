#if defined(__x86_64__)

#include "common/simd_avx2.h"
#include "kernels/cpu_kernels_forms.h"
#include "kernels/cpu_kernels_impl.h"

namespace zb {

const CpuKernels kAvx2Kernels{VectorKernels<Avx2>::cast, VectorKernels<Avx2>::add, VectorKernels<Avx2>::reduce,
                              VectorKernels<Avx2>::sum_of_squares, VectorKernels<Avx2>::copy};

}  // namespace zb

#endif
