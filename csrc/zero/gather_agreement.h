// What ranks tell each other at the end of a pass's known sequence: see [Note: agreed gathers] in gather_scheduler.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "comm/communicator.h"

namespace zb {

enum class PassKind : std::uint8_t { kTrainForward, kEvalForward, kBackward };
inline constexpr std::size_t kPassKindNum = 3;
std::string_view pass_kind_name(PassKind kind) noexcept;

inline constexpr std::int32_t kNoWish = -1;

// One rank's part of an agreement, as it goes over the wire.
struct GatherMessage {
  std::uint64_t pass_number;
  std::uint64_t gathered_hash;
  std::uint32_t gathered_num;
  std::int32_t wish;  // a unit, or kNoWish
  std::uint32_t kind;
  std::uint32_t reserved;
};

// One exchange of messages, from its start on. `gathered` are the units that this rank needed so far. Collective.
class GatherMessages {
 public:
  GatherMessages(Communicator& communicator, PassKind kind, std::uint64_t pass_number,
                 const std::vector<std::size_t>& gathered, std::int32_t wish);
  GatherMessages(const GatherMessages&) = delete;
  GatherMessages& operator=(const GatherMessages&) = delete;

  // Every rank's message by rank. Aborts the communicator and throws CommunicationError where another rank is in
  // another pass.
  const std::vector<GatherMessage>& wait();

 private:
  Communicator& communicator_;
  GatherMessage mine_;
  std::vector<GatherMessage> all_;
  WorkPtr work_;
};

// The units wished for, each once, in rank order.
std::vector<std::int32_t> wishes_in(const std::vector<GatherMessage>& messages);

// Where some rank gathered something else than the sequence, the list of the rank that gathered most takes its place.
// Collective then.
void adopt_sequence(Communicator& communicator, const std::vector<GatherMessage>& messages,
                    const std::vector<std::size_t>& gathered, std::vector<std::size_t>& sequence);

}  // namespace zb
