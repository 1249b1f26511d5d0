#include "zero/gather_agreement.h"

#include <algorithm>
#include <array>
#include <span>
#include <string>

#include "common/error.h"

namespace zb {
namespace {

std::uint64_t hash_of(const std::vector<std::size_t>& list) {
  std::uint64_t hash = 1469598103934665603ULL;  // FNV-1a over the unit indices
  for (const std::size_t unit : list) {
    hash ^= unit + 1;
    hash *= 1099511628211ULL;
  }
  return hash;
}

}  // namespace

std::string_view pass_kind_name(PassKind kind) noexcept {
  constexpr std::array<std::string_view, kPassKindNum> kNames{"training forward", "evaluation forward", "backward"};
  return kNames[static_cast<std::size_t>(kind)];
}

GatherMessages::GatherMessages(Communicator& communicator, PassKind kind, std::uint64_t pass_number,
                               const std::vector<std::size_t>& gathered, std::int32_t wish)
    : communicator_(communicator),
      mine_{pass_number,
            hash_of(gathered),
            static_cast<std::uint32_t>(gathered.size()),
            wish,
            static_cast<std::uint32_t>(kind),
            0},
      all_(static_cast<std::size_t>(communicator.world_size())),
      work_(communicator.start_exchange(std::as_bytes(std::span(&mine_, 1)), std::as_writable_bytes(std::span(all_)),
                                        pass_kind_name(kind))) {}

const std::vector<GatherMessage>& GatherMessages::wait() {
  work_->wait();
  for (std::size_t rank = 0; rank < all_.size(); ++rank) {
    const GatherMessage& theirs = all_[rank];
    if (theirs.kind == mine_.kind && theirs.pass_number == mine_.pass_number) continue;
    const auto pass_of = [](const GatherMessage& message) {
      return std::string(pass_kind_name(static_cast<PassKind>(message.kind))) + " (pass " +
             std::to_string(message.pass_number) + ")";
    };
    const std::string reason = "rank " + std::to_string(rank) + " is in its " + pass_of(theirs) + " while rank " +
                               std::to_string(communicator_.rank()) + " is in its " + pass_of(mine_) +
                               "; every rank must call forward, backward and step equally often";
    communicator_.abort(reason);
    throw CommunicationError(reason, static_cast<int>(rank));
  }
  return all_;
}

std::vector<std::int32_t> wishes_in(const std::vector<GatherMessage>& messages) {
  std::vector<std::int32_t> wishes;
  for (const GatherMessage& message : messages) {
    if (message.wish != kNoWish && std::find(wishes.begin(), wishes.end(), message.wish) == wishes.end()) {
      wishes.push_back(message.wish);
    }
  }
  return wishes;
}

void adopt_sequence(Communicator& communicator, const std::vector<GatherMessage>& messages,
                    const std::vector<std::size_t>& gathered, std::vector<std::size_t>& sequence) {
  const std::uint64_t agreed = hash_of(sequence);
  if (std::all_of(messages.begin(), messages.end(), [&](const GatherMessage& m) { return m.gathered_hash == agreed; }))
    return;
  std::size_t longest = 0;
  for (std::size_t rank = 1; rank < messages.size(); ++rank) {
    if (messages[rank].gathered_num > messages[longest].gathered_num) longest = rank;
  }
  const std::size_t list_num = messages[longest].gathered_num;
  std::vector<std::uint32_t> mine(list_num, 0);
  for (std::size_t i = 0; i < std::min(list_num, gathered.size()); ++i)
    mine[i] = static_cast<std::uint32_t>(gathered[i]);
  std::vector<std::uint32_t> all(list_num * messages.size());
  if (list_num > 0) {
    communicator.exchange(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)), "gather order");
  }
  const auto begin = all.begin() + static_cast<std::ptrdiff_t>(longest * list_num);
  sequence.assign(begin, begin + static_cast<std::ptrdiff_t>(list_num));
}

}  // namespace zb
