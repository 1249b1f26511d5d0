#include "io/swap_space.h"

#include <algorithm>
#include <cstdint>

#include "common/error.h"
#include "common/round_up.h"

namespace zb {
namespace {

// Files are made before their alignment is known, so slots keep to what every device takes.
constexpr std::size_t kFileAlignmentBytes = 4096;

}  // namespace

SwapSpace::SwapSpace(const SwapOptions& options, System& system)
    : alignment_bytes_(kFileAlignmentBytes), slot_num_(options.slot_num) {
  ZB_EXPECT(!options.directories.empty(), "a swap space needs at least one path");
  ZB_EXPECT(options.slot_bytes > 0, "a swap space needs slots of at least one byte");
  const std::size_t path_num = options.directories.size();
  slot_bytes_ = slot_bytes_for(options.slot_bytes, path_num);
  piece_bytes_ = slot_bytes_ / path_num;
  files_.reserve(path_num);
  for (const std::string& directory : options.directories) {
    files_.emplace_back(SwapFileSpec{.directory = directory,
                                     .owner = options.owner,
                                     .bytes = file_bytes(),
                                     .direct = options.direct,
                                     .allow_fallback = options.allow_fallback},
                        system);
    if (files_.back().direct() && files_.back().alignment_bytes() > alignment_bytes_) {
      throw_io(EINVAL,
               directory + " needs transfers aligned to " + std::to_string(files_.back().alignment_bytes()) +
                   " bytes, and 4096 are supported; choose another path",
               directory);
    }
  }
}

std::size_t SwapSpace::slot_bytes_for(std::size_t chunk_bytes, std::size_t path_num) noexcept {
  return round_up((chunk_bytes + path_num - 1) / path_num, kFileAlignmentBytes) * path_num;
}

std::size_t SwapSpace::aligned(std::size_t bytes) const noexcept { return round_up(bytes, alignment_bytes_); }

bool SwapSpace::direct() const noexcept {
  return std::ranges::all_of(files_, [](const SwapFile& file) { return file.direct(); });
}

std::vector<IoFile> SwapSpace::files() const {
  std::vector<IoFile> files;
  for (const SwapFile& file : files_) files.push_back({file.fd(), file.path()});
  return files;
}

std::vector<std::string> SwapSpace::notes() const {
  std::vector<std::string> notes;
  for (const SwapFile& file : files_) {
    if (!file.note().empty()) notes.push_back(file.note());
  }
  return notes;
}

std::vector<IoTransfer> SwapSpace::transfers(Direction direction, std::size_t slot, std::span<std::byte> memory) const {
  ZB_EXPECT(slot < slot_num_, "slot " + std::to_string(slot) + " is out of range: there are " +
                                  std::to_string(slot_num_) + " slots, numbered from 0");
  ZB_EXPECT(memory.size() <= slot_bytes_ && memory.size() % alignment_bytes_ == 0 &&
                reinterpret_cast<std::uintptr_t>(memory.data()) % alignment_bytes_ == 0,
            "memory of a transfer must be aligned to " + std::to_string(alignment_bytes_) + " bytes and fit a slot");
  const std::size_t piece = aligned((memory.size() + files_.size() - 1) / files_.size());
  std::vector<IoTransfer> transfers;
  for (std::size_t file = 0, begin = 0; begin < memory.size(); ++file, begin += piece) {
    transfers.push_back({.direction = direction,
                         .file = file,
                         .offset = slot * piece_bytes_,
                         .memory = memory.data() + begin,
                         .bytes = std::min(piece, memory.size() - begin)});
  }
  return transfers;
}

}  // namespace zb
