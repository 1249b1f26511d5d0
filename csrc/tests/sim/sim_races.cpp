#include "sim/sim_races.h"

#include <algorithm>
#include <iterator>

namespace zb::test {

void join(Clock& clock, const Clock& other) {
  for (std::size_t actor = 0; actor < kActorNum; ++actor) clock[actor] = std::max(clock[actor], other[actor]);
}

void RaceDetector::mapped(const void* data, std::size_t bytes, std::string_view what) {
  allocations_[address_of(data)] = {bytes, std::string(what), {}, false};
}

void RaceDetector::allocated(const void* data, std::size_t bytes, std::string_view what) {
  allocations_[address_of(data)] = {bytes, std::string(what), {{0, {}}, {bytes, {}}}};
}

void RaceDetector::freed(const void* data, const Clock& host) {
  const auto found = allocations_.find(address_of(data));
  for (const auto& [begin, piece] : found->second.pieces) {
    for (const Access& access : piece.reads) check(access, host, "the host frees", found->second);
    check(piece.write, host, "the host frees", found->second);
  }
  allocations_.erase(found);
}

void RaceDetector::touch(std::size_t actor, const Clock& clock, std::string_view operation, const Touched& touched) {
  if (touched.bytes == 0) return;
  if (touch_aliased(actor, clock, operation, touched)) return;
  const auto [allocation, begin] = locate(touched);
  if (allocation == nullptr) {
    say(std::string(operation) + " touches memory that is none of the device's, or no longer");
    return;
  }
  if (!allocation->is_watched) return;
  const std::string& who = name_of(actor, operation, touched.is_written);
  const Access access{actor, clock[actor], &who};
  const auto first = split(*allocation, begin);
  const auto last = split(*allocation, begin + touched.bytes);
  for (auto piece = first; piece != last; ++piece) {
    check(piece->second.write, clock, who, *allocation);
    if (!touched.is_written) {
      piece->second.reads[actor] = access;
      continue;
    }
    for (const Access& read : piece->second.reads) check(read, clock, who, *allocation);
  }
  if (!touched.is_written) return;
  first->second = {access, {}};  // one piece from here on
  allocation->pieces.erase(std::next(first), last);
}

std::string RaceDetector::actor_name(std::size_t actor) {
  constexpr std::array<const char*, kActorNum> kNames{"the compute lane",       "the gather lane",
                                                      "the reduce lane",        "the lane to the host",
                                                      "the lane from the host", "the host"};
  return kNames[actor];
}

const std::string& RaceDetector::name_of(std::size_t actor, std::string_view operation, bool is_written) {
  auto& names = names_[actor][is_written ? 1 : 0];
  auto found = names.find(operation);
  if (found == names.end()) {
    const std::string what(operation);
    found = names.emplace(what, actor_name(actor) + (is_written ? " writes in " : " reads in ") + what).first;
  }
  return found->second;
}

bool RaceDetector::touch_aliased(std::size_t actor, const Clock& clock, std::string_view operation,
                                 const Touched& touched) {
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

std::pair<RaceDetector::Memory*, std::size_t> RaceDetector::locate(const Touched& touched) {
  const std::uintptr_t address = address_of(touched.data);
  auto found = allocations_.upper_bound(address);
  if (found == allocations_.begin()) return {nullptr, 0};
  --found;
  const std::size_t begin = address - found->first;
  if (begin + touched.bytes > found->second.bytes) return {nullptr, 0};
  return {&found->second, begin};
}

std::map<std::size_t, RaceDetector::Piece>::iterator RaceDetector::split(Memory& memory, std::size_t at) {
  const auto next = memory.pieces.lower_bound(at);
  if (next->first == at) return next;
  return memory.pieces.emplace_hint(next, at, std::prev(next)->second);
}

void RaceDetector::check(const Access& earlier, const Clock& clock, const std::string& who, const Memory& memory) {
  if (earlier.tick > clock[earlier.actor]) {
    say(who + " ('" + memory.what + "'), and nothing orders that behind: " + *earlier.who);
  }
}

void RaceDetector::say(const std::string& finding) {
  if (said_.insert(finding).second) report_(finding);
}

}  // namespace zb::test
