#include "bindings/cpu_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <memory>
#include <mutex>

#include "memory/ledger.h"

namespace zb {
namespace {

class CountingAllocator final : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator* inner) : inner_(inner) {}

  c10::DataPtr allocate(std::size_t bytes) override {
    auto block = std::make_unique<Block>(Block{take(bytes), static_cast<std::int64_t>(bytes)});
    void* data = block->pointer.get();
    process_usage().add(block->bytes);
    return {data, block.release(), &release, c10::Device(c10::kCPU)};
  }

  void copy_data(void* destination, const void* source, std::size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }

 private:
  struct Block {
    c10::DataPtr pointer;
    std::int64_t bytes;
  };

  // torch reports exhausted host memory as a plain error; with this type callers need not match its text.
  c10::DataPtr take(std::size_t bytes) {
    try {
      return inner_->allocate(bytes);
    } catch (const c10::Error&) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, "torch could not allocate ", bytes, " bytes of host memory");
    }
  }

  static void release(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    process_usage().add(-block->bytes);
  }

  c10::Allocator* inner_;
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
