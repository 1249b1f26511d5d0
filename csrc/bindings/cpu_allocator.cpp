#include "bindings/cpu_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>

#include "memory/ledger.h"

namespace zb {
namespace {

// Data and context of an allocation are the same pointer, as raw_allocate (oneDNN's way in) demands, so the size stands
// in a header before the data. 64 bytes keep the alignment that torch's own allocator gives.
constexpr std::size_t kHeaderBytes = 64;

class CountingAllocator final : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator* inner) { wrapped_ = inner; }

  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, nullptr, &release, c10::Device(c10::kCPU)};
    }
    auto* base = static_cast<std::byte*>(take(bytes));
    std::memcpy(base, &bytes, sizeof bytes);
    process_usage().add(static_cast<std::int64_t>(bytes));
    void* data = base + kHeaderBytes;
    return {data, data, &release, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* destination, const void* source, std::size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }

 private:
  // torch reports exhausted host memory as a plain error; with this type callers need not match its text.
  void* take(std::size_t bytes) {
    try {
      return wrapped_->raw_allocate(bytes + kHeaderBytes);
    } catch (const c10::Error&) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, "torch could not allocate ", bytes, " bytes of host memory");
    }
  }

  static void release(void* data) {
    if (data == nullptr) {
      return;
    }
    auto* base = static_cast<std::byte*>(data) - kHeaderBytes;
    std::size_t bytes = 0;
    std::memcpy(&bytes, base, sizeof bytes);
    wrapped_->raw_deallocate(base);
    process_usage().add(-static_cast<std::int64_t>(bytes));
  }

  static inline c10::Allocator* wrapped_ = nullptr;  // deleters are plain functions
};

}  // namespace

void install_counting_allocator() {
  static std::once_flag once;
  std::call_once(once, [] {
    // Never destroyed: tensors may outlive every other object of the process.
    static auto* allocator = new CountingAllocator(c10::GetCPUAllocator());
    c10::SetCPUAllocator(allocator, 1);
  });
}

}  // namespace zb
