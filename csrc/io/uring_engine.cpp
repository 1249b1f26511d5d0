// The io_uring engine: one thread owns the ring, hands over whatever waits in one call, and sleeps in the kernel.
//
// All requests come from that thread, since the kernel cancels those of a thread that ends, and runs completions in
// the thread that submitted. Others wake it through an eventfd that the ring polls.
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/error.h"
#include "common/page.h"
#include "common/process_owned.h"
#include "io/io_engine_kinds.h"
#include "io/io_thread.h"
#include "io/ring.h"
#include "memory/host_limits.h"

namespace zb {
namespace {

constexpr std::uint64_t kWakeTag = ~std::uint64_t{0};

// The most that the kernel may count for this memory: of a huge page any part counts as the whole, once.
std::size_t most_counted_bytes(std::span<const std::span<std::byte>> memory) {
  std::vector<std::pair<std::uintptr_t, std::uintptr_t>> spans;
  for (const std::span<std::byte> part : memory) {
    const auto begin = reinterpret_cast<std::uintptr_t>(part.data());
    spans.emplace_back(begin / kHugePageBytes * kHugePageBytes, round_up_to_huge_page(begin + part.size()));
  }
  std::sort(spans.begin(), spans.end());
  std::size_t bytes = 0;
  std::uintptr_t counted_to = 0;
  for (const auto& [begin, end] : spans) {
    if (end <= counted_to) continue;
    bytes += end - std::max(begin, counted_to);
    counted_to = end;
  }
  return bytes;
}

std::string lock_refusal(std::span<const std::span<std::byte>> memory) {
  std::size_t bytes = 0;
  for (const std::span<std::byte> part : memory) bytes += part.size();
  return "io_uring could not register " + memory_text(bytes) + " of memory: it counts as up to " +
         memory_text(most_counted_bytes(memory)) +
         ", because huge pages count in full, and all rings of this user together may lock " +
         memory_text(lock_limit_bytes());
}

// As `ulimit -l` takes it.
std::string lock_cure(std::span<const std::span<std::byte>> memory) {
  return "raise that limit (ulimit -l) to at least " + std::to_string(most_counted_bytes(memory) / 1024) +
         " KiB more than the user's other rings hold, or choose io_engine threads";
}

// What wakes the ring's thread: a descriptor that is readable once somebody rang.
class Bell {
 public:
  Bell() : fd_(ZB_SYS(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK))) {}
  ~Bell() { ::close(fd_); }
  Bell(const Bell&) = delete;
  Bell& operator=(const Bell&) = delete;

  int fd() const noexcept { return fd_; }
  void ring() noexcept {
    const std::uint64_t one = 1;
    static_cast<void>(!::write(fd_, &one, sizeof(one)));  // fails only where it is readable anyway
  }
  void silence() noexcept {
    std::uint64_t count = 0;
    static_cast<void>(!::read(fd_, &count, sizeof(count)));
  }

 private:
  int fd_;
};

// The ring with its thread and what that alone uses, once it runs.
class RingThread {
 public:
  RingThread(System& system, std::size_t depth, BlockQueue& queue) : queue_(queue), ring_(system, depth + 1) {
    slots_.resize(depth);
    for (std::size_t i = depth; i > 0; --i) free_.push_back(i - 1);
  }

  Ring& ring() noexcept { return ring_; }
  void wake() noexcept { bell_.ring(); }
  void start() {
    thread_ = start_io_thread([this] { work(); });
  }
  void join() { thread_.join(); }

 private:
  void work() {
    try {
      ring_.prepare_poll(bell_.fd(), kWakeTag);
      while (fill() || !queue_.stopped()) {
        ring_.submit(1);
        reap();
      }
    } catch (const std::exception& error) {
      std::vector<Block> taken = std::move(continued_);
      for (std::optional<Block>& slot : slots_) {
        if (slot) taken.push_back(std::move(*slot));
      }
      queue_.fail(failure_of(error), taken);
    }
  }

  // Prepares requests until the ring is full or nothing waits; whether any are in flight then.
  bool fill() {
    while (!free_.empty()) {
      std::optional<Block> block;
      if (continued_.empty()) {
        block = queue_.try_take();
      } else {
        block = std::move(continued_.back());
        continued_.pop_back();
      }
      if (!block) break;
      const std::size_t slot = free_.back();
      free_.pop_back();
      ring_.prepare(block->direction, block->file, block->offset, block->memory,
                    ring_.reach(block->memory, block->bytes), slot);
      slots_[slot] = std::move(block);
    }
    return free_.size() < slots_.size();
  }

  void reap() {
    std::uint64_t tag = 0;
    std::int32_t result = 0;
    while (ring_.next(tag, result)) {
      if (tag == kWakeTag) {
        bell_.silence();
        ring_.prepare_poll(bell_.fd(), kWakeTag);
        continue;
      }
      const auto slot = static_cast<std::size_t>(tag);
      std::optional<Block> rest = queue_.finish(*std::exchange(slots_[slot], std::nullopt), result);
      free_.push_back(slot);
      if (rest) continued_.push_back(std::move(*rest));
    }
  }

  BlockQueue& queue_;
  Ring ring_;
  std::vector<std::optional<Block>> slots_;  // in flight, by tag
  std::vector<std::size_t> free_;
  std::vector<Block> continued_;  // what short transfers left
  Bell bell_;
  std::thread thread_;
};

class UringEngine final : public IoEngine {
 public:
  UringEngine(const IoEngineOptions& options, std::vector<IoFile> files, std::span<const std::span<std::byte>> memory,
              System& system)
      : IoEngine(IoEngineKind::kIoUring, std::move(files), options), thread_(system, options.depth, queue_) {
    std::vector<int> fds;
    for (const IoFile& file : queue_.files()) fds.push_back(file.fd);
    thread_->ring().register_files(fds);
    if (!thread_->ring().register_memory(memory)) {
      if (!options.allow_fallback) throw_io(ENOMEM, lock_refusal(memory) + "; " + lock_cure(memory), {});
      note_ = lock_refusal(memory) + ": plain memory instead";
    }
    thread_->start();
  }

  ~UringEngine() override {
    if (!thread_.is_own()) return;
    queue_.stop();
    wake();
    thread_->join();
  }

 private:
  void wake() override { thread_->wake(); }

  ProcessOwned<RingThread> thread_;
};

}  // namespace

std::unique_ptr<IoEngine> make_uring_engine(const IoEngineOptions& options, std::vector<IoFile> files,
                                            std::span<const std::span<std::byte>> memory, System& system) {
  return std::make_unique<UringEngine>(options, std::move(files), memory, system);
}

}  // namespace zb
