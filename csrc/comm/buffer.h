// The registered buffer of every communicator on CPU: memory of this process alone, or this rank's part of a mapping
// that all ranks share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "comm/communicator.h"
#include "memory/host_buffer.h"

namespace zb {

class Buffer final : public RegisteredBuffer {
 public:
  // The parts of all ranks in one mapping, `stride_bytes` apart.
  struct Parts {
    std::shared_ptr<const void> mapping;
    std::uint64_t id = 0;  // the same on all ranks, and of no other mapping
    std::byte* begin = nullptr;
    std::size_t stride_bytes = 0;
    int rank = 0;
    int world_size = 0;
  };

  Buffer(std::size_t bytes, BufferRole role, HostBuffer memory);
  Buffer(std::size_t bytes, Parts parts, Allocation allocation);

  BufferRole role() const noexcept { return role_; }
  const Parts& parts() const noexcept { return parts_; }  // of no ranks for a local buffer
  // Another rank's part, where there are parts.
  std::byte* data_of(int rank) const noexcept {
    return parts_.begin + parts_.stride_bytes * static_cast<std::size_t>(rank);
  }

 private:
  BufferRole role_;
  HostBuffer memory_;
  Parts parts_;
  Allocation allocation_;
};

// A buffer of this process's memory with every page in place. Throws OutOfMemoryError, also where the pages could be
// mapped but not be filled.
std::shared_ptr<Buffer> allocate_local(std::size_t bytes, BufferRole role, Ledger* ledger, Category category);

// Gives every page of a mapped range memory, so that a shortage is an error here and not a signal at the first touch.
// Returns 0 or an errno; EINVAL where the kernel cannot (Linux before 5.14).
int populate(std::byte* data, std::size_t bytes) noexcept;

[[noreturn]] void throw_out_of_memory(std::size_t bytes, const std::string& why);

}  // namespace zb
