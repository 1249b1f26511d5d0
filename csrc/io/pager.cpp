#include "io/pager.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>

#include "common/error.h"
#include "common/scope_exit.h"
#include "io/checksum.h"

namespace zb {
namespace {

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

bool PagerPlan::is_resident(std::size_t chunk) const noexcept {
  return (chunk + 1) * resident_num / chunk_num > chunk * resident_num / chunk_num;
}

PagerPlan plan_pager(std::size_t chunk_num, std::size_t memory_frames, std::size_t frame_num) {
  ZB_EXPECT(frame_num >= 1, "chunks that swap need at least one frame");
  if (chunk_num <= std::max(memory_frames, frame_num)) return {chunk_num, chunk_num, 0};
  return {chunk_num, memory_frames > frame_num ? memory_frames - frame_num : 0, frame_num};
}

Pager::Pager(const PagerPlan& plan, std::vector<std::size_t> chunk_bytes, const SwapSpace& space, IoEngine& engine,
             std::span<std::byte> memory, const PagerOptions& options)
    : space_(space),
      engine_(engine),
      checksums_(options.checksums),
      on_transfer_(options.on_transfer),
      swap_frame_num_(plan.frame_num),
      ahead_frame_num_(plan.frame_num - std::min(plan.frame_num, options.spare_frame_num)) {
  ZB_EXPECT(chunk_bytes.size() == plan.chunk_num,
            "the plan and the list of chunk sizes differ in their number of chunks");
  ZB_EXPECT(space.slot_num() >= plan.swapped_num(), "the swap space has too few slots");
  ZB_EXPECT(!options.on_disk || (plan.resident_num == 0 && !options.checksums),
            "chunks that an earlier pager wrote must all be on disk, without checksums");
  ZB_EXPECT(memory.size() >= plan.memory_frames() * space.slot_bytes(), "the pager's memory is too small");
  for (std::size_t i = 0; i < plan.memory_frames(); ++i) {
    frames_.push_back({.memory = memory.data() + i * space.slot_bytes()});
  }
  std::size_t slot = 0;
  std::size_t resident_frame = plan.frame_num;
  for (std::size_t i = 0; i < plan.chunk_num; ++i) {
    ZB_EXPECT(chunk_bytes[i] > 0 && chunk_bytes[i] <= space.slot_bytes(),
              "chunk " + std::to_string(i) + " must have 1 to " + std::to_string(space.slot_bytes()) + " bytes");
    chunks_.push_back({.bytes = chunk_bytes[i]});
    if (plan.is_resident(i)) {
      std::memset(frames_[resident_frame].memory, 0, chunk_bytes[i]);
      place(resident_frame++, i, State::kReady);
    } else {
      chunks_[i].slot = slot++;
      chunks_[i].on_disk = options.on_disk;
    }
  }
}

Pager::~Pager() {
  if (!sync_.is_own()) return;
  Lock lock(sync_->mutex);
  order_.clear();
  sync_->changed.wait(lock, [this] { return in_flight_num_ == 0; });
}

void Pager::set_order(const std::vector<std::size_t>& order) {
  const std::lock_guard lock(sync_->mutex);
  for (const std::size_t chunk : order) {
    ZB_EXPECT(chunk < chunks_.size(), "the order names chunk " + std::to_string(chunk) + ", but there are only " +
                                          std::to_string(chunks_.size()) + " chunks, numbered from 0");
  }
  for (Chunk& chunk : chunks_) chunk.places.clear();
  for (std::size_t i = 0; i < order.size(); ++i) chunks_[order[i]].places.push_back(i);
  order_ = order;
  next_ = 0;
  read_ahead();
}

std::span<std::byte> Pager::acquire(std::size_t index, Content content) {
  Lock lock(sync_->mutex);
  ZB_EXPECT(index < chunks_.size(), "chunk " + std::to_string(index) + " is out of range: there are " +
                                        std::to_string(chunks_.size()) + " chunks, numbered from 0");
  Chunk& chunk = chunks_[index];
  ZB_EXPECT_STATE(chunk.frame == kNone || frames_[chunk.frame].state != State::kHeld,
                  "chunk " + std::to_string(index) + " is held already");
  if (failure_) failure_->raise();
  const bool is_new = bring_in(lock, index, content);
  frames_[chunk.frame].state = State::kHeld;
  chunk.must_write = content == Content::kOverwritten;
  if (content == Content::kKept && !chunk.places.empty()) next_ = (next_ + distance(index) + 1) % order_.size();
  const std::span<std::byte> memory = memory_of(chunk);
  const bool must_check = std::exchange(chunk.unchecked, false) && content == Content::kKept;
  read_ahead();
  lock.unlock();
  if (is_new && content == Content::kKept) std::memset(memory.data(), 0, memory.size());
  if (must_check && !check(index, memory)) {
    lock.lock();
    frames_[chunk.frame].state = State::kReady;
    failure_->raise();
  }
  return memory;
}

// Returns with the chunk in a frame and nothing of it in flight; whether it has never been on disk nor in memory.
bool Pager::bring_in(Lock& lock, std::size_t index, Content content) {
  Chunk& chunk = chunks_[index];
  ++chunk.acquirer_num;
  const ScopeExit came([&] { --chunk.acquirer_num; });
  for (;;) {
    if (failure_) failure_->raise();
    if (chunk.frame != kNone) {
      if (frames_[chunk.frame].state == State::kReady) return false;
      wait_change(lock);
      continue;
    }
    // Overwriting leaves what is read ahead where it is, and waits for a spare frame instead.
    const bool spares = content == Content::kOverwritten && ahead_frame_num_ < swap_frame_num_;
    const std::size_t frame = take_frame(spares ? ahead_frame_num_ : 0);
    if (frame != kNone) {
      const bool reads = chunk.on_disk && content == Content::kKept;
      place(frame, index, reads ? State::kReading : State::kReady);
      if (!reads) return !chunk.on_disk;
      transfer(Direction::kRead, frame);
      continue;
    }
    const auto swapping = std::span(frames_).first(swap_frame_num_);
    ZB_EXPECT_STATE(!std::ranges::all_of(swapping, [](const Frame& f) { return f.state == State::kHeld; }),
                    "all " + std::to_string(swap_frame_num_) +
                        " frames are held; release a chunk before acquiring another, or give the pager more memory");
    ++frame_waiters_;
    wait_change(lock);
    --frame_waiters_;
  }
}

void Pager::wait_change(Lock& lock) {
  if (waiter_num_++ == 0) wait_begin_ = std::chrono::steady_clock::now();
  sync_->changed.wait(lock);
  if (--waiter_num_ == 0) stats_.wait_s += seconds_since(wait_begin_);
}

bool Pager::check(std::size_t index, std::span<std::byte> memory) {
  if (checksum(memory) == chunks_[index].checksum) return true;
  const std::lock_guard lock(sync_->mutex);
  const Chunk& chunk = chunks_[index];
  const IoTransfer first =
      space_.transfers(Direction::kRead, chunk.slot, {memory.data(), space_.aligned(chunk.bytes)})[0];
  const std::string path = space_.files()[first.file].path;
  fail(std::make_shared<IoFailure>(IoFailure{EBADMSG,
                                             "chunk " + std::to_string(index) + " (" + std::to_string(chunk.bytes) +
                                                 " bytes, from offset " + std::to_string(first.offset) + " of " + path +
                                                 ") differs from what was written: the file or its device is corrupted",
                                             path}));
  return false;
}

void Pager::release(std::size_t index, Change change) {
  Lock lock(sync_->mutex);
  ZB_EXPECT(index < chunks_.size(), "chunk " + std::to_string(index) + " is out of range: there are " +
                                        std::to_string(chunks_.size()) + " chunks, numbered from 0");
  Chunk& chunk = chunks_[index];
  ZB_EXPECT_STATE(chunk.frame != kNone && frames_[chunk.frame].state == State::kHeld,
                  "chunk " + std::to_string(index) + " is not held");
  ZB_EXPECT_STATE(change == Change::kDirty || !chunk.must_write,
                  "chunk " + std::to_string(index) + " was acquired to be overwritten and must be released dirty");
  const bool writes = change == Change::kDirty && chunk.slot != kNone && !failure_;
  if (writes && checksums_) {
    const std::span<std::byte> memory = memory_of(chunk);
    lock.unlock();
    const std::uint64_t sum = checksum(memory);
    lock.lock();
    chunk.checksum = sum;
  }
  frames_[chunk.frame].state = writes ? State::kWriting : State::kReady;
  if (writes) transfer(Direction::kWrite, chunk.frame);
  sync_->changed.notify_all();
  read_ahead();
}

void Pager::flush() {
  Lock lock(sync_->mutex);
  while (in_flight_num_ > 0) wait_change(lock);
  if (failure_) failure_->raise();
}

bool Pager::is_in_memory(std::size_t index) const {
  const std::lock_guard lock(sync_->mutex);
  const Chunk& chunk = chunks_.at(index);
  if (failure_) return true;
  if (chunk.frame == kNone) return !chunk.on_disk;
  return frames_[chunk.frame].state == State::kReady || frames_[chunk.frame].state == State::kHeld;
}

PagerStats Pager::stats() const {
  const std::lock_guard lock(sync_->mutex);
  PagerStats stats = stats_;
  if (waiter_num_ > 0) stats.wait_s += seconds_since(wait_begin_);
  return stats;
}

// How many acquisitions by the order come before the chunk's next one; those outside the order come last.
std::size_t Pager::distance(std::size_t index) const {
  std::size_t nearest = kNone;
  for (const std::size_t place : chunks_[index].places) nearest = std::min(nearest, steps_to(place));
  return nearest;
}

// A free frame, or the one whose chunk is needed last and not within `least_distance`; none otherwise.
std::size_t Pager::take_frame(std::size_t least_distance) {
  std::size_t best = kNone;
  std::size_t best_distance = 0;
  for (std::size_t i = 0; i < swap_frame_num_; ++i) {
    const Frame& frame = frames_[i];
    if (frame.state == State::kFree) return i;
    if (frame.state != State::kReady || chunks_[frame.chunk].acquirer_num > 0) continue;
    const std::size_t needed = distance(frame.chunk);
    if (needed >= least_distance && (best == kNone || needed > best_distance)) {
      best = i;
      best_distance = needed;
    }
  }
  if (best != kNone) {
    chunks_[frames_[best].chunk].frame = kNone;
    frames_[best] = {.memory = frames_[best].memory};
  }
  return best;
}

void Pager::place(std::size_t frame, std::size_t chunk, State state) {
  frames_[frame].state = state;
  frames_[frame].chunk = chunk;
  chunks_[chunk].frame = frame;
}

void Pager::transfer(Direction direction, std::size_t frame) {
  const Chunk& chunk = chunks_[frames_[frame].chunk];
  const std::size_t bytes = space_.aligned(chunk.bytes);
  ++in_flight_num_;
  frames_[frame].begin = std::chrono::steady_clock::now();
  try {
    engine_.start(space_.transfers(direction, chunk.slot, {frames_[frame].memory, bytes}),
                  [this, direction, frame](const IoFailurePtr& failure) {
                    const std::lock_guard lock(sync_->mutex);
                    on_end(direction, frame, failure);
                  });
    (direction == Direction::kRead ? stats_.read_bytes : stats_.written_bytes) += bytes;
  } catch (const std::exception& error) {
    on_end(direction, frame, failure_of(error));
  }
}

void Pager::on_end(Direction direction, std::size_t frame, const IoFailurePtr& failure) {
  --in_flight_num_;
  Chunk& chunk = chunks_[frames_[frame].chunk];
  frames_[frame].state = State::kReady;
  if (on_transfer_) {
    on_transfer_({.direction = direction,
                  .chunk = frames_[frame].chunk,
                  .begin = frames_[frame].begin,
                  .end = std::chrono::steady_clock::now()});
  }
  if (failure) {
    fail(failure);
  } else {
    chunk.on_disk = true;
    chunk.unchecked = direction == Direction::kRead && checksums_;
  }
  sync_->changed.notify_all();
  read_ahead();
}

void Pager::read_ahead() {
  if (failure_ || order_.empty() || frame_waiters_ > 0) return;
  for (std::size_t ahead = 0, found = 0; ahead < order_.size() && found < ahead_frame_num_; ++ahead) {
    const std::size_t index = order_[(next_ + ahead) % order_.size()];
    const Chunk& chunk = chunks_[index];
    if (chunk.slot == kNone) continue;
    ++found;
    if (chunk.frame != kNone) continue;
    if (!chunk.on_disk) return;  // nothing to read, but its frame comes first: it would take that of a later chunk
    const std::size_t frame = take_frame(ahead + 1);
    if (frame == kNone) return;
    place(frame, index, State::kReading);
    transfer(Direction::kRead, frame);
    if (failure_) return;
  }
}

void Pager::fail(const IoFailurePtr& failure) {
  if (!failure_) failure_ = failure;
}

}  // namespace zb
