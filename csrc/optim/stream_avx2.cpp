#if defined(__x86_64__)

#include "common/simd_avx2.h"
#include "optim/stream_forms.h"
#include "optim/stream_impl.h"

namespace zb {

const StreamForms kAvx2Streams{VectorStreams<Avx2>::adam_mix, VectorStreams<Avx2>::triad};

}  // namespace zb

#endif
