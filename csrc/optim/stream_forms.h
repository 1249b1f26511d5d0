// The single forms of the streams; stream.cpp picks the best that this build has.
#pragma once

#include "optim/adam.h"

namespace zb {

struct StreamForms {
  void (*adam_mix)(const AdamSpan& span);
  void (*triad)(float* destination, const float* a, const float* b, float factor, std::size_t numel);
};

extern const StreamForms kScalarStreams;
extern const StreamForms kAvx2Streams;
extern const StreamForms kAvx512Streams;
extern const StreamForms kNeonStreams;

}  // namespace zb
