// Owner of page-aligned, zero-filled CPU memory that counts in a ledger.
//
// Memory comes from mmap, so it is exact to the page, zero without being touched, and goes back to the system at once.
// From 4 MiB up it begins on a huge-page boundary and asks for huge pages. The ledger counts the bytes asked for.
#pragma once

#include <cstddef>
#include <string_view>

#include "memory/ledger.h"

namespace zb {

class HostBuffer {
 public:
  HostBuffer() = default;  // empty
  // `ledger` may be null. Throws OutOfMemoryError.
  HostBuffer(std::size_t bytes, Ledger* ledger, Tier tier, Category category);
  // Counted elsewhere; errors say `what` it was for.
  HostBuffer(std::size_t bytes, std::string_view what);
  HostBuffer(HostBuffer&& other) noexcept;
  HostBuffer& operator=(HostBuffer&& other) noexcept;
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;
  ~HostBuffer();

  std::byte* data() const noexcept { return data_; }  // null when empty
  std::size_t bytes() const noexcept { return bytes_; }
  template <class T>
  T* as() const noexcept {
    return reinterpret_cast<T*>(data_);
  }

 private:
  const char* map_pages(std::size_t bytes) noexcept;  // null, or what went wrong
  void unmap() noexcept;

  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  Allocation allocation_;
};

}  // namespace zb
