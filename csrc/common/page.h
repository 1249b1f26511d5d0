// Page sizes of this system, and sizes in whole pages.
#pragma once

#include <unistd.h>

#include <cstddef>

#include "common/round_up.h"

namespace zb {

inline std::size_t page_bytes() noexcept {
  static const auto bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}
inline std::size_t round_up_to_page(std::size_t bytes) noexcept { return round_up(bytes, page_bytes()); }

inline constexpr std::size_t kHugePageBytes = std::size_t{2} << 20U;
constexpr std::size_t round_up_to_huge_page(std::size_t value) noexcept { return round_up(value, kHugePageBytes); }

}  // namespace zb
