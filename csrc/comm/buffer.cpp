#include "comm/buffer.h"

#include <sys/mman.h>

#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

#include "memory/host_limits.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace zb {

void throw_out_of_memory(std::size_t bytes, const std::string& why) {
  throw OutOfMemoryError("cannot allocate " + std::to_string(bytes) + " bytes of host memory: " + why +
                         "; use a smaller model, batch or world size");
}

int populate(std::byte* data, std::size_t bytes) noexcept {
  if (bytes == 0 || ::madvise(data, bytes, MADV_POPULATE_WRITE) == 0) return 0;
  return errno == EFAULT ? ENOMEM : errno;  // EFAULT is what would have been SIGBUS
}

std::shared_ptr<Buffer> allocate_local(std::size_t bytes, BufferRole role, Ledger* ledger, Category category) {
  const std::size_t available = available_host_bytes();
  if (bytes > available) throw_out_of_memory(bytes, "only " + std::to_string(available) + " bytes are available");
  HostBuffer memory(bytes, ledger, Tier::kDevice, category);
  const int error_number = populate(memory.data(), bytes);
  // Without the call, pages come at the first touch.
  if (error_number != 0 && error_number != EINVAL) {
    throw_out_of_memory(bytes, std::generic_category().message(error_number));
  }
  return std::make_shared<Buffer>(bytes, role, std::move(memory));
}

Buffer::Buffer(std::size_t bytes, BufferRole role, HostBuffer memory) : role_(role), memory_(std::move(memory)) {
  data_ = memory_.data();
  bytes_ = bytes;
}

Buffer::Buffer(std::size_t bytes, Parts parts, Allocation allocation)
    : role_(BufferRole::kShared), parts_(std::move(parts)), allocation_(std::move(allocation)) {
  data_ = data_of(parts_.rank);
  bytes_ = bytes;
}

}  // namespace zb
