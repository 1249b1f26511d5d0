// ZB_NCCL(call): throws NcclError when an NCCL call fails. Only files of the CUDA module include this.
#pragma once

#include <nccl.h>

#include <source_location>
#include <string>

#include "common/error.h"

namespace zb::detail {

[[noreturn]] inline void throw_nccl(ncclResult_t code, const char* call, std::source_location where) {
  throw NcclError(std::string(call) + ": " + ncclGetErrorString(code) + " (" + where.file_name() + ":" +
                      std::to_string(where.line()) + ")",
                  code);
}

}  // namespace zb::detail

#define ZB_NCCL(call)                                                            \
  do {                                                                           \
    const ncclResult_t zb_code = (call);                                         \
    if (zb_code != ncclSuccess) [[unlikely]] {                                   \
      ::zb::detail::throw_nccl(zb_code, #call, std::source_location::current()); \
    }                                                                            \
  } while (false)
