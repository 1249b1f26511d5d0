#include "sim/sim_memory.h"

#include <sys/mman.h>

#include "common/error.h"
#include "common/page.h"

namespace zb::test {

SimMemory::SimMemory(std::size_t bytes)
    : memfd_(shm::create_memfd(round_up_to_page(bytes))),
      mapping_(shm::Mapping::of_file(memfd_, round_up_to_page(bytes))) {}

SimWindow::SimWindow(std::span<const std::shared_ptr<SimMemory>> memories) {
  for (const auto& memory : memories) bytes_ += memory->bytes();
  void* const begin = ::mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ZB_EXPECT(begin != MAP_FAILED, "no addresses are left");
  data_ = static_cast<std::byte*>(begin);
  std::byte* at = data_;
  for (const auto& memory : memories) {
    void* const mapped =
        ::mmap(at, memory->bytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory->memfd(), 0);
    ZB_EXPECT(mapped == at, "memory cannot be mapped twice");
    at += memory->bytes();
  }
}

SimWindow::~SimWindow() { ::munmap(data_, bytes_); }

}  // namespace zb::test
