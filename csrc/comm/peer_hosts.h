// Whether ranks of other hosts still answer, for errors that name the one that does not.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace zb {

// Where a rank listens, and accepts nothing: its kernel answers for as long as its process and its link live.
struct PeerHost {
  std::string host;     // its name, for errors
  std::string address;  // numeric, or a name to be resolved
  std::uint16_t port = 0;
};

struct LostRank {
  int rank = 0;
  std::string text;  // "rank 1 on host 'worker-2' has ended"
};

// Asks all ranks but `own`, again and again until one does not answer or `patience` is over.
std::optional<LostRank> find_lost_rank(const std::vector<PeerHost>& ranks, int own, std::chrono::milliseconds patience);

}  // namespace zb
