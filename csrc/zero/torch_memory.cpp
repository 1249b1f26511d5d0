#include "zero/torch_memory.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <exception>
#include <utility>

#include "common/error.h"

namespace zb {
namespace {

c10::Stream current_stream(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

void order(const c10::Stream& first, const c10::Stream& second) {
  if (first == second) return;
  c10::Event given(first.device_type());
  given.record(first);
  given.block(second);
}

struct RetainedBlock {
  RetainedBlock(std::shared_ptr<const TorchMemory> user, c10::DataPtr taken)
      : memory(std::move(taken)), use(std::move(user), memory) {}

  c10::DataPtr memory;
  TorchMemory::Use use;
};

}  // namespace

TorchMemory::TorchMemory(const std::string& device) : device_(device), stream_(current_stream(device_)) {}

void TorchMemory::follow_current_stream() { stream_ = current_stream(device_); }

std::shared_ptr<std::byte> TorchMemory::allocate(std::size_t bytes) const {
  const c10::StreamGuard guard(stream_);  // autograd's threads have streams of their own
  try {
    auto block =
        std::make_shared<RetainedBlock>(shared_from_this(), c10::GetAllocator(device_.type())->allocate(bytes));
    auto* data = static_cast<std::byte*>(block->memory.get());
    return {std::move(block), data};
  } catch (const c10::OutOfMemoryError&) {
    throw OutOfMemoryError(device_.str() + " ran out of memory: reduced gradients need " + std::to_string(bytes) +
                           " bytes more; use a smaller batch, gradient checkpointing, more devices or a smaller model");
  }
}

void TorchMemory::lead_current_stream() const { order(stream_, current_stream(device_)); }

void TorchMemory::join_current_stream() const { order(current_stream(device_), stream_); }

void TorchMemory::take_over(const c10::DataPtr& memory) const {
  if (current_stream(device_) == stream_) return;
  join_current_stream();
  c10::impl::VirtualGuardImpl(device_.type()).recordDataPtrOnStream(memory, stream_);
}

TorchMemory::Use::Use(std::shared_ptr<const TorchMemory> user, const c10::DataPtr& memory)
    : user_(std::move(user)), memory_(memory), first_(user_->stream_) {}

TorchMemory::Use::~Use() {
  if (user_->stream_ == first_) return;
  try {
    c10::impl::VirtualGuardImpl(user_->device_.type()).recordDataPtrOnStream(memory_, user_->stream_);
  } catch (const std::exception&) {
    // The device has failed, and runs nothing any more.
  }
}

}  // namespace zb
