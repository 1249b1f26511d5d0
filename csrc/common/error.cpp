#include "common/error.h"

#include <cerrno>

namespace zb::detail {

void throw_argument(std::string message, std::source_location) { throw ArgumentError(message); }

void throw_state(std::string message, std::source_location) { throw StateError(message); }

void throw_system(const char* call, std::string path, std::source_location where) {
  const int error_number = errno;
  std::string text = std::string(call) + " (" + where.file_name() + ":" + std::to_string(where.line()) + ")";
  throw IoError(error_number, text, std::move(path));
}

}  // namespace zb::detail
