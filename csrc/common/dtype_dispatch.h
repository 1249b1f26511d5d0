// Turns a run-time DType into a template argument: `with_dtype(dtype, [&]<DType kType>() { ... })`.
#pragma once

#include "common/dtype.h"

namespace zb {
namespace {  // internal linkage: included by sources with different instruction set flags

template <class Body>
decltype(auto) with_dtype(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kBFloat16:
      return body.template operator()<DType::kBFloat16>();
    case DType::kFloat16:
      return body.template operator()<DType::kFloat16>();
    case DType::kFloat32:
      break;
  }
  return body.template operator()<DType::kFloat32>();
}

}  // namespace
}  // namespace zb
