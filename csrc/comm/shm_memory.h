// Memory that ranks of one host share: memfds, and their mappings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "comm/buffer.h"
#include "comm/file_descriptor.h"

namespace zb::shm {

// A range of address space. Ranks that are threads of one process share one mapping of a memfd, which saves page
// tables and lets the thread sanitizer see both sides of every access.
class Mapping {
 public:
  // Throws OutOfMemoryError.
  static std::shared_ptr<Mapping> of_file(const FileDescriptor& memfd, std::size_t bytes);
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  std::byte* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return bytes_; }
  std::uint64_t id() const noexcept { return id_; }  // the memfd's inode, so it is the same on all ranks

 private:
  Mapping(std::byte* data, std::size_t bytes, std::uint64_t id) : data_(data), bytes_(bytes), id_(id) {}

  std::byte* data_;
  std::size_t bytes_;
  std::uint64_t id_;
};

// A memfd of this size with holes, sealed against resizing. Throws OutOfMemoryError.
FileDescriptor create_memfd(std::size_t bytes);
// Gives every page of a part of the mapping memory now, huge pages where the kernel has them; see zb::populate. Returns
// 0 or an errno.
int populate_file(const FileDescriptor& memfd, const Mapping& mapping, std::size_t offset_bytes,
                  std::size_t bytes) noexcept;

}  // namespace zb::shm
