// Words of messages.
#pragma once

#include <chrono>
#include <string>

namespace zb {

inline std::string rank_text(int rank) { return "rank " + std::to_string(rank); }

// With two decimals.
inline std::string seconds_text(std::chrono::milliseconds time) {
  const std::string text = std::to_string(static_cast<double>(time.count()) / 1000.0);
  return text.substr(0, text.find('.') + 3) + " s";
}

}  // namespace zb
