#if defined(__x86_64__)

#include "common/simd_avx512.h"
#include "optim/stream_forms.h"
#include "optim/stream_impl.h"

namespace zb {

const StreamForms kAvx512Streams{VectorStreams<Avx512>::adam_mix, VectorStreams<Avx512>::triad};

}  // namespace zb

#endif
