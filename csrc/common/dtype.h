// The element types that flat buffers and collectives know.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "common/error.h"

namespace zb {

enum class DType : std::uint8_t { kFloat32, kBFloat16, kFloat16 };

constexpr std::size_t dtype_bytes(DType dtype) noexcept { return dtype == DType::kFloat32 ? 4 : 2; }

constexpr std::string_view dtype_name(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
  }
  return "unknown";
}

// "float32", "bfloat16" or "float16"; throws ArgumentError.
inline DType dtype_from_name(const std::string& name) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    if (name == dtype_name(dtype)) return dtype;
  }
  throw ArgumentError("'" + name + "' is not a dtype of the engine; use float32, bfloat16 or float16");
}

}  // namespace zb
