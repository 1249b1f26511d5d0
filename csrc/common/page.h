// Page sizes of this system, sizes in whole pages, and mappings that begin on a huge page.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

#include "common/round_up.h"

namespace zb {

inline std::size_t page_bytes() noexcept {
  static const auto bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}
inline std::size_t round_up_to_page(std::size_t bytes) noexcept { return round_up(bytes, page_bytes()); }

inline constexpr std::size_t kHugePageBytes = std::size_t{2} << 20U;
constexpr std::size_t round_up_to_huge_page(std::size_t value) noexcept { return round_up(value, kHugePageBytes); }

// `wide` is a mapping of `bytes` (whole pages) with a huge page to spare. Gives its ends back to the system and returns
// where the `bytes` begin that are left: on a huge page, so that huge pages can hold them.
inline std::byte* trim_to_huge_page(void* wide, std::size_t bytes) noexcept {
  const auto address = reinterpret_cast<std::uintptr_t>(wide);
  const std::size_t head_bytes = round_up_to_huge_page(address) - address;
  auto* const begin = static_cast<std::byte*>(wide) + head_bytes;
  if (head_bytes > 0) ::munmap(wide, head_bytes);
  if (head_bytes < kHugePageBytes) ::munmap(begin + bytes, kHugePageBytes - head_bytes);
  return begin;
}

}  // namespace zb
