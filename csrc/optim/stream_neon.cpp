#if defined(__aarch64__)

#include "common/simd_neon.h"
#include "optim/stream_forms.h"
#include "optim/stream_impl.h"

namespace zb {

const StreamForms kNeonStreams{VectorStreams<Neon>::adam_mix, VectorStreams<Neon>::triad};

}  // namespace zb

#endif
