#include "kernels/cpu_device.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "kernels/cpu_kernels.h"
#include "kernels/norm.h"
#include "memory/host_buffer.h"

namespace zb {
namespace {

class CpuDevice final : public Device {
 public:
  bool is_async() const noexcept override { return false; }
  void* stream(Lane) const noexcept override { return nullptr; }

  MarkPtr mark(Lane) override { return nullptr; }
  void wait(Lane, const MarkPtr&) override {}
  bool has_passed(const MarkPtr&) override { return true; }
  void synchronize(const MarkPtr&) override {}
  void synchronize() override {}

  std::shared_ptr<std::byte> allocate(std::size_t bytes, std::string_view what) override {
    auto buffer = std::make_shared<HostBuffer>(bytes, what);
    return {buffer, buffer->data()};
  }
  std::shared_ptr<std::byte> allocate_pinned(std::size_t bytes) override { return allocate(bytes, "a transfer"); }

  void cast(Lane, void* destination, DType destination_dtype, const void* source, DType source_dtype,
            std::size_t numel) override {
    kernels_.cast(destination, destination_dtype, source, source_dtype, numel);
  }

  void add(Lane, void* destination, DType destination_dtype, const void* source, DType source_dtype,
           std::size_t numel) override {
    kernels_.add(destination, destination_dtype, source, source_dtype, numel);
  }

  void sum(Lane, void* destination, std::span<const void* const> sources, DType dtype, std::size_t numel) override {
    kernels_.reduce(destination, sources.data(), sources.size(), dtype, numel);
  }

  void pack(Lane, std::span<const PackItem> items) override {
    for (const PackItem& item : items) {
      if (item.source == nullptr) {
        std::memset(item.destination, 0, item.bytes());
      } else {
        (item.accumulate ? kernels_.add : kernels_.cast)(item.destination, item.destination_dtype, item.source,
                                                         item.source_dtype, item.numel);
      }
    }
  }

  void zero(Lane, void* destination, std::size_t bytes) override {
    if (bytes != 0) std::memset(destination, 0, bytes);
  }
  void copy(Lane, void* destination, const void* source, std::size_t bytes) override {
    kernels_.copy(destination, source, bytes);
  }
  void copy_to_pinned(Lane, std::byte* host, const void* source, std::size_t bytes) override {
    if (bytes != 0) std::memcpy(host, source, bytes);
  }
  void copy_from_pinned(Lane, void* destination, const std::byte* host, std::size_t bytes) override {
    if (bytes != 0) std::memcpy(destination, host, bytes);
  }

  void sums_of_squares(Lane, DType dtype, std::span<const SquareSum> sums) override {
    for (const SquareSum& sum : sums) {
      *sum.result = 0.0;
      for (const FlatPiece& piece : sum.pieces) {
        *sum.result += kernels_.sum_of_squares(piece.data, dtype, piece.numel);
      }
    }
  }
  void combine_norm(Lane, const NormArguments& arguments) override { combine_partial_sums(arguments); }

  void download(void* host, const void* source, std::size_t bytes) override {
    if (bytes != 0) std::memcpy(host, source, bytes);
  }
  void upload(void* destination, const void* host, std::size_t bytes) override {
    if (bytes != 0) std::memcpy(destination, host, bytes);
  }

 private:
  const CpuKernels& kernels_ = cpu_kernels();
};

}  // namespace

std::shared_ptr<Device> make_cpu_device() { return std::make_shared<CpuDevice>(); }

}  // namespace zb
