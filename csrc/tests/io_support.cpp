#include "io_support.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <exception>
#include <filesystem>

#include "common/error.h"

namespace zb::test {

Folder::Folder() {
  const char* base = std::getenv("TEST_TMPDIR");
  std::string pattern = std::string(base != nullptr ? base : "/tmp") + "/zb_io_XXXXXX";
  path_ = mkdtemp(pattern.data());
}

Folder::~Folder() { std::filesystem::remove_all(path_); }

std::size_t Folder::file_num() const {
  return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(path_), {}));
}

int FaultySystem::open(const char* path, int flags, mode_t mode) {
  const int fd = System::open(path, flags, mode);
  if (!direct_refused || (flags & O_DIRECT) == 0 || fd < 0) return fd;
  System::close(fd);  // as some kernels do: the file is made, then refused
  return -EINVAL;
}

int FaultySystem::fallocate(int fd, std::uint64_t bytes) {
  return fallocate_error != 0 ? -fallocate_error : System::fallocate(fd, bytes);
}

ssize_t FaultySystem::pread(int fd, std::byte* memory, std::size_t bytes, std::uint64_t offset) {
  const ssize_t fault = transfer_fault ? transfer_fault(Direction::kRead, offset, bytes) : 0;
  return fault < 0 ? fault : System::pread(fd, memory, within(fault, bytes), offset);
}

ssize_t FaultySystem::pwrite(int fd, const std::byte* memory, std::size_t bytes, std::uint64_t offset) {
  const ssize_t fault = transfer_fault ? transfer_fault(Direction::kWrite, offset, bytes) : 0;
  return fault < 0 ? fault : System::pwrite(fd, memory, within(fault, bytes), offset);
}

int FaultySystem::ring_setup(unsigned entries, io_uring_params* params) {
  return ring_error != 0 ? -ring_error : System::ring_setup(entries, params);
}

int FaultySystem::ring_enter(int fd, unsigned submit_num, unsigned wait_num, unsigned flags) {
  const int fault = enter_fault ? enter_fault() : 0;
  return fault != 0 ? fault : System::ring_enter(fd, submit_num, wait_num, flags);
}

std::size_t FaultySystem::within(ssize_t most, std::size_t bytes) {
  return most > 0 ? std::min(static_cast<std::size_t>(most), bytes) : bytes;
}

EmulatedRings::State& EmulatedRings::state(int fd) {
  const std::lock_guard lock(mutex_);
  return *states_.at(fd);
}

int EmulatedRings::ring_setup(unsigned entries, io_uring_params* params) {
  if (ring_error != 0) return -ring_error;
  unsigned size = 1;
  while (size < entries) size *= 2;
  auto made = std::make_unique<State>();
  made->requests.resize(size);
  made->queues.sq_mask = size - 1;
  made->queues.cq_mask = 2 * size - 1;
  params->sq_entries = size;
  params->cq_entries = 2 * size;
  params->features = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP;
  params->sq_off.tail = offsetof(Queues, sq_tail);
  params->sq_off.ring_mask = offsetof(Queues, sq_mask);
  params->sq_off.array = offsetof(Queues, array);
  params->cq_off.head = offsetof(Queues, cq_head);
  params->cq_off.tail = offsetof(Queues, cq_tail);
  params->cq_off.ring_mask = offsetof(Queues, cq_mask);
  params->cq_off.cqes = offsetof(Queues, completions);
  const int fd = eventfd(0, EFD_CLOEXEC);
  const std::lock_guard lock(mutex_);
  made->random.seed(random_());
  states_[fd] = std::move(made);
  return fd;
}

int EmulatedRings::close(int fd) {
  {
    const std::lock_guard lock(mutex_);
    states_.erase(fd);
  }
  return FaultySystem::close(fd);
}

void* EmulatedRings::ring_map(int fd, std::size_t, std::uint64_t offset) {
  State& found = state(fd);
  return offset == IORING_OFF_SQES ? static_cast<void*>(found.requests.data()) : &found.queues;
}

