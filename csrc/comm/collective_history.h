// What a rank has started, in brief, so that ranks can find out whether they all started the same.
//
// [Note: mismatched collectives] A kernel that meets a peer's other collective hangs, or ends with wrong values and no
// error. So each rank hashes the kind, size, dtype, root, label and place of all that it starts, and every exchange and
// barrier compares the hashes on the host before the devices have met (the engine exchanges in each pass). Where they
// differ, every rank raises and names the first operation that does. What differs before no exchange is caught as a
// stall, when its time is out. Gathers of final shards meet nobody, and are a rank's own business.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.h"

namespace zb {

// A name that needs no memory of others and makes none.
struct OperationName {
  Collective kind{};
  std::array<char, 48> label{};  // cut, and ended by zero

  OperationName() = default;
  OperationName(Collective of_kind, std::string_view of_label) noexcept : kind(of_kind) {
    of_label.copy(label.data(), label.size() - 1);
  }
  std::string text() const;  // "all_gather of 'h.3'"
};

struct StartedCollective {
  OperationName name;
  DType dtype{};
  std::uint16_t root = 0;
  bool is_pushed = false;
  std::uint64_t bytes = 0;  // of a shard, of the buffer
  std::uint64_t place = 0;  // LaneTransport::place_of
};

class CollectiveHistory {
 public:
  void add(const StartedCollective& started) noexcept;
  std::uint64_t num() const noexcept { return recent_.num; }  // added so far
  // control.exchange(mine, all, label) that compares the ranks' histories too. Throws CommunicationError on all of them
  // when they differ.
  void exchange(Communicator& control, std::span<const std::byte> mine, std::span<std::byte> all,
                std::string_view label) const;
  // The same in two parts.
  struct Exchange {
    std::vector<std::byte> message;   // the hash, then this rank's
    std::vector<std::byte> messages;  // of all ranks
    std::span<std::byte> all;
    std::string_view label;
    WorkPtr work;
  };
  void start(Communicator& control, std::span<const std::byte> mine, std::span<std::byte> all, std::string_view label,
             Exchange& exchange) const;
  void finish(Communicator& control, Exchange& exchange) const;

 private:
  static constexpr std::size_t kKeptNum = 64;
  struct Entry {
    StartedCollective started;
    std::uint64_t hash = 0;  // of this and all before
  };
  struct Recent {
    std::uint64_t num = 0;  // started so far
    std::array<Entry, kKeptNum> entries{};

    const Entry& at(std::uint64_t index) const noexcept { return entries[index % kKeptNum]; }
    std::uint64_t first_kept() const noexcept { return num < kKeptNum ? 0 : num - kKeptNum; }
  };

  static std::string describe(const Entry& entry);
  static std::string difference(std::span<const Recent> of_ranks);
  std::uint64_t hash() const noexcept { return recent_.num == 0 ? 0 : recent_.at(recent_.num - 1).hash; }

  Recent recent_;
};

}  // namespace zb
