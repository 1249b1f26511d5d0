// Exception types of the core and the checks that throw them.
//
// Every type has one Python counterpart (bindings/translate.h); nothing is recognised by message text.
// Messages say what was expected, what came, and what to do; they are built only on failure.
#pragma once

#include <cstdint>
#include <source_location>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace zb {

// A value from outside is not acceptable (ValueError).
class ArgumentError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// A call came at a moment when it is not legal (zerobench.StateError).
class StateError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

// A rank died, stalled past the timeout, called another collective, or aborted (zerobench.CommunicationError).
class CommunicationError : public std::runtime_error {
 public:
  // `rank` is the rank at fault, -1 where it is not known.
  CommunicationError(const std::string& message, int rank) : std::runtime_error(message), rank_(rank) {}
  int rank() const noexcept { return rank_; }

 private:
  int rank_;
};

// A system call or transfer failed (OSError with errno and path).
class IoError : public std::system_error {
 public:
  IoError(int error_number, const std::string& what, std::string path = {})
      : std::system_error(error_number, std::generic_category(), what), path_(std::move(path)) {}
  const std::string& path() const noexcept { return path_; }

 private:
  std::string path_;
};

// Memory of a tier ran out (zerobench.OutOfMemoryError, a MemoryError).
class OutOfMemoryError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A CUDA runtime call failed for another reason than memory (zerobench.Error). `code` is its cudaError_t.
class CudaError : public std::runtime_error {
 public:
  CudaError(const std::string& message, int code) : std::runtime_error(message), code_(code) {}
  int code() const noexcept { return code_; }

 private:
  int code_;
};

// An NCCL call failed (zerobench.Error). `code` is its ncclResult_t.
class NcclError : public std::runtime_error {
 public:
  NcclError(const std::string& message, int code) : std::runtime_error(message), code_(code) {}
  int code() const noexcept { return code_; }

 private:
  int code_;
};

// A gradient is not finite where no loss scale is there to retry (zerobench.NonFiniteGradientError).
class NonFiniteGradientError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

namespace detail {

[[noreturn]] void throw_argument(std::string message, std::source_location where);
[[noreturn]] void throw_state(std::string message, std::source_location where);
[[noreturn]] void throw_system(const char* call, std::string path, std::source_location where);

}  // namespace detail
}  // namespace zb

// ZB_EXPECT(condition, message expression): the message is evaluated only on failure.
#define ZB_EXPECT(condition, message)                                           \
  do {                                                                          \
    if (!(condition)) [[unlikely]] {                                            \
      ::zb::detail::throw_argument((message), std::source_location::current()); \
    }                                                                           \
  } while (false)

#define ZB_EXPECT_STATE(condition, message)                                  \
  do {                                                                       \
    if (!(condition)) [[unlikely]] {                                         \
      ::zb::detail::throw_state((message), std::source_location::current()); \
    }                                                                        \
  } while (false)

// ZB_SYS(call): throws IoError with errno when the call returns a negative value; yields the value otherwise.
#define ZB_SYS(call)                                                          \
  ([&] {                                                                      \
    auto zb_result = (call);                                                  \
    if (zb_result < 0) [[unlikely]] {                                         \
      ::zb::detail::throw_system(#call, {}, std::source_location::current()); \
    }                                                                         \
    return zb_result;                                                         \
  }())
