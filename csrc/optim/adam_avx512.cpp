#if defined(__x86_64__)

#include "common/simd_avx512.h"
#include "optim/adam_forms.h"
#include "optim/adam_impl.h"

namespace zb {

void adam_avx512(const AdamSpan& span, const AdamScalars& scalars) { vector_adam<Avx512>(span, scalars); }

}  // namespace zb

#endif
