// What a PeerTransport needs of the machine beside its device: memory of the peers, and meetings of the lanes.
//
// [Note: meetings]
// The lanes of all ranks meet by flags: `announce` raises this rank's flag at every peer once what stands before it in
// the lane has run, and `await` holds the lane back until every peer's flag of the same meeting is up. Flags are
// numbers that only grow, one for each pair of ranks, and a lane's n-th meeting is every lane's n-th. So the host waits
// for nothing, and knows nothing of the peers when it puts work in.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>
#include <vector>

namespace zb {

// One allocation of every rank, mapped here: to this rank's device all of it is memory like its own. Dropping it drops
// this rank's memory and its views of the peers'.
class PeerMemory {
 public:
  virtual ~PeerMemory() = default;
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  std::byte* of(int rank) const noexcept { return views_[static_cast<std::size_t>(rank)]; }

 protected:
  PeerMemory() = default;
  std::vector<std::byte*> views_;  // by rank
};

// Pages of this rank alone, which can be mapped in several places ([Note: spliced slots] in spliced_slot.h).
class PeerPages {
 public:
  virtual ~PeerPages() = default;
  PeerPages() = default;
  PeerPages(const PeerPages&) = delete;
  PeerPages& operator=(const PeerPages&) = delete;

  virtual std::size_t page_bytes() const noexcept = 0;
  virtual std::size_t page_num() const noexcept = 0;
  // Throws OutOfMemoryError.
  virtual void grow(std::size_t page_num) = 0;
  // Addresses at which `before_num` of these pages appear, from `first` on, then this rank's part of `own` (null:
  // nothing), all of it, then the next `after_num` of these pages. They stay valid without this object.
  virtual std::shared_ptr<std::byte> map(std::size_t first, std::size_t before_num,
                                         const std::shared_ptr<PeerMemory>& own, std::size_t after_num) = 0;
};

class PeerLink {
 public:
  virtual ~PeerLink() = default;
  PeerLink() = default;
  PeerLink(const PeerLink&) = delete;
  PeerLink& operator=(const PeerLink&) = delete;

  virtual int rank() const noexcept = 0;
  virtual int world_size() const noexcept = 0;
  // Collective, with the same size on all ranks; zero-filled. Throws OutOfMemoryError on all ranks where one has too
  // little, CommunicationError where a peer fails.
  virtual std::shared_ptr<PeerMemory> allocate(std::size_t bytes, std::string_view what) = 0;

  virtual std::unique_ptr<PeerPages> make_pages(std::string_view what) = 0;

  // These are put into the lane.
  virtual void announce() = 0;
  virtual void await() = 0;

  // The rest is called by the watchdog's thread, beside what puts work in.
  virtual void enter_thread() {}
  // Lets this rank's lane pass all meetings for now; called again and again until is_idle().
  virtual void release() noexcept = 0;
  virtual bool is_idle() noexcept = 0;
};

}  // namespace zb
