// What the tests of csrc/io share: a folder that goes away, system calls that fail on demand, and an io_uring of our
// own making whose completions come in a random order and whose transfers obey the same faults.
#pragma once

#include <linux/io_uring.h>
#include <sys/uio.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "io/ring.h"
#include "io/system.h"

namespace zb::test {

class Folder {
 public:
  Folder();
  ~Folder();
  const std::string& path() const { return path_; }
  std::size_t file_num() const;

 private:
  std::string path_;
};

// The kernel, but for what a test makes fail.
class FaultySystem : public System {
 public:
  // 0: as the kernel does; n > 0: at most n bytes; n < 0: fails with that -errno.
  std::function<ssize_t(Direction direction, std::uint64_t offset, std::size_t bytes)> transfer_fault;
  bool direct_refused = false;
  int fallocate_error = 0;
  int ring_error = 0;
  std::function<int()> enter_fault;  // 0, or -errno

  int open(const char* path, int flags, mode_t mode) override;
  int fallocate(int fd, std::uint64_t bytes) override;
  ssize_t pread(int fd, std::byte* memory, std::size_t bytes, std::uint64_t offset) override;
  ssize_t pwrite(int fd, const std::byte* memory, std::size_t bytes, std::uint64_t offset) override;
  int ring_setup(unsigned entries, io_uring_params* params) override;
  int ring_enter(int fd, unsigned submit_num, unsigned wait_num, unsigned flags) override;

 private:
  static std::size_t within(ssize_t most, std::size_t bytes);
};

// io_uring as far as Ring uses it, in this process.
class EmulatedRings : public FaultySystem {
 public:
  explicit EmulatedRings(unsigned seed = 1) : random_(seed) {}
  bool no_locked_memory = false;

  int ring_setup(unsigned entries, io_uring_params* params) override;
  int ring_enter(int fd, unsigned submit_num, unsigned wait_num, unsigned flags) override;
  int ring_register(int fd, unsigned what, const void* argument, unsigned num) override;
  void* ring_map(int fd, std::size_t bytes, std::uint64_t offset) override;
  int ring_unmap(void*, std::size_t) override { return 0; }
  int close(int fd) override;

 private:
  struct Queues {
    unsigned sq_head = 0, sq_tail = 0, sq_mask = 0, cq_head = 0, cq_tail = 0, cq_mask = 0;
    unsigned array[8192] = {};
    io_uring_cqe completions[16384] = {};
  };
  struct State {
    Queues queues;
    std::vector<io_uring_sqe> requests;
    std::vector<int> files;
    std::vector<iovec> memory;
    std::vector<io_uring_cqe> done;  // not yet shown
    std::mt19937 random;
    int poll_fd = -1;
    std::uint64_t poll_tag = 0;
  };

  State& state(int fd);
  std::int32_t perform(State& state, const io_uring_sqe& request);
  void take(State& state, const io_uring_sqe& request);
  void show(State& state);

  std::mutex mutex_;
  std::map<int, std::unique_ptr<State>> states_;
  std::mt19937 random_;  // seeds those of the rings, whose engines have threads of their own
};

bool kernel_has_io_uring();

void fill_random(std::span<std::byte> memory, std::uint64_t seed);

std::string error_text(const std::function<void()>& call);

}  // namespace zb::test
