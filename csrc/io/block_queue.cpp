#include "io/block_queue.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "common/error.h"

namespace zb {

struct IoOperation {
  std::size_t block_num = 0;  // not yet ended
  IoFailurePtr failure;
  IoCallback on_end;
  bool ended = false;
};

namespace {

constexpr int kRetryNum = 100;
// After a short O_DIRECT transfer the rest begins at a sector again.
constexpr std::size_t kSectorBytes = 512;

const char* cure_of(int error_number) {
  switch (error_number) {
    case ENOSPC:
    case EDQUOT:
      return " (the space reserved there is gone: free space, or give another path)";
    case EFBIG:
      return " (raise the limit on the size of files, ulimit -f)";
    case EIO:
      return " (the kernel's log says what its device reports; give another path)";
    default:
      return "";
  }
}

}  // namespace

void IoFailure::raise() const { throw IoError(error_number, what, path); }

IoFailurePtr failure_of(const std::exception& error) {
  // The text of a system_error ends with that of its code, which raise() appends again.
  if (const auto* io = dynamic_cast<const IoError*>(&error)) {
    std::string text = io->what();
    const std::string tail = ": " + io->code().message();
    if (text.ends_with(tail)) text.resize(text.size() - tail.size());
    return std::make_shared<IoFailure>(IoFailure{io->code().value(), std::move(text), io->path()});
  }
  return std::make_shared<IoFailure>(IoFailure{EIO, error.what(), {}});
}

BlockQueue::BlockQueue(std::vector<IoFile> files, std::size_t block_bytes)
    : files_(std::move(files)), block_bytes_(block_bytes) {
  ZB_EXPECT(block_bytes_ > 0, "blocks need at least one byte");
}

IoTicket BlockQueue::push(std::span<const IoTransfer> transfers, IoCallback on_end) {
  auto operation = std::make_shared<IoOperation>();
  operation->on_end = std::move(on_end);
  for (const IoTransfer& transfer : transfers) {
    ZB_EXPECT(transfer.file < files_.size(), "the I/O engine has no file " + std::to_string(transfer.file));
    operation->block_num += (transfer.bytes + block_bytes_ - 1) / block_bytes_;
  }
  ZB_EXPECT(operation->block_num > 0, "an I/O operation needs at least one byte");
  ZB_EXPECT_STATE(shared_.is_own(), "an I/O engine does not survive fork(); make a new one in the child");
  {
    const std::lock_guard lock(shared_->mutex);
    if (shared_->failure) shared_->failure->raise();
    ZB_EXPECT_STATE(!shared_->stopped, "the I/O engine is closed");
    for (const IoTransfer& transfer : transfers) {
      for (std::size_t done = 0; done < transfer.bytes; done += block_bytes_) {
        shared_->blocks.push_back({{.direction = transfer.direction,
                                    .file = transfer.file,
                                    .offset = transfer.offset + done,
                                    .memory = transfer.memory + done,
                                    .bytes = std::min(block_bytes_, transfer.bytes - done)},
                                   operation,
                                   0});
      }
    }
  }
  shared_->pushed.notify_all();
  return operation;
}

void BlockQueue::wait(const IoTicket& ticket) {
  std::unique_lock lock(shared_->mutex);
  shared_->ended.wait(lock, [&] { return ticket->ended; });
  if (ticket->failure) ticket->failure->raise();
}

bool BlockQueue::ended(const IoTicket& ticket) {
  const std::lock_guard lock(shared_->mutex);
  return ticket->ended;
}

std::optional<Block> BlockQueue::pop() {
  if (shared_->blocks.empty()) return std::nullopt;
  Block block = std::move(shared_->blocks.front());
  shared_->blocks.pop_front();
  return block;
}

std::optional<Block> BlockQueue::try_take() {
  const std::lock_guard lock(shared_->mutex);
  return pop();
}

std::optional<Block> BlockQueue::take() {
  std::unique_lock lock(shared_->mutex);
  shared_->pushed.wait(lock, [&] { return shared_->stopped || !shared_->blocks.empty(); });
  return pop();
}

IoFailurePtr BlockQueue::failure_of_call(const Block& block, ssize_t result) const {
  const bool reads = block.direction == Direction::kRead;
  const std::string what = std::string(reads ? "read" : "write") + " of " + std::to_string(block.bytes) +
                           " bytes at offset " + std::to_string(block.offset) + " of " + files_[block.file].path;
  const int error_number = result < 0 ? static_cast<int>(-result) : EIO;
  const char* why = result < 0   ? cure_of(error_number)
                    : result > 0 ? " (too few bytes at a time)"
                    : reads      ? " (the file ends there: something else has cut it)"
                                 : " (no byte was written)";
  return std::make_shared<IoFailure>(IoFailure{error_number, what + " failed" + why, files_[block.file].path});
}

std::optional<Block> BlockQueue::finish(Block block, ssize_t result) {
  const bool again = result == -EINTR || result == -EAGAIN;
  if (result > 0 && static_cast<std::size_t>(result) >= block.bytes) {
    end_block(block, nullptr);
    return std::nullopt;
  }
  const std::size_t moved = result > 0 ? static_cast<std::size_t>(result) / kSectorBytes * kSectorBytes : 0;
  block.retry_num = moved > 0 ? 0 : block.retry_num + 1;
  if ((result <= 0 && !again) || block.retry_num > kRetryNum) {
    end_block(block, failure_of_call(block, result));
    return std::nullopt;
  }
  block.offset += moved;
  block.memory += moved;
  block.bytes -= moved;
  return block;
}

void BlockQueue::end_block(const Block& block, const IoFailurePtr& failure) {
  IoOperation& operation = *block.operation;
  {
    const std::lock_guard lock(shared_->mutex);
    if (failure && !operation.failure) {
      operation.failure = failure;
      operation.block_num -= static_cast<std::size_t>(
          std::erase_if(shared_->blocks, [&](const Block& other) { return other.operation == block.operation; }));
    }
    if (--operation.block_num > 0) return;
  }
  if (operation.on_end) operation.on_end(operation.failure);
  {
    const std::lock_guard lock(shared_->mutex);
    operation.ended = true;
  }
  shared_->ended.notify_all();
}

void BlockQueue::stop() {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->stopped = true;
  }
  shared_->pushed.notify_all();
}

bool BlockQueue::stopped() {
  const std::lock_guard lock(shared_->mutex);
  return shared_->stopped && shared_->blocks.empty();
}

void BlockQueue::fail(const IoFailurePtr& failure, std::span<Block> taken) {
  std::deque<Block> waiting;
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->failure = failure;
    waiting.swap(shared_->blocks);
  }
  for (const Block& block : waiting) end_block(block, failure);
  for (const Block& block : taken) end_block(block, failure);
}

}  // namespace zb
