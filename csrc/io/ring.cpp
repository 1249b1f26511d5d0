#include "io/ring.h"

#include <poll.h>
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>

#include "common/error.h"

namespace zb {
namespace {

constexpr std::size_t kLargestPieceBytes = std::size_t{1} << 30;  // the kernel's limit for one registered buffer
constexpr int kBusyAttempts = 5000;
constexpr std::chrono::milliseconds kBusyPause{1};

std::string refusal(int error_number) {
  std::string text = "io_uring is not usable here";
  if (error_number == EPERM) text += " (kernel.io_uring_disabled, or the container's policy)";
  if (error_number == ENOSYS) text += " (the kernel is older than 5.5, or the container's policy)";
  return text + "; take io_engine threads, or allow the fallback to it (io_allow_fallback)";
}

}  // namespace

Ring::Ring(System& system, std::size_t depth) : system_(system) {
  io_uring_params params{};
  fd_ = system_.ring_setup(static_cast<unsigned>(depth), &params);
  if (fd_ < 0) throw_io(-fd_, refusal(-fd_), {});
  constexpr unsigned kNeeded = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP;
  if ((params.features & kNeeded) != kNeeded) {
    system_.close(fd_);
    throw_io(ENOSYS, refusal(ENOSYS), {});
  }
  map(params);
}

Ring::~Ring() { unmap(); }

void Ring::map(const io_uring_params& params) {
  rings_bytes_ = std::max(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                          params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
  requests_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
  rings_ = static_cast<std::byte*>(system_.ring_map(fd_, rings_bytes_, IORING_OFF_SQ_RING));
  if (rings_ != nullptr) {
    requests_ = static_cast<io_uring_sqe*>(system_.ring_map(fd_, requests_bytes_, IORING_OFF_SQES));
  }
  if (requests_ == nullptr) {
    const int error_number = errno;
    unmap();
    throw_io(error_number, refusal(error_number), {});
  }
  const auto at = [this](unsigned offset) { return reinterpret_cast<unsigned*>(rings_ + offset); };
  sq_tail_ = at(params.sq_off.tail);
  sq_array_ = at(params.sq_off.array);
  sq_mask_ = *at(params.sq_off.ring_mask);
  cq_head_ = at(params.cq_off.head);
  cq_tail_ = at(params.cq_off.tail);
  cq_mask_ = *at(params.cq_off.ring_mask);
  completions_ = reinterpret_cast<io_uring_cqe*>(rings_ + params.cq_off.cqes);
}

// What was registered is given back here, since the kernel closes a ring some time after close(). A forked child's ring
// is its parent's, who still needs that.
void Ring::unmap() noexcept {
  const bool is_own = made_by_.is_current();
  if (is_own && has_files_) system_.ring_register(fd_, IORING_UNREGISTER_FILES, nullptr, 0);
  if (is_own && !pieces_.empty()) system_.ring_register(fd_, IORING_UNREGISTER_BUFFERS, nullptr, 0);
  if (requests_ != nullptr) system_.ring_unmap(requests_, requests_bytes_);
  if (rings_ != nullptr) system_.ring_unmap(rings_, rings_bytes_);
  system_.close(fd_);
}

void Ring::register_files(std::span<const int> fds) {
  const int result = system_.ring_register(fd_, IORING_REGISTER_FILES, fds.data(), static_cast<unsigned>(fds.size()));
  if (result < 0) throw_io(-result, refusal(-result), {});
  has_files_ = true;
}

bool Ring::register_memory(std::span<const std::span<std::byte>> memory) {
  std::vector<iovec> vectors;
  for (const std::span<std::byte> whole : memory) {
    for (std::size_t begin = 0; begin < whole.size(); begin += kLargestPieceBytes) {
      const std::size_t bytes = std::min(kLargestPieceBytes, whole.size() - begin);
      pieces_.push_back({whole.data() + begin, bytes});
      vectors.push_back({whole.data() + begin, bytes});
    }
  }
  if (vectors.empty()) return true;
  const int result =
      system_.ring_register(fd_, IORING_REGISTER_BUFFERS, vectors.data(), static_cast<unsigned>(vectors.size()));
  if (result >= 0) return true;
  pieces_.clear();
  if (result != -ENOMEM) throw_io(-result, refusal(-result), {});
  return false;
}

std::int64_t Ring::piece_of(const std::byte* memory) const noexcept {
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    if (memory >= pieces_[i].begin && memory < pieces_[i].begin + pieces_[i].bytes) return static_cast<std::int64_t>(i);
  }
  return -1;
}

std::size_t Ring::reach(const std::byte* memory, std::size_t bytes) const noexcept {
  const std::int64_t piece = piece_of(memory);
  if (piece < 0) return std::min(bytes, kLargestPieceBytes);  // a request has 32 bits for them
  const Piece& found = pieces_[static_cast<std::size_t>(piece)];
  return std::min(bytes, static_cast<std::size_t>(found.begin + found.bytes - memory));
}

io_uring_sqe& Ring::next_request() {
  const unsigned tail = *sq_tail_ + prepared_num_++;
  const unsigned index = tail & sq_mask_;
  sq_array_[index] = index;
  requests_[index] = io_uring_sqe{};
  return requests_[index];
}

void Ring::prepare(Direction direction, std::size_t file, std::uint64_t offset, std::byte* memory, std::size_t bytes,
                   std::uint64_t tag) {
  const std::int64_t piece = piece_of(memory);
  const bool reads = direction == Direction::kRead;
  io_uring_sqe& request = next_request();
  request.opcode =
      piece >= 0 ? (reads ? IORING_OP_READ_FIXED : IORING_OP_WRITE_FIXED) : (reads ? IORING_OP_READ : IORING_OP_WRITE);
  request.flags = IOSQE_FIXED_FILE;
  request.fd = static_cast<int>(file);
  request.off = offset;
  request.addr = reinterpret_cast<std::uintptr_t>(memory);
  request.len = static_cast<unsigned>(bytes);
  request.buf_index = static_cast<std::uint16_t>(piece >= 0 ? piece : 0);
  request.user_data = tag;
}

void Ring::prepare_poll(int fd, std::uint64_t tag) {
  io_uring_sqe& request = next_request();
  request.opcode = IORING_OP_POLL_ADD;
  request.fd = fd;
  request.poll32_events = POLLIN;
  request.user_data = tag;
}

void Ring::submit(std::size_t wait_num) {
  std::atomic_ref<unsigned>(*sq_tail_).store(*sq_tail_ + prepared_num_, std::memory_order_release);
  unsubmitted_num_ += std::exchange(prepared_num_, 0U);
  const unsigned flags = wait_num > 0 ? static_cast<unsigned>(IORING_ENTER_GETEVENTS) : 0U;
  for (int attempt = 0;; ++attempt) {
    const int result = system_.ring_enter(fd_, unsubmitted_num_, static_cast<unsigned>(wait_num), flags);
    if (result >= 0) {
      unsubmitted_num_ -= static_cast<unsigned>(result);
      if (unsubmitted_num_ == 0) return;
      continue;
    }
    if (result == -EINTR) continue;
    const bool busy = (result == -EAGAIN || result == -EBUSY) && attempt < kBusyAttempts;
    if (!busy) throw_io(-result, "io_uring_enter failed with " + std::to_string(unsubmitted_num_) + " requests", {});
    if (std::atomic_ref<unsigned>(*cq_tail_).load(std::memory_order_acquire) != *cq_head_) return;
    std::this_thread::sleep_for(kBusyPause);  // the kernel lacks memory for now
  }
}

bool Ring::next(std::uint64_t& tag, std::int32_t& result) {
  const unsigned head = *cq_head_;
  if (head == std::atomic_ref<unsigned>(*cq_tail_).load(std::memory_order_acquire)) return false;
  const io_uring_cqe& completion = completions_[head & cq_mask_];
  tag = completion.user_data;
  result = completion.res;
  std::atomic_ref<unsigned>(*cq_head_).store(head + 1, std::memory_order_release);
  return true;
}

}  // namespace zb
