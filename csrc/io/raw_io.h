// What the disk itself gives: plain loops over the same files with many requests at once, and no bookkeeping.
//
// The limit that the pager is held against.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "io/io_engine.h"

namespace zb {

enum class IoMode : std::uint8_t { kRead, kWrite, kBoth };

struct RawOptions {
  IoEngineKind kind = IoEngineKind::kIoUring;
  std::size_t block_bytes = std::size_t{1} << 20;
  std::size_t depth = 64;
};

// Moves bytes [begin, end) of each file once (kBoth: each block is read and, half the way later, written) and returns
// the seconds. `memory`: depth blocks, aligned for O_DIRECT. Throws IoError.
double time_raw_io(const RawOptions& options, IoMode mode, std::span<const IoFile> files, std::size_t begin,
                   std::size_t end, std::span<std::byte> memory, System& system = kernel_system());

}  // namespace zb
