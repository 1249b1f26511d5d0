#if defined(__x86_64__)

#include "common/simd_avx2.h"
#include "optim/adam_forms.h"
#include "optim/adam_impl.h"

namespace zb {

void adam_avx2(const AdamSpan& span, const AdamScalars& scalars) { vector_adam<Avx2>(span, scalars); }

}  // namespace zb

#endif
