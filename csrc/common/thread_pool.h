// A small pool of pinned threads for loops over memory.
//
// `parallel_for` cuts [0, numel) into one contiguous piece per thread, each a multiple of `grain_numel` (but the last),
// and runs piece 0 in the caller. Idle threads sleep on a futex and cost nothing. One parallel_for at a time per pool;
// exceptions of pieces are rethrown in the caller after all pieces ended. A pool belongs to the process that made it:
// after fork() the child must make its own.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "common/process_owned.h"

namespace zb {

class ThreadPool {
 public:
  // `thread_num` counts the caller. `cpus` pins thread i to cpus[i] (the caller, thread 0, is never pinned);
  // empty means unpinned. Throws ArgumentError for zero threads.
  explicit ThreadPool(std::size_t thread_num, std::vector<int> cpus = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  std::size_t thread_num() const noexcept;
  void parallel_for(std::size_t numel, std::size_t grain_numel,
                    const std::function<void(std::size_t begin, std::size_t end)>& body);

 private:
  struct State;
  ProcessOwned<State> state_;
};

// CPUs this process may run on (sched_getaffinity), in order.
std::vector<int> allowed_cpus();

}  // namespace zb
