// Which vector instruction sets this machine and this build have.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace zb {

enum class Isa : std::uint8_t { kScalar, kNeon, kAvx2, kAvx512 };

std::string_view isa_name(Isa isa) noexcept;
// Usable here, scalar first, best last. AVX2 means AVX2 with FMA and F16C; AVX-512 means F, BW, DQ and VL.
const std::vector<Isa>& available_isas();
// The best available one, unless ZEROBENCH_ISA=scalar|neon|avx2|avx512 names another; throws ArgumentError where that
// one is not available.
Isa best_isa();

}  // namespace zb
