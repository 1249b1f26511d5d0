#include "common/thread_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>
#include <thread>
#include <utility>

#include "common/blocked_signals.h"
#include "common/error.h"

namespace zb {
namespace {

void pause_cpu() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

long futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value) noexcept {
  return syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), operation, value, nullptr, nullptr, 0);
}

}  // namespace

// Named, since ThreadPool::State has members of these types.
namespace detail {

// A counter that one thread waits on. The sleeper flag spares the waker a system call while the waiter still spins.
class alignas(64) Gate {
 public:
  std::uint32_t load() const noexcept { return value_.load(std::memory_order_acquire); }
  void reset(std::uint32_t value) noexcept { value_.store(value, std::memory_order_relaxed); }

  // Adds and wakes the waiter; returns the new value.
  std::uint32_t add(std::uint32_t amount) noexcept {
    const std::uint32_t now = value_.fetch_add(amount, std::memory_order_seq_cst) + amount;
    if (asleep_.load(std::memory_order_seq_cst)) futex(value_, FUTEX_WAKE_PRIVATE, 1);
    return now;
  }

  void wait_while(std::uint32_t seen) noexcept {
    wait_until([seen](std::uint32_t now) { return now != seen; });
  }
  void wait_for(std::uint32_t wanted) noexcept {
    wait_until([wanted](std::uint32_t now) { return now == wanted; });
  }

 private:
  template <class Done>
  void wait_until(Done done) noexcept {
    constexpr int kSpins = 128;  // a few microseconds; longer would take time from other ranks on the same CPU
    for (int spin = 0; spin < kSpins; ++spin) {
      if (done(load())) return;
      pause_cpu();
    }
    asleep_.store(true, std::memory_order_seq_cst);
    for (std::uint32_t now = value_.load(std::memory_order_seq_cst); !done(now);
         now = value_.load(std::memory_order_seq_cst)) {
      futex(value_, FUTEX_WAIT_PRIVATE, now);  // returns at once if the value changed; EINTR is another round
    }
    asleep_.store(false, std::memory_order_relaxed);
  }

  std::atomic<std::uint32_t> value_{0};
  std::atomic<bool> asleep_{false};
};

struct Worker {
  Gate ticket;  // one more for every piece given
  std::size_t begin = 0;
  std::size_t end = 0;
  std::exception_ptr error;
  std::thread thread;
};

}  // namespace detail

namespace {

// A CPU set of any size; the fixed cpu_set_t ends at 1024 CPUs.
class CpuSet {
 public:
  explicit CpuSet(std::size_t cpu_num) : words_((cpu_num + kBits - 1) / kBits, 0) {}
  void insert(int cpu) {
    words_[static_cast<std::size_t>(cpu) / kBits] |= 1UL << (static_cast<std::size_t>(cpu) % kBits);
  }
  bool contains(std::size_t cpu) const { return (words_[cpu / kBits] >> (cpu % kBits) & 1UL) != 0; }
  std::size_t cpu_num() const noexcept { return words_.size() * kBits; }
  std::size_t bytes() const noexcept { return words_.size() * sizeof(unsigned long); }
  cpu_set_t* raw() noexcept { return reinterpret_cast<cpu_set_t*>(words_.data()); }

 private:
  static constexpr std::size_t kBits = sizeof(unsigned long) * CHAR_BIT;
  std::vector<unsigned long> words_;
};

void pin(std::thread& thread, int cpu) {
  ZB_EXPECT(cpu >= 0, "a thread cannot be pinned to CPU " + std::to_string(cpu) + "; CPU numbers start at 0");
  CpuSet set(static_cast<std::size_t>(cpu) + 1);
  set.insert(cpu);
  const int error_number = pthread_setaffinity_np(thread.native_handle(), set.bytes(), set.raw());
  ZB_EXPECT(error_number == 0, "a thread cannot be pinned to CPU " + std::to_string(cpu) + " (" +
                                   std::strerror(error_number) + "); name CPUs that this process may run on");
}

}  // namespace

struct ThreadPool::State {
  std::vector<detail::Worker> workers;  // thread i is workers[i - 1]
  detail::Gate ended;                   // pieces that workers have ended since the loop began
  const std::function<void(std::size_t, std::size_t)>* body = nullptr;
  std::atomic<bool> busy{false};
  bool stopping = false;

  explicit State(std::size_t worker_num) : workers(worker_num) {}
  ~State() { stop(); }

