#include "io/raw_io.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "common/error.h"
#include "common/scope_exit.h"
#include "io/io_thread.h"
#include "io/ring.h"

namespace zb {
namespace {

// The requests of a run by number: block after block, round the files.
class Requests {
 public:
  struct Request {
    Direction direction = Direction::kRead;
    std::size_t file = 0;
    std::uint64_t offset = 0;
    std::size_t bytes = 0;
  };

  Requests(IoMode mode, std::size_t file_num, std::size_t begin, std::size_t end, std::size_t block_bytes)
      : mode_(mode),
        file_num_(file_num),
        begin_(begin),
        end_(end),
        block_bytes_(block_bytes),
        block_num_((end - begin + block_bytes - 1) / block_bytes * file_num) {}

  std::size_t num() const noexcept { return mode_ == IoMode::kBoth ? 2 * block_num_ : block_num_; }

  Request operator[](std::size_t index) const noexcept {
    std::size_t block = index;
    Direction direction = mode_ == IoMode::kRead ? Direction::kRead : Direction::kWrite;
    if (mode_ == IoMode::kBoth) {
      const bool reads = index % 2 == 0;
      direction = reads ? Direction::kRead : Direction::kWrite;
      block = reads ? index / 2 : (index / 2 + block_num_ / 2) % block_num_;
    }
    const std::size_t offset = begin_ + block / file_num_ * block_bytes_;
    return {direction, block % file_num_, offset, std::min(block_bytes_, end_ - offset)};
  }

 private:
  IoMode mode_;
  std::size_t file_num_;
  std::size_t begin_;
  std::size_t end_;
  std::size_t block_bytes_;
  std::size_t block_num_;
};

void expect_whole(const Requests::Request& request, const IoFile& file, std::int64_t result) {
  if (result == static_cast<std::int64_t>(request.bytes)) return;
  const int error_number = result < 0 ? static_cast<int>(-result) : EIO;
  throw_io(error_number,
           "a transfer of " + std::to_string(request.bytes) + " bytes at offset " + std::to_string(request.offset) +
               " of " + file.path + (result < 0 ? " failed" : " was cut short"),
           file.path);
}

void run_threads(const RawOptions& options, const Requests& requests, std::span<const IoFile> files,
                 std::span<std::byte> memory, System& system) {
  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  std::exception_ptr error;
  const auto work = [&](std::byte* block) {
    try {
      for (std::size_t i = next++; i < requests.num(); i = next++) {
        const Requests::Request request = requests[i];
        const IoFile& file = files[request.file];
        expect_whole(request, file,
                     request.direction == Direction::kRead
                         ? system.pread(file.fd, block, request.bytes, request.offset)
                         : system.pwrite(file.fd, block, request.bytes, request.offset));
      }
    } catch (...) {
      next = requests.num();
      const std::lock_guard lock(mutex);
      error = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  {
    const ScopeExit join([&] {
      for (std::thread& thread : threads) thread.join();
    });
    threads.reserve(options.depth);
    try {
      for (std::size_t i = 0; i < options.depth; ++i) {
        threads.push_back(start_io_thread([&work, block = memory.data() + i * options.block_bytes] { work(block); }));
      }
    } catch (...) {
      next = requests.num();  // those that run need not go on
      throw;
    }
  }
  if (error) std::rethrow_exception(error);
}

void run_ring(const RawOptions& options, const Requests& requests, std::span<const IoFile> files, Ring& ring,
              std::span<std::byte> memory) {
  std::vector<std::size_t> free;
  for (std::size_t i = 0; i < options.depth; ++i) free.push_back(i);
  std::vector<std::size_t> request_of(options.depth);
  std::size_t next = 0;
  std::exception_ptr error;
  while (next < requests.num() || free.size() < options.depth) {
    for (; next < requests.num() && !free.empty(); ++next) {
      const std::size_t slot = free.back();
      free.pop_back();
      request_of[slot] = next;
      const Requests::Request request = requests[next];
      ring.prepare(request.direction, request.file, request.offset, memory.data() + slot * options.block_bytes,
                   request.bytes, slot);
    }
    ring.submit(1);
    std::uint64_t slot = 0;
    std::int32_t result = 0;
    while (ring.next(slot, result)) {
      free.push_back(slot);
      const Requests::Request request = requests[request_of[slot]];
      try {
        expect_whole(request, files[request.file], result);
      } catch (...) {
        error = std::current_exception();  // thrown when the kernel holds no memory of ours any more
        next = requests.num();
      }
    }
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace

double time_raw_io(const RawOptions& options, IoMode mode, std::span<const IoFile> files, std::size_t begin,
                   std::size_t end, std::span<std::byte> memory, System& system) {
  ZB_EXPECT(begin < end && !files.empty() && options.block_bytes > 0 && options.depth > 0,
            "raw I/O needs files, bytes, blocks and a depth");
  ZB_EXPECT(memory.size() >= options.depth * options.block_bytes, "raw I/O needs memory for depth blocks");
  const Requests requests(mode, files.size(), begin, end, options.block_bytes);
  std::optional<Ring> ring;
  if (options.kind == IoEngineKind::kIoUring) {
    ring.emplace(system, options.depth);
    std::vector<int> fds;
    for (const IoFile& file : files) fds.push_back(file.fd);
    ring->register_files(fds);
    const std::span<std::byte> whole[] = {memory.first(options.depth * options.block_bytes)};
    ring->register_memory(whole);
  }
  const auto start = std::chrono::steady_clock::now();
  if (ring) {
    run_ring(options, requests, files, *ring, memory);
  } else {
    run_threads(options, requests, files, memory, system);
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace zb
