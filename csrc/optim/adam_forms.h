// The single forms of the Adam step; adam.cpp picks among those that this build has.
#pragma once

#include "optim/adam.h"

namespace zb {

void adam_scalar(const AdamSpan& span, const AdamScalars& scalars);
void adam_avx2(const AdamSpan& span, const AdamScalars& scalars);
void adam_avx512(const AdamSpan& span, const AdamScalars& scalars);
void adam_neon(const AdamSpan& span, const AdamScalars& scalars);

}  // namespace zb
