// Which lane touched which bytes, and whether marks order the two: finds a missing wait on any path that is walked,
// whatever order the work then happened to run in.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/device.h"

namespace zb::test {

// The lanes, and the host behind them.
inline constexpr std::size_t kHost = kLaneNum;
inline constexpr std::size_t kActorNum = kLaneNum + 1;

// How much of every actor's work comes before a point. (A vector clock.)
using Clock = std::array<std::uint64_t, kActorNum>;

inline void join(Clock& clock, const Clock& other) {
  for (std::size_t actor = 0; actor < kActorNum; ++actor) clock[actor] = std::max(clock[actor], other[actor]);
}

struct Touched {
  const void* data = nullptr;
  std::size_t bytes = 0;
  bool is_written = false;
};

class RaceDetector {
 public:
  // `report` gets every finding once.
  explicit RaceDetector(std::function<void(const std::string&)> report) : report_(std::move(report)) {}

  // Memory of a peer, whose own detector watches it.
  void mapped(const void* data, std::size_t bytes, std::string_view what) {
    allocations_[address_of(data)] = {bytes, std::string(what), {}, false};
  }

  void allocated(const void* data, std::size_t bytes, std::string_view what) {
    allocations_[address_of(data)] = {bytes, std::string(what), {{0, {}}, {bytes, {}}}};
  }

  // Memory goes: all that touched it must have passed for the host.
  void freed(const void* data, const Clock& host) {
    const auto found = allocations_.find(address_of(data));
    for (const auto& [begin, piece] : found->second.pieces) {
      for (const Access& access : piece.reads) check(access, host, "the host frees", found->second);
      check(piece.write, host, "the host frees", found->second);
    }
    allocations_.erase(found);
  }
  void forget(const void* data) { allocations_.erase(address_of(data)); }

  // Memory that appears elsewhere, too.
  struct Run {
    const std::byte* data = nullptr;  // where it is allocated
    std::size_t bytes = 0;
  };
  void aliased(const void* data, std::vector<Run> runs) { aliases_[address_of(data)] = std::move(runs); }
  void forget_alias(const void* data) { aliases_.erase(address_of(data)); }

  // `clock` is the actor's, this work included.
  void touch(std::size_t actor, const Clock& clock, std::string_view operation, const Touched& touched) {
    if (touched.bytes == 0) return;
    if (touch_aliased(actor, clock, operation, touched)) return;
    const auto [allocation, begin] = locate(touched);
    if (allocation == nullptr) {
      say(std::string(operation) + " touches memory that is none of the device's, or no longer");
      return;
    }
    if (!allocation->is_watched) return;
    const std::string who =
        actor_name(actor) + (touched.is_written ? " writes in " : " reads in ") + std::string(operation);
    const Access access{actor, clock[actor], &*names_.insert(who).first};
    const auto first = split(*allocation, begin);
    const auto last = split(*allocation, begin + touched.bytes);
    for (auto piece = first; piece != last; ++piece) {
      check(piece->second.write, clock, who, *allocation);
      if (!touched.is_written) {
        piece->second.reads[actor] = access;
        continue;
      }
      for (const Access& read : piece->second.reads) check(read, clock, who, *allocation);
      piece->second = {access, {}};
    }
  }

 private:
  struct Access {
    std::size_t actor = 0;
    std::uint64_t tick = 0;  // 0: never
    const std::string* who = nullptr;
  };
  struct Piece {
    Access write;
    std::array<Access, kActorNum> reads{};
  };
  struct Memory {
    std::size_t bytes = 0;
    std::string what;
    std::map<std::size_t, Piece> pieces;  // by begin; the last one, at the end, is empty
    bool is_watched = true;
  };

  static std::uintptr_t address_of(const void* data) { return reinterpret_cast<std::uintptr_t>(data); }
  static std::string actor_name(std::size_t actor) {
    constexpr std::array<const char*, kActorNum> kNames{"the compute lane",       "the gather lane",
                                                        "the reduce lane",        "the lane to the host",
                                                        "the lane from the host", "the host"};
    return kNames[actor];
  }

  // Whether it lies in aliased memory: then what is there is touched.
  bool touch_aliased(std::size_t actor, const Clock& clock, std::string_view operation, const Touched& touched) {
    const std::uintptr_t begin = address_of(touched.data);
    auto found = aliases_.upper_bound(begin);
    if (found == aliases_.begin()) return false;
    --found;
    std::uintptr_t at = found->first;
    for (const Run& run : found->second) {
      const std::uintptr_t first = std::max(at, begin);
      const std::uintptr_t last = std::min(at + run.bytes, begin + touched.bytes);
      if (first < last) touch(actor, clock, operation, {run.data + (first - at), last - first, touched.is_written});
      at += run.bytes;
    }
    return begin < at;  // what lies beyond is nowhere, and is found by the memory being guarded
  }

  std::pair<Memory*, std::size_t> locate(const Touched& touched) {
    const std::uintptr_t address = address_of(touched.data);
    auto found = allocations_.upper_bound(address);
    if (found == allocations_.begin()) return {nullptr, 0};
    --found;
    const std::size_t begin = address - found->first;
    if (begin + touched.bytes > found->second.bytes) return {nullptr, 0};
    return {&found->second, begin};
  }

  static std::map<std::size_t, Piece>::iterator split(Memory& memory, std::size_t at) {
    const auto next = memory.pieces.lower_bound(at);
    if (next->first == at) return next;
    return memory.pieces.emplace_hint(next, at, std::prev(next)->second);
  }

  void check(const Access& earlier, const Clock& clock, const std::string& who, const Memory& memory) {
    if (earlier.tick > clock[earlier.actor]) {
      say(who + " ('" + memory.what + "'), and nothing orders that behind: " + *earlier.who);
    }
  }
  void say(const std::string& finding) {
    if (said_.insert(finding).second) report_(finding);
  }

  std::function<void(const std::string&)> report_;
  std::map<std::uintptr_t, Memory> allocations_;
  std::map<std::uintptr_t, std::vector<Run>> aliases_;
  std::set<std::string> names_;
  std::set<std::string> said_;
};

}  // namespace zb::test
