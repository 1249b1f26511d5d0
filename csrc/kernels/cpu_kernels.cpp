#include "kernels/cpu_kernels.h"

#include <algorithm>
#include <string>

#include "common/error.h"
#include "kernels/cpu_kernels_forms.h"

namespace zb {

const CpuKernels& cpu_kernels(Isa isa) {
  const auto& isas = available_isas();
  if (std::find(isas.begin(), isas.end(), isa) != isas.end()) {
    switch (isa) {
#if defined(__x86_64__)
      case Isa::kAvx2:
        return kAvx2Kernels;
      case Isa::kAvx512:
        return kAvx512Kernels;
#elif defined(__aarch64__)
      case Isa::kNeon:
        return kNeonKernels;
#endif
      case Isa::kScalar:
        return kScalarKernels;
      default:
        break;
    }
  }
  throw ArgumentError("this machine has no " + std::string(isa_name(isa)) + " instructions; choose one of " +
                      "zb::available_isas()");
}

const CpuKernels& cpu_kernels() {
  static const CpuKernels& best = cpu_kernels(best_isa());
  return best;
}

}  // namespace zb
