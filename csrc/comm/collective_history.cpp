#include "comm/collective_history.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "comm/arguments.h"

namespace zb {
namespace {

std::uint64_t hash_on(std::uint64_t hash, std::uint64_t value) noexcept {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15ULL;  // the golden ratio spreads the bits, the shift brings them back down
  return hash ^ hash >> 32;
}

std::uint64_t hash_on(std::uint64_t hash, const StartedCollective& started) noexcept {
  hash = hash_on(hash, static_cast<std::uint64_t>(started.name.kind) << 32 |
                           static_cast<std::uint64_t>(started.is_pushed) << 24 |
                           static_cast<std::uint64_t>(started.dtype) << 16 | started.root);
  hash = hash_on(hash_on(hash, started.bytes), started.place);
  std::array<std::uint64_t, sizeof(started.name.label) / sizeof(std::uint64_t)> words;
  std::memcpy(words.data(), started.name.label.data(), sizeof(words));
  for (const std::uint64_t word : words) hash = hash_on(hash, word);
  return hash;
}

}  // namespace

std::string OperationName::text() const { return operation_text(collective_name(kind), label.data()); }

void CollectiveHistory::add(const StartedCollective& started) noexcept {
  const std::uint64_t next = hash_on(hash(), started);
  recent_.entries[recent_.num % kKeptNum] = {started, next};
  recent_.num += 1;
}

void CollectiveHistory::exchange(Communicator& control, std::span<const std::byte> mine, std::span<std::byte> all,
                                 std::string_view label) const {
  Exchange exchange;
  start(control, mine, all, label, exchange);
  finish(control, exchange);
}

void CollectiveHistory::start(Communicator& control, std::span<const std::byte> mine, std::span<std::byte> all,
                              std::string_view label, Exchange& exchange) const {
  const std::uint64_t own = hash();
  exchange.message.resize(sizeof(own) + mine.size());
  std::memcpy(exchange.message.data(), &own, sizeof(own));
  std::copy(mine.begin(), mine.end(), exchange.message.begin() + sizeof(own));
  exchange.messages.resize(exchange.message.size() * static_cast<std::size_t>(control.world_size()));
  exchange.all = all;
  exchange.label = label;
  exchange.work = control.start_exchange(exchange.message, exchange.messages, label);
}

void CollectiveHistory::finish(Communicator& control, Exchange& exchange) const {
  exchange.work->wait();
  const auto ranks = static_cast<std::size_t>(control.world_size());
  const std::size_t mine_bytes = exchange.message.size() - sizeof(std::uint64_t);
  bool is_equal = true;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const std::byte* const theirs = exchange.messages.data() + rank * exchange.message.size();
    is_equal = is_equal && std::memcmp(theirs, exchange.message.data(), sizeof(std::uint64_t)) == 0;
    std::copy_n(theirs + sizeof(std::uint64_t), mine_bytes,
                exchange.all.begin() + static_cast<std::ptrdiff_t>(rank * mine_bytes));
  }
  if (is_equal) return;
  // All ranks see the same hashes, so all of them come here.
  static_assert(std::is_trivially_copyable_v<Recent>);
  std::vector<Recent> of_ranks(ranks);
  control.exchange(std::as_bytes(std::span(&recent_, 1)), std::as_writable_bytes(std::span(of_ranks)), exchange.label);
  throw CommunicationError(difference(of_ranks), -1);
}

std::string CollectiveHistory::describe(const Entry& entry) {
  const StartedCollective& started = entry.started;
  std::string text = started.name.text() + " (" + std::to_string(started.bytes) + " bytes";
  if (started.name.kind == Collective::kReduceScatter || started.name.kind == Collective::kAllReduce) {
    text.append(", ").append(dtype_name(started.dtype));
  }
  if (started.is_pushed) text += ", pushed";
  if (started.name.kind == Collective::kBroadcast) text += ", root " + std::to_string(started.root);
  return text + ")";
}

std::string CollectiveHistory::difference(std::span<const Recent> of_ranks) {
  const std::string intro = "ranks started different collectives: ";
  std::uint64_t first = 0;
  std::uint64_t end = 0;
  for (const Recent& recent : of_ranks) {
    first = std::max(first, recent.first_kept());
    end = std::max(end, recent.num);
  }
  const Recent& zero = of_ranks[0];
  for (std::uint64_t index = first; index < end; ++index) {
    for (std::size_t rank = 1; rank < of_ranks.size(); ++rank) {
      const Recent& other = of_ranks[rank];
      const bool has = index < other.num;
      const bool zero_has = index < zero.num;
      if (has == zero_has && (!has || other.at(index).hash == zero.at(index).hash)) continue;
      const std::string theirs = has ? describe(other.at(index)) : "nothing more";
      const std::string of_zero = zero_has ? describe(zero.at(index)) : "nothing more";
      return intro + "rank 0 " + of_zero + ", rank " + std::to_string(rank) + " " + theirs +
             (theirs == of_zero ? ", whose data lies in another place" : "") +
             (index == first && first > 0 ? ", or another one before" : "");
    }
  }
  return intro + "the first one lies further back than " + std::to_string(kKeptNum) + " operations";
}

}  // namespace zb
