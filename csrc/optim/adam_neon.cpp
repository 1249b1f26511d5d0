#if defined(__aarch64__)

#include "common/simd_neon.h"
#include "optim/adam_forms.h"
#include "optim/adam_impl.h"

namespace zb {

void adam_neon(const AdamSpan& span, const AdamScalars& scalars) { vector_adam<Neon>(span, scalars); }

}  // namespace zb

#endif
