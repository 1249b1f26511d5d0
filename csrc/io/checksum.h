// A 64-bit checksum that finds corrupted bytes; not made against an adversary.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace zb {

// Four independent parts of multiply and rotate, so that it runs near the speed of memory.
inline std::uint64_t checksum(std::span<const std::byte> bytes) noexcept {
  constexpr std::uint64_t kFactor = 0x9E3779B97F4A7C15;
  constexpr std::size_t kPartNum = 4;
  std::array<std::uint64_t, kPartNum> parts{1, 2, 3, 4};
  std::array<std::uint64_t, kPartNum> words{};
  std::size_t done = 0;
  for (; done < bytes.size(); done += sizeof(words)) {
    const std::size_t left = bytes.size() - done;
    if (left < sizeof(words)) words = {};
    std::memcpy(words.data(), bytes.data() + done, left < sizeof(words) ? left : sizeof(words));
    for (std::size_t i = 0; i < kPartNum; ++i) parts[i] = std::rotl((parts[i] ^ words[i]) * kFactor, 29);
  }
  std::uint64_t sum = bytes.size();
  for (const std::uint64_t part : parts) sum = std::rotl((sum ^ part) * kFactor, 31);
  return sum;
}

}  // namespace zb
