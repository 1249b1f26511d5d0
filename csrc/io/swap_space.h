// A fixed table of slots over the swap files of one rank, one file on each path.
//
// Every slot is spread over all paths in equal contiguous pieces, so one transfer uses them all. Offsets and sizes keep
// to O_DIRECT's alignment. Moves nothing itself: it says what an IoEngine has to move.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "io/block_queue.h"
#include "io/swap_file.h"

namespace zb {

struct SwapOptions {
  std::vector<std::string> directories;
  std::string owner;           // a word such as rank0, part of the files' names
  std::size_t slot_bytes = 0;  // of the largest chunk
  std::size_t slot_num = 0;
  bool direct = true;
  bool allow_fallback = false;
};

class SwapSpace {
 public:
  explicit SwapSpace(const SwapOptions& options, System& system = kernel_system());
  // What slot_bytes() will be, before there is a space.
  static std::size_t slot_bytes_for(std::size_t chunk_bytes, std::size_t path_num) noexcept;

  std::size_t slot_num() const noexcept { return slot_num_; }
  // What a transfer of a chunk of so many bytes moves.
  std::size_t aligned(std::size_t bytes) const noexcept;
  std::size_t slot_bytes() const noexcept { return slot_bytes_; }               // aligned
  std::size_t file_bytes() const noexcept { return slot_num_ * piece_bytes_; }  // of each file
  bool direct() const noexcept;
  std::vector<IoFile> files() const;
  std::vector<std::string> notes() const;  // what runs otherwise than asked for

  // The first memory.size() bytes of a slot; memory and its size are aligned.
  std::vector<IoTransfer> transfers(Direction direction, std::size_t slot, std::span<std::byte> memory) const;

 private:
  std::vector<SwapFile> files_;
  std::size_t alignment_bytes_ = 0;  // of memory, and of the bytes that a transfer moves
  std::size_t slot_num_ = 0;
  std::size_t slot_bytes_ = 0;
  std::size_t piece_bytes_ = 0;  // of a slot, in each file
};

}  // namespace zb
