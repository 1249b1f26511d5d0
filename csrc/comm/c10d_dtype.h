// The engine's dtypes as torch names them, and back.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "common/dtype.h"

namespace zb {

constexpr c10::ScalarType scalar_type(DType dtype) noexcept {
  switch (dtype) {
    case DType::kBFloat16:
      return c10::ScalarType::BFloat16;
    case DType::kFloat16:
      return c10::ScalarType::Half;
    case DType::kFloat32:
      break;
  }
  return c10::ScalarType::Float;
}

// Empty for the types that flat buffers cannot hold.
constexpr std::optional<DType> dtype_of(c10::ScalarType type) noexcept {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    if (scalar_type(dtype) == type) return dtype;
  }
  return std::nullopt;
}

}  // namespace zb
