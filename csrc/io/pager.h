// Chunks of state in more bytes than memory holds: some stay in memory, the others swap through a few frames.
//
// acquire gives a chunk's memory, release takes it back; dirty chunks are written behind, and the next ones in the
// known order are read ahead, both while the caller computes. A chunk has at most one transfer in flight. A failed
// transfer surfaces at the next acquire or flush, and at each one after it. Thread-safe.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <vector>

#include "common/process_owned.h"
#include "io/io_engine.h"
#include "io/swap_space.h"

namespace zb {

// Which chunks stay in memory, spread evenly over all, so that transfers are too.
struct PagerPlan {
  std::size_t chunk_num = 0;
  std::size_t resident_num = 0;
  std::size_t frame_num = 0;  // for the chunks that swap; 0 where none does

  bool is_resident(std::size_t chunk) const noexcept;
  std::size_t swapped_num() const noexcept { return chunk_num - resident_num; }  // slots that the space needs
  std::size_t memory_frames() const noexcept { return resident_num + frame_num; }
};

// `memory_frames`: the budget. `frame_num` serve what swaps, however small the budget; none where all chunks fit.
PagerPlan plan_pager(std::size_t chunk_num, std::size_t memory_frames, std::size_t frame_num);

enum class Content : std::uint8_t { kKept, kOverwritten };  // kOverwritten: not read; must be released dirty
enum class Change : std::uint8_t { kClean, kDirty };

struct PagerStats {
  std::uint64_t read_bytes = 0;
  std::uint64_t written_bytes = 0;
  double wait_s = 0;  // in acquire and flush, up to now: exposed I/O
};

struct ChunkTransfer {
  Direction direction = Direction::kRead;
  std::size_t chunk = 0;
  std::chrono::steady_clock::time_point begin;
  std::chrono::steady_clock::time_point end;
};

struct PagerOptions {
  using OnTransfer = std::function<void(const ChunkTransfer&)>;

  // Frames that reading ahead leaves alone, for chunks that are overwritten out of the order meanwhile: more than are
  // ever held.
  std::size_t spare_frame_num = 0;
  bool checksums = false;       // of every chunk on disk, compared when it comes back
  bool on_disk = false;         // an earlier pager over this space wrote all chunks; otherwise they begin as zeros
  OnTransfer on_transfer = {};  // called when one is over, by the engine's threads; must not throw
};

class Pager {
 public:
  // `chunk_bytes`: of each chunk, none above the space's slots. `memory`: plan.memory_frames() frames of
  // space.slot_bytes(), aligned as the space says. Space, engine and memory outlive the pager.
  Pager(const PagerPlan& plan, std::vector<std::size_t> chunk_bytes, const SwapSpace& space, IoEngine& engine,
        std::span<std::byte> memory, const PagerOptions& options = {});
  ~Pager();  // waits for transfers in flight, but in a forked child, where they never end

  // The order in which chunks will be acquired to be read (Content::kKept), again and again; empty: nothing is read
  // ahead. A chunk may come several times.
  void set_order(const std::vector<std::size_t>& order);
  std::span<std::byte> acquire(std::size_t chunk, Content content = Content::kKept);
  void release(std::size_t chunk, Change change);
  void flush();  // returns when nothing is in flight
  // Whether acquire would give the chunk at once, or throw.
  bool is_in_memory(std::size_t chunk) const;
  std::size_t ahead_frame_num() const noexcept { return ahead_frame_num_; }  // chunks that are read ahead, at most
  PagerStats stats() const;

 private:
  static constexpr std::size_t kNone = ~std::size_t{0};
  enum class State : std::uint8_t { kFree, kReading, kWriting, kReady, kHeld };
  struct Frame {
    std::byte* memory = nullptr;
    State state = State::kFree;
    std::size_t chunk = kNone;
    std::chrono::steady_clock::time_point begin = {};  // of its transfer
  };
  struct Chunk {
    std::size_t bytes = 0;
    std::size_t frame = kNone;
    std::size_t slot = kNone;              // none: resident
    std::vector<std::size_t> places = {};  // in the order
    int acquirer_num = 0;                  // waiting for it: its frame is not taken away
    bool on_disk = false;
    bool must_write = false;
    bool unchecked = false;  // read since, and not yet compared with the checksum
    std::uint64_t checksum = 0;
  };
  struct Sync {
    std::mutex mutex;
    std::condition_variable changed;
  };
  using Lock = std::unique_lock<std::mutex>;

  std::span<std::byte> memory_of(const Chunk& chunk) const { return {frames_[chunk.frame].memory, chunk.bytes}; }
  bool bring_in(Lock& lock, std::size_t chunk, Content content);
  bool check(std::size_t chunk, std::span<std::byte> memory);
  void wait_change(Lock& lock);
  std::size_t steps_to(std::size_t place) const { return (place + order_.size() - next_) % order_.size(); }
  std::size_t distance(std::size_t chunk) const;
  std::size_t take_frame(std::size_t least_distance);
  void place(std::size_t frame, std::size_t chunk, State state);
  void transfer(Direction direction, std::size_t frame);
  void on_end(Direction direction, std::size_t frame, const IoFailurePtr& failure);
  void read_ahead();
  void fail(const IoFailurePtr& failure);

  const SwapSpace& space_;
  IoEngine& engine_;
  const bool checksums_;
  const PagerOptions::OnTransfer on_transfer_;
  ProcessOwned<Sync> sync_;
  std::vector<Chunk> chunks_;
  std::vector<Frame> frames_;  // those of swapping chunks first
  std::size_t swap_frame_num_ = 0;
  std::size_t ahead_frame_num_ = 0;  // of them, for what is read ahead
  std::vector<std::size_t> order_;
  std::size_t next_ = 0;  // place in the order after the chunk acquired last
  std::size_t in_flight_num_ = 0;
  std::size_t frame_waiters_ = 0;
  IoFailurePtr failure_;
  PagerStats stats_;
  std::size_t waiter_num_ = 0;  // in a wait that stats_ does not have yet
  std::chrono::steady_clock::time_point wait_begin_;
};

}  // namespace zb
