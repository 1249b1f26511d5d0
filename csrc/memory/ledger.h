// The ledger: every byte that the engine holds, by tier and category, with peaks.
//
// An Allocation is a ticket: the bytes count from construction to destruction. It may outlive its ledger (a parameter
// keeps its buffer when the engine is gone). Thread-safe.
// `process_usage` counts the same bytes (and, on CPU ranks, those of torch's CPU allocator, see
// bindings/cpu_allocator.cpp) so that one peak covers everything that lives at the same moment.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>

namespace zb {

enum class Tier : std::uint8_t { kDevice, kHost, kNvme };
inline constexpr std::size_t kTierNum = 3;

enum class Category : std::uint8_t {
  kParameters,  // full or sharded parameters in param_dtype
  kGradients,   // full or sharded gradients in accumulate_dtype that outlive a backward
  kMaster,      // fp32 master weights, where the parameters are not fp32 themselves
  kExpAvg,
  kExpAvgSq,
  kGatherSlots,    // unsharded units of stage 3
  kGradientSlots,  // flat gradients of stages 2 and 3 before their reduction
  kStaging,        // whatever a transfer or an accumulation needs in between
  kCommunicators,  // what a communicator takes beyond the buffers that were asked of it
};
inline constexpr std::size_t kCategoryNum = 9;

std::string_view tier_name(Tier tier) noexcept;
std::string_view category_name(Category category) noexcept;

class Ledger {
 public:
  struct Entry {
    std::int64_t current_bytes = 0;
    std::int64_t peak_bytes = 0;
  };

  void add(Tier tier, Category category, std::int64_t bytes);
  void remove(Tier tier, Category category, std::int64_t bytes) noexcept;
  Entry entry(Tier tier, Category category) const;
  Entry total(Tier tier) const;
  void reset_peaks();

 private:
  friend class Allocation;
  struct Books {
    mutable std::mutex mutex;
    std::array<std::array<Entry, kCategoryNum>, kTierNum> entries{};
    std::array<Entry, kTierNum> totals{};

    void add(Tier tier, Category category, std::int64_t bytes);
    void remove(Tier tier, Category category, std::int64_t bytes) noexcept;
  };

  std::shared_ptr<Books> books_ = std::make_shared<Books>();
};

// Movable ticket for bytes in a ledger; an empty one (no ledger) counts nothing.
class Allocation {
 public:
  Allocation() = default;
  Allocation(Ledger* ledger, Tier tier, Category category, std::size_t bytes);
  Allocation(Allocation&& other) noexcept;
  Allocation& operator=(Allocation&& other) noexcept;
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;
  ~Allocation();

  std::size_t bytes() const noexcept { return bytes_; }
  void resize(std::size_t bytes);

 private:
  void release() noexcept;

  std::shared_ptr<Ledger::Books> books_;
  Tier tier_ = Tier::kDevice;
  Category category_ = Category::kStaging;
  std::size_t bytes_ = 0;
};

// Bytes alive in this process on the device tier of a CPU rank: current and peak.
class ProcessUsage {
 public:
  void add(std::int64_t bytes) noexcept;
  std::int64_t current_bytes() const noexcept { return current_.load(std::memory_order_relaxed); }
  std::int64_t peak_bytes() const noexcept { return peak_.load(std::memory_order_relaxed); }
  void reset_peak() noexcept;

 private:
  std::atomic<std::int64_t> current_{0};
  std::atomic<std::int64_t> peak_{0};
};

ProcessUsage& process_usage() noexcept;

}  // namespace zb
