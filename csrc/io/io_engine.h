// Moves bytes between files and memory in the background: io_uring, or a pool of threads with pread and pwrite.
//
// Started operations run without the caller's help and end in any order. A failed transfer is an IoError with path,
// offset and byte count; short ones are continued. Thread-safe. The destructor waits for what was started.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/block_queue.h"
#include "io/system.h"

namespace zb {

enum class IoEngineKind : std::uint8_t { kIoUring, kThreads };

std::string_view io_engine_name(IoEngineKind kind) noexcept;  // "io_uring", "threads"
IoEngineKind io_engine_from_name(std::string_view name);      // throws ArgumentError

struct IoEngineOptions {
  IoEngineKind kind = IoEngineKind::kIoUring;
  bool allow_fallback = false;                     // io_uring refused: threads instead, and note() says so
  std::size_t block_bytes = std::size_t{1} << 20;  // of one request
  std::size_t depth = 32;                          // requests in flight; the threads engine has as many threads
};

class IoEngine {
 public:
  virtual ~IoEngine() = default;
  IoTicket start(std::span<const IoTransfer> transfers, IoCallback on_end = {});
  void wait(const IoTicket& ticket) { queue_.wait(ticket); }  // throws the operation's error
  bool ended(const IoTicket& ticket) { return queue_.ended(ticket); }

  IoEngineKind kind() const noexcept { return kind_; }
  // Why it runs otherwise than asked for; empty where it does not.
  const std::string& note() const noexcept { return note_; }

 protected:
  IoEngine(IoEngineKind kind, std::vector<IoFile> files, const IoEngineOptions& options)
      : queue_(std::move(files), options.block_bytes), kind_(kind) {}
  virtual void wake() {}  // blocks were pushed

  BlockQueue queue_;
  std::string note_;

 private:
  friend std::unique_ptr<IoEngine> make_io_engine(const IoEngineOptions&, std::vector<IoFile>,
                                                  std::span<const std::span<std::byte>>, System&);
  IoEngineKind kind_;
};

// `memory` is what transfers will use, for registration; transfers of other memory work too. The files stay open, and
// the memory mapped, while the engine lives. Throws IoError where the engine is not to be had.
std::unique_ptr<IoEngine> make_io_engine(const IoEngineOptions& options, std::vector<IoFile> files,
                                         std::span<const std::span<std::byte>> memory = {},
                                         System& system = kernel_system());

}  // namespace zb
