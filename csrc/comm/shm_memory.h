// Memory of the shm communicator: memfds that several ranks map, and plain anonymous memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "comm/communicator.h"
#include "comm/file_descriptor.h"

namespace zb::shm {

std::size_t page_bytes() noexcept;
std::size_t round_up_to_page(std::size_t bytes) noexcept;

// What the machine and this process's memory cgroup still have to give.
std::size_t available_host_bytes();

// A range of address space. Ranks that are threads of one process share one mapping of a memfd, which saves page
// tables and lets the thread sanitizer see both sides of every access.
class Mapping {
 public:
  // Throws OutOfMemoryError.
  static std::shared_ptr<Mapping> of_file(const FileDescriptor& memfd, std::size_t bytes);
  static std::shared_ptr<Mapping> anonymous(std::size_t bytes);
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  std::byte* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return bytes_; }

 private:
  Mapping(std::byte* data, std::size_t bytes) : data_(data), bytes_(bytes) {}

  std::byte* data_;
  std::size_t bytes_;
};

// A memfd of this size with holes, sealed against resizing. Throws OutOfMemoryError.
FileDescriptor create_memfd(std::size_t bytes);
// Gives every page of the range memory now, so that a shortage is an error here and not a signal at the first touch.
// `memfd` is what the range maps (from `offset_bytes`), null for anonymous memory. Returns 0 or an errno.
int populate(std::byte* data, std::size_t bytes, const FileDescriptor* memfd, std::size_t offset_bytes) noexcept;

// A registered buffer: this rank's part of a mapping. For kShared the mapping holds one part per rank.
class Buffer final : public RegisteredBuffer {
 public:
  struct Shape {
    std::size_t bytes = 0;
    std::size_t stride_bytes = 0;  // from one rank's part to the next; 0 for kPrivate
    int rank = 0;
  };
  Buffer(std::shared_ptr<Mapping> mapping, Shape shape, const void* owner, std::uint64_t id, BufferRole role,
         Allocation allocation);

  BufferRole role() const noexcept { return role_; }
  const void* owner() const noexcept { return owner_; }  // identity of the communicator, never dereferenced
  std::uint64_t id() const noexcept { return id_; }
  std::byte* data_of(int rank) const noexcept {
    return mapping_->data() + shape_.stride_bytes * static_cast<std::size_t>(rank);
  }

 private:
  std::shared_ptr<Mapping> mapping_;
  Shape shape_;
  const void* owner_;
  std::uint64_t id_;
  BufferRole role_;
  Allocation allocation_;
};

// Throws OutOfMemoryError that says how much was asked for and how much there is.
std::shared_ptr<Mapping> allocate_private(std::size_t bytes);
[[noreturn]] void throw_out_of_memory(std::size_t bytes, const std::string& why);

}  // namespace zb::shm
