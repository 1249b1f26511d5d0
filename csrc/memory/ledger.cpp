#include "memory/ledger.h"

#include <algorithm>
#include <utility>

namespace zb {

std::string_view tier_name(Tier tier) noexcept {
  constexpr std::array<std::string_view, kTierNum> kNames{"device", "host", "nvme"};
  return kNames[static_cast<std::size_t>(tier)];
}

std::string_view category_name(Category category) noexcept {
  constexpr std::array<std::string_view, kCategoryNum> kNames{"parameters",     "gradients",  "master",
                                                              "exp_avg",        "exp_avg_sq", "gather_slots",
                                                              "gradient_slots", "staging",    "communicators"};
  return kNames[static_cast<std::size_t>(category)];
}

void Ledger::Books::add(Tier tier, Category category, std::int64_t bytes) {
  {
    const std::lock_guard lock(mutex);
    for (Entry* entry : {&entries[static_cast<std::size_t>(tier)][static_cast<std::size_t>(category)],
                         &totals[static_cast<std::size_t>(tier)]}) {
      entry->current_bytes += bytes;
      entry->peak_bytes = std::max(entry->peak_bytes, entry->current_bytes);
    }
  }
  if (tier == Tier::kDevice) process_usage().add(bytes);
}

void Ledger::Books::remove(Tier tier, Category category, std::int64_t bytes) noexcept {
  {
    const std::lock_guard lock(mutex);
    entries[static_cast<std::size_t>(tier)][static_cast<std::size_t>(category)].current_bytes -= bytes;
    totals[static_cast<std::size_t>(tier)].current_bytes -= bytes;
  }
  if (tier == Tier::kDevice) process_usage().add(-bytes);
}

void Ledger::add(Tier tier, Category category, std::int64_t bytes) { books_->add(tier, category, bytes); }

void Ledger::remove(Tier tier, Category category, std::int64_t bytes) noexcept {
  books_->remove(tier, category, bytes);
}

Ledger::Entry Ledger::entry(Tier tier, Category category) const {
  const std::lock_guard lock(books_->mutex);
  return books_->entries[static_cast<std::size_t>(tier)][static_cast<std::size_t>(category)];
}

Ledger::Entry Ledger::total(Tier tier) const {
  const std::lock_guard lock(books_->mutex);
  return books_->totals[static_cast<std::size_t>(tier)];
}

void Ledger::reset_peaks() {
  const std::lock_guard lock(books_->mutex);
  for (auto& tier : books_->entries) {
    for (Entry& entry : tier) entry.peak_bytes = entry.current_bytes;
  }
  for (Entry& entry : books_->totals) entry.peak_bytes = entry.current_bytes;
}

Allocation::Allocation(Ledger* ledger, Tier tier, Category category, std::size_t bytes)
    : books_(ledger != nullptr ? ledger->books_ : nullptr), tier_(tier), category_(category), bytes_(bytes) {
  if (books_) books_->add(tier_, category_, static_cast<std::int64_t>(bytes_));
}

Allocation::Allocation(Allocation&& other) noexcept
    : books_(std::move(other.books_)),
      tier_(other.tier_),
      category_(other.category_),
      bytes_(std::exchange(other.bytes_, 0)) {}

Allocation& Allocation::operator=(Allocation&& other) noexcept {
  if (this != &other) {
    release();
    books_ = std::move(other.books_);
    tier_ = other.tier_;
    category_ = other.category_;
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

Allocation::~Allocation() { release(); }

void Allocation::resize(std::size_t bytes) {
  if (books_ && bytes > bytes_) books_->add(tier_, category_, static_cast<std::int64_t>(bytes - bytes_));
  if (books_ && bytes < bytes_) books_->remove(tier_, category_, static_cast<std::int64_t>(bytes_ - bytes));
  bytes_ = bytes;
}

void Allocation::release() noexcept {
  if (books_) books_->remove(tier_, category_, static_cast<std::int64_t>(bytes_));
  books_.reset();
}

void ProcessUsage::add(std::int64_t bytes) noexcept {
  const std::int64_t now = current_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  std::int64_t peak = peak_.load(std::memory_order_relaxed);
  while (now > peak && !peak_.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
  }
}

void ProcessUsage::reset_peak() noexcept { peak_.store(current_bytes(), std::memory_order_relaxed); }

ProcessUsage& process_usage() noexcept {
  static ProcessUsage usage;
  return usage;
}

}  // namespace zb
