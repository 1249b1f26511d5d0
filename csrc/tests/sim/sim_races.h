// Which lane touched which bytes, and whether marks order the two: finds a missing wait on any path that is walked,
// whatever order the work then happened to run in.
#pragma once

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

void join(Clock& clock, const Clock& other);

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
  void mapped(const void* data, std::size_t bytes, std::string_view what);

  void allocated(const void* data, std::size_t bytes, std::string_view what);

  // Memory goes: all that touched it must have passed for the host.
  void freed(const void* data, const Clock& host);
  void forget(const void* data) { allocations_.erase(address_of(data)); }

  // Memory that appears elsewhere, too.
  struct Run {
    const std::byte* data = nullptr;  // where it is allocated
    std::size_t bytes = 0;
  };
  void aliased(const void* data, std::vector<Run> runs) { aliases_[address_of(data)] = std::move(runs); }
  void forget_alias(const void* data) { aliases_.erase(address_of(data)); }

  // `clock` is the actor's, this work included.
  void touch(std::size_t actor, const Clock& clock, std::string_view operation, const Touched& touched);

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
  static std::string actor_name(std::size_t actor);

  // How a finding names what touches; lives as long as the detector.
  const std::string& name_of(std::size_t actor, std::string_view operation, bool is_written);

  // Whether it lies in aliased memory: then what is there is touched.
  bool touch_aliased(std::size_t actor, const Clock& clock, std::string_view operation, const Touched& touched);

  std::pair<Memory*, std::size_t> locate(const Touched& touched);

  static std::map<std::size_t, Piece>::iterator split(Memory& memory, std::size_t at);

  void check(const Access& earlier, const Clock& clock, const std::string& who, const Memory& memory);
  void say(const std::string& finding);

  std::function<void(const std::string&)> report_;
  std::map<std::uintptr_t, Memory> allocations_;
  std::map<std::uintptr_t, std::vector<Run>> aliases_;
  std::array<std::array<std::map<std::string, std::string, std::less<>>, 2>, kActorNum> names_;  // by operation
  std::set<std::string> said_;
};

}  // namespace zb::test
