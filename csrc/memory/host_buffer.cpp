#include "memory/host_buffer.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "common/error.h"
#include "common/page.h"

namespace zb {
namespace {

constexpr std::size_t kHugeFromBytes = std::size_t{4} << 20;

std::string in_mib(std::size_t bytes) {
  char text[64];
  std::snprintf(text, sizeof(text), "%.1f MiB", static_cast<double>(bytes) / (1 << 20));
  return text;
}

[[noreturn]] void throw_out_of_memory(std::size_t bytes, Tier tier, std::string_view what, const char* cause,
                                      const std::string& held) {
  throw OutOfMemoryError(std::string(tier_name(tier)) + " memory ran out: " + in_mib(bytes) + " (" +
                         std::to_string(bytes) + " bytes) for " + std::string(what) + " could not be mapped (" + cause +
                         ")" + held + "; use more ranks, a higher stage or a smaller model");
}

std::byte* map(std::size_t bytes) {
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return address == MAP_FAILED ? nullptr : static_cast<std::byte*>(address);
}

std::byte* map_huge(std::size_t mapped_bytes) {
  std::byte* wide = map(mapped_bytes + kHugePageBytes);
  if (wide == nullptr) return nullptr;
  std::byte* const data = trim_to_huge_page(wide, mapped_bytes);
  madvise(data, mapped_bytes, MADV_HUGEPAGE);  // advice: a kernel without huge pages is no error
  return data;
}

}  // namespace

HostBuffer::HostBuffer(std::size_t bytes, Ledger* ledger, Tier tier, Category category) {
  if (const char* cause = map_pages(bytes)) {
    std::string held;
    if (ledger != nullptr) {
      held = ", with " + in_mib(static_cast<std::size_t>(ledger->total(tier).current_bytes)) + " held already";
    }
    throw_out_of_memory(bytes, tier, category_name(category), cause, held);
  }
  if (bytes != 0) allocation_ = Allocation(ledger, tier, category, bytes);
}

HostBuffer::HostBuffer(std::size_t bytes, std::string_view what) {
  if (const char* cause = map_pages(bytes)) throw_out_of_memory(bytes, Tier::kDevice, what, cause, {});
}

const char* HostBuffer::map_pages(std::size_t bytes) noexcept {
  if (bytes == 0) return nullptr;
  if (bytes > std::numeric_limits<std::size_t>::max() / 2) return "larger than the address space";
  const std::size_t mapped_bytes = round_up_to_page(bytes);
  data_ = bytes >= kHugeFromBytes ? map_huge(mapped_bytes) : map(mapped_bytes);
  if (data_ == nullptr) return std::strerror(errno);
  bytes_ = bytes;
  return nullptr;
}

HostBuffer::HostBuffer(HostBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      allocation_(std::move(other.allocation_)) {}

HostBuffer& HostBuffer::operator=(HostBuffer&& other) noexcept {
  if (this != &other) {
    unmap();
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    allocation_ = std::move(other.allocation_);
  }
  return *this;
}

HostBuffer::~HostBuffer() { unmap(); }

void HostBuffer::unmap() noexcept {
  if (data_ != nullptr) munmap(data_, round_up_to_page(bytes_));
  data_ = nullptr;
  bytes_ = 0;
}

}  // namespace zb
