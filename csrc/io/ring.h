// One io_uring, by raw system calls: its mapped queues, registered files and registered memory.
//
// Knows nothing of blocks, threads or retries. For one thread at a time. Needs Linux 5.5 or newer.
#pragma once

#include <linux/io_uring.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/process_owned.h"
#include "io/system.h"

namespace zb {

enum class Direction : std::uint8_t { kRead, kWrite };

class Ring {
 public:
  // Room for `depth` requests. Throws IoError where the kernel refuses; then there is no ring.
  Ring(System& system, std::size_t depth);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  void register_files(std::span<const int> fds);
  // False where the kernel refuses for lack of locked memory (`memlock`): requests then name plain memory.
  bool register_memory(std::span<const std::span<std::byte>> memory);

  // `file` is an index into the registered files. The request goes to the kernel with the next submit.
  void prepare(Direction direction, std::size_t file, std::uint64_t offset, std::byte* memory, std::size_t bytes,
               std::uint64_t tag);
  void prepare_poll(int fd, std::uint64_t tag);  // completes once when fd is readable
  // Hands over all prepared requests and waits until `wait_num` have completed; returns early where a signal came or
  // the kernel first wants its completions read. Throws IoError.
  void submit(std::size_t wait_num);
  // One completion: its tag, and bytes or -errno. False when there is none now.
  bool next(std::uint64_t& tag, std::int32_t& result);
  // How far a request at `memory` may reach: it must not leave its piece of registered memory, nor pass 1 GiB.
  std::size_t reach(const std::byte* memory, std::size_t bytes) const noexcept;

 private:
  struct Piece {
    std::byte* begin = nullptr;
    std::size_t bytes = 0;
  };

  void map(const io_uring_params& params);
  void unmap() noexcept;
  std::int64_t piece_of(const std::byte* memory) const noexcept;
  io_uring_sqe& next_request();

  System& system_;
  MakingProcess made_by_;
  int fd_ = -1;
  std::byte* rings_ = nullptr;
  std::size_t rings_bytes_ = 0;
  io_uring_sqe* requests_ = nullptr;
  std::size_t requests_bytes_ = 0;
  unsigned* sq_tail_ = nullptr;
  unsigned* sq_array_ = nullptr;
  unsigned sq_mask_ = 0;
  unsigned* cq_head_ = nullptr;
  unsigned* cq_tail_ = nullptr;
  io_uring_cqe* completions_ = nullptr;
  unsigned cq_mask_ = 0;
  unsigned prepared_num_ = 0;     // in the queue, not yet shown to the kernel
  unsigned unsubmitted_num_ = 0;  // shown, not yet taken by it
  bool has_files_ = false;
  std::vector<Piece> pieces_;  // registered memory, in the kernel's order
};

}  // namespace zb