int EmulatedRings::ring_register(int fd, unsigned what, const void* argument, unsigned num) {
  State& found = state(fd);
  if (what == IORING_UNREGISTER_FILES || what == IORING_UNREGISTER_BUFFERS) return 0;
  if (what == IORING_REGISTER_FILES) {
    found.files.assign(static_cast<const int*>(argument), static_cast<const int*>(argument) + num);
    return 0;
  }
  if (no_locked_memory) return -ENOMEM;
  found.memory.assign(static_cast<const iovec*>(argument), static_cast<const iovec*>(argument) + num);
  return 0;
}

std::int32_t EmulatedRings::perform(State& found, const io_uring_sqe& request) {
  auto* memory = reinterpret_cast<std::byte*>(request.addr);
  if (request.opcode == IORING_OP_READ_FIXED || request.opcode == IORING_OP_WRITE_FIXED) {
    const iovec& piece = found.memory.at(request.buf_index);
    auto* begin = static_cast<std::byte*>(piece.iov_base);
    if (memory < begin || memory + request.len > begin + piece.iov_len) return -EFAULT;
  }
  if ((request.flags & IOSQE_FIXED_FILE) == 0) return -EBADF;
  const int fd = found.files.at(static_cast<std::size_t>(request.fd));
  const bool reads = request.opcode == IORING_OP_READ_FIXED || request.opcode == IORING_OP_READ;
  return static_cast<std::int32_t>(reads ? pread(fd, memory, request.len, request.off)
                                         : pwrite(fd, memory, request.len, request.off));
}

void EmulatedRings::take(State& found, const io_uring_sqe& request) {
  if (request.opcode == IORING_OP_POLL_ADD) {
    found.poll_fd = request.fd;
    found.poll_tag = request.user_data;
    return;
  }
  io_uring_cqe completion{};
  completion.user_data = request.user_data;
  completion.res = perform(found, request);
  found.done.push_back(completion);
}

// Some of what is done, at least one, in any order.
void EmulatedRings::show(State& found) {
  std::shuffle(found.done.begin(), found.done.end(), found.random);
  const std::size_t num = found.done.empty() ? 0 : 1 + found.random() % found.done.size();
  Queues& queues = found.queues;
  for (std::size_t i = 0; i < num; ++i) {
    queues.completions[queues.cq_tail & queues.cq_mask] = found.done.back();
    found.done.pop_back();
    std::atomic_ref<unsigned>(queues.cq_tail).store(queues.cq_tail + 1, std::memory_order_release);
  }
}

int EmulatedRings::ring_enter(int fd, unsigned submit_num, unsigned wait_num, unsigned) {
  if (const int fault = enter_fault ? enter_fault() : 0; fault != 0) return fault;
  State& found = state(fd);
  Queues& queues = found.queues;
  unsigned taken = 0;
  for (; taken < submit_num && queues.sq_head != std::atomic_ref<unsigned>(queues.sq_tail).load(); ++taken) {
    take(found, found.requests[queues.array[queues.sq_head++ & queues.sq_mask]]);
  }
  if (found.poll_fd >= 0) {
    pollfd waited{found.poll_fd, POLLIN, 0};
    const bool blocks = wait_num > 0 && found.done.empty();
    if (::poll(&waited, 1, blocks ? 20000 : 0) == 1) {
      io_uring_cqe completion{};
      completion.user_data = found.poll_tag;
      completion.res = POLLIN;
      found.done.push_back(completion);
      found.poll_fd = -1;
    }
  }
  if (wait_num > 0) show(found);
  return static_cast<int>(taken);
}

bool kernel_has_io_uring() {
  try {
    Ring ring(kernel_system(), 1);
    return true;
  } catch (const IoError&) {
    return false;
  }
}

void fill_random(std::span<std::byte> memory, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  for (std::byte& value : memory) value = static_cast<std::byte>(random());
}

std::string error_text(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace zb::test
