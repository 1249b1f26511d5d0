#include "common/cpu_features.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include "common/error.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace zb {
namespace {

#if defined(__x86_64__)

// Register state that the kernel saves for us; a CPU flag alone says nothing about that.
std::uint64_t saved_register_state() {
  std::uint32_t low = 0;
  std::uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<std::uint64_t>(high) << 32) | low;
}

constexpr bool has_bits(std::uint64_t value, std::uint64_t bits) { return (value & bits) == bits; }

std::vector<Isa> detect() {
  constexpr std::uint64_t kYmmState = 0x06;  // SSE, AVX
  constexpr std::uint64_t kZmmState = 0xE6;  // and opmask, upper ZMM0-15, ZMM16-31
  constexpr std::uint32_t kLeaf1 = bit_FMA | bit_F16C | bit_AVX | bit_OSXSAVE;
  constexpr std::uint32_t kAvx512 = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
  std::vector<Isa> isas{Isa::kScalar};
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || !has_bits(ecx, kLeaf1)) return isas;
  const std::uint64_t state = saved_register_state();
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return isas;
  if (!has_bits(ebx, bit_AVX2) || !has_bits(state, kYmmState)) return isas;
  isas.push_back(Isa::kAvx2);
  if (has_bits(ebx, kAvx512) && has_bits(state, kZmmState)) isas.push_back(Isa::kAvx512);
  return isas;
}

#elif defined(__aarch64__)

std::vector<Isa> detect() { return {Isa::kScalar, Isa::kNeon}; }  // NEON is part of AArch64

#else

std::vector<Isa> detect() { return {Isa::kScalar}; }

#endif

}  // namespace

std::string_view isa_name(Isa isa) noexcept {
  switch (isa) {
    case Isa::kScalar:
      return "scalar";
    case Isa::kNeon:
      return "neon";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

const std::vector<Isa>& available_isas() {
  static const std::vector<Isa> isas = detect();
  return isas;
}

Isa best_isa() {
  const std::vector<Isa>& isas = available_isas();
  const char* wanted = std::getenv("ZEROBENCH_ISA");
  if (wanted == nullptr || *wanted == '\0') return isas.back();
  const auto found = std::find_if(isas.begin(), isas.end(), [&](Isa isa) { return isa_name(isa) == wanted; });
  if (found != isas.end()) return *found;
  std::string names;
  for (const Isa isa : isas) names += (names.empty() ? "" : ", ") + std::string(isa_name(isa));
  throw ArgumentError("ZEROBENCH_ISA=" + std::string(wanted) + " is not available here; set it to one of " + names +
                      ", or unset it");
}

}  // namespace zb