  void run(detail::Worker& worker) noexcept {
    std::uint32_t seen = 0;
    for (;;) {
      worker.ticket.wait_while(seen);
      ++seen;
      if (stopping) return;
      try {
        (*body)(worker.begin, worker.end);
      } catch (...) {
        worker.error = std::current_exception();
      }
      ended.add(1);
    }
  }

  void start(const std::vector<int>& cpus) {
    for (std::size_t i = 0; i < workers.size(); ++i) {
      detail::Worker& worker = workers[i];
      {
        const BlockedSignals blocked;
        worker.thread = std::thread([this, &worker] { run(worker); });
      }
      const std::string name = "zb-pool-" + std::to_string(i + 1);
      pthread_setname_np(worker.thread.native_handle(), name.substr(0, 15).c_str());
      if (!cpus.empty()) pin(worker.thread, cpus[i + 1]);
    }
  }

  void stop() noexcept {
    stopping = true;
    for (detail::Worker& worker : workers) {
      if (!worker.thread.joinable()) continue;
      worker.ticket.add(1);
      worker.thread.join();
    }
  }
};

namespace {

std::size_t worker_num_of(std::size_t thread_num) {
  ZB_EXPECT(thread_num > 0, "a thread pool needs at least one thread (the caller)");
  return thread_num - 1;
}

}  // namespace

ThreadPool::ThreadPool(std::size_t thread_num, std::vector<int> cpus) : state_(worker_num_of(thread_num)) {
  ZB_EXPECT(cpus.empty() || cpus.size() >= thread_num, "a pool of " + std::to_string(thread_num) +
                                                           " pinned threads needs as many CPUs, got " +
                                                           std::to_string(cpus.size()));
  state_->start(cpus);
}

ThreadPool::~ThreadPool() = default;

std::size_t ThreadPool::thread_num() const noexcept { return state_->workers.size() + 1; }

void ThreadPool::parallel_for(std::size_t numel, std::size_t grain_numel,
                              const std::function<void(std::size_t begin, std::size_t end)>& body) {
  ZB_EXPECT(grain_numel > 0, "the grain of a parallel loop must be positive");
  if (numel == 0) return;
  const std::size_t grain_num = (numel - 1) / grain_numel + 1;
  const std::size_t piece_num = std::min(grain_num, thread_num());
  if (piece_num == 1) return body(0, numel);

  State& state = *state_;
  ZB_EXPECT_STATE(state_.is_own(), "a thread pool does not survive fork(); make a new one in the child");
  ZB_EXPECT_STATE(!state.busy.exchange(true, std::memory_order_acquire),
                  "a thread pool runs one loop at a time; give each caller its own pool");
  const auto piece_begin = [&](std::size_t piece) {
    const std::size_t extra = std::min(piece, grain_num % piece_num);
    return std::min(numel, (grain_num / piece_num * piece + extra) * grain_numel);
  };
  state.body = &body;
  state.ended.reset(0);
  for (std::size_t piece = 1; piece < piece_num; ++piece) {
    detail::Worker& worker = state.workers[piece - 1];
    worker.begin = piece_begin(piece);
    worker.end = piece_begin(piece + 1);
    worker.error = nullptr;
    worker.ticket.add(1);
  }
  std::exception_ptr error;
  try {
    body(0, piece_begin(1));
  } catch (...) {
    error = std::current_exception();
  }
  state.ended.wait_for(static_cast<std::uint32_t>(piece_num - 1));
  for (std::size_t piece = 1; piece < piece_num; ++piece) {
    std::exception_ptr worker_error = std::exchange(state.workers[piece - 1].error, nullptr);
    if (!error) error = std::move(worker_error);
  }
  state.busy.store(false, std::memory_order_release);
  if (error) std::rethrow_exception(error);
}

std::vector<int> allowed_cpus() {
  for (std::size_t cpu_num = 1024;; cpu_num *= 2) {
    CpuSet set(cpu_num);
    if (sched_getaffinity(0, set.bytes(), set.raw()) != 0) {
      if (errno == EINVAL && cpu_num < (1U << 20)) continue;  // the machine has more CPUs than the set
      detail::throw_system("sched_getaffinity", {}, std::source_location::current());
    }
    std::vector<int> cpus;
    for (std::size_t cpu = 0; cpu < set.cpu_num(); ++cpu) {
      if (set.contains(cpu)) cpus.push_back(static_cast<int>(cpu));
    }
    return cpus;
  }
}

}  // namespace zb
