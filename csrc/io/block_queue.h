// Between those who start transfers and the threads that make the system calls: transfers come in, blocks go out.
//
// A transfer is cut into blocks of one system call each; its operation ends when its last block has ended, well or
// not. A failed operation's remaining blocks are not begun. Thread-safe. A forked child may drop its copy, no more.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/process_owned.h"
#include "io/ring.h"

namespace zb {

struct IoFile {
  int fd = -1;
  std::string path;  // for errors
};

// Bytes between one file and memory. With O_DIRECT all of it is aligned.
struct IoTransfer {
  Direction direction = Direction::kRead;
  std::size_t file = 0;  // index into the engine's files
  std::uint64_t offset = 0;
  std::byte* memory = nullptr;
  std::size_t bytes = 0;
};

// What went wrong, kept as a value: an exception object shared by threads would be freed by any of them.
struct IoFailure {
  int error_number = 0;
  std::string what;
  std::string path;
  [[noreturn]] void raise() const;  // as IoError
};
using IoFailurePtr = std::shared_ptr<const IoFailure>;  // null: none
IoFailurePtr failure_of(const std::exception& error);

// Called once when all transfers of an operation have ended, in a thread of the engine, holding no lock of it.
// `failure` is the first one, or null. Must not throw; may start further transfers.
using IoCallback = std::function<void(const IoFailurePtr& failure)>;

struct IoOperation;
using IoTicket = std::shared_ptr<IoOperation>;

// What one system call is asked to do.
struct Block : IoTransfer {
  IoTicket operation;
  int retry_num = 0;  // in a row, without a byte moved
};

class BlockQueue {
 public:
  BlockQueue(std::vector<IoFile> files, std::size_t block_bytes);

  // Throws the engine's own failure where it had one.
  IoTicket push(std::span<const IoTransfer> transfers, IoCallback on_end);
  void wait(const IoTicket& ticket);
  bool ended(const IoTicket& ticket);

  // For the engine's threads. Null: nothing is there now (try_take), or the engine ends (take).
  std::optional<Block> try_take();
  std::optional<Block> take();
  // What a system call for the block gave: bytes, or -errno. Returns what remains to be done of it.
  std::optional<Block> finish(Block block, ssize_t result);

  // No transfer comes any more; take() returns null when all blocks were taken.
  void stop();
  bool stopped();
  // Ends all operations, and every later push, with this error.
  void fail(const IoFailurePtr& failure, std::span<Block> taken);

  const std::vector<IoFile>& files() const noexcept { return files_; }

 private:
  std::optional<Block> pop();
  void end_block(const Block& block, const IoFailurePtr& failure);
  IoFailurePtr failure_of_call(const Block& block, ssize_t result) const;

  // What threads lock and wait on, and what they change.
  struct Shared {
    std::mutex mutex;
    std::condition_variable pushed;
    std::condition_variable ended;
    std::deque<Block> blocks;
    bool stopped = false;
    IoFailurePtr failure;
  };

  std::vector<IoFile> files_;
  std::size_t block_bytes_;
  ProcessOwned<Shared> shared_;
};

}  // namespace zb
