// ZB_NCCL(call): throws NcclError when an NCCL call fails. Only files of the CUDA module include this.
#pragma once

#include <nccl.h>

#include <source_location>
#include <stdexcept>
#include <string>

namespace zb {

// An NCCL call failed (zerobench.Error).
class NcclError : public std::runtime_error {
 public:
  NcclError(const std::string& message, ncclResult_t code) : std::runtime_error(message), code_(code) {}
  ncclResult_t code() const noexcept { return code_; }

 private:
  ncclResult_t code_;
};

namespace detail {

[[noreturn]] inline void throw_nccl(ncclResult_t code, const char* call, std::source_location where) {
  throw NcclError(std::string(call) + ": " + ncclGetErrorString(code) + " (" + where.file_name() + ":" +
                      std::to_string(where.line()) + ")",
                  code);
}

}  // namespace detail
}  // namespace zb

#define ZB_NCCL(call)                                                            \
  do {                                                                           \
    const ncclResult_t zb_code = (call);                                         \
    if (zb_code != ncclSuccess) [[unlikely]] {                                   \
      ::zb::detail::throw_nccl(zb_code, #call, std::source_location::current()); \
    }                                                                            \
  } while (false)
