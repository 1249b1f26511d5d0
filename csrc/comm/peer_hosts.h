// Whether ranks of other hosts still answer, for errors that name the one that does not.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/file_descriptor.h"

namespace zb {

// Where a rank listens. Its kernel answers for as long as its process and its link live.
struct PeerHost {
  std::string host;     // its name, for errors
  std::string address;  // numeric, or a name to be resolved
  std::uint16_t port = 0;
};

struct LostRank {
  int rank = 0;
  bool has_ended = false;  // else its host cannot be reached
  std::string text;        // "rank 1 on host 'worker-2' has ended"
};

// What a rank sends to another when one of its collectives has failed.
struct Notice {
  static constexpr std::uint32_t kMagic = 0x7a62706c;

  std::uint32_t magic = kMagic;
  std::int32_t from = -1;
  std::int32_t lost = -1;  // the rank that `from` found lost, -1 for none
  std::uint32_t has_ended = 0;
};

// [Note: the first notice]
// A rank whose collective failed ends soon, too, and a slower rank may find only that. So it tells the others what it
// found before it raises: it connects to each of them and sends a Notice. Nobody has to accept there: the kernel keeps
// connection and bytes until the other rank looks for a lost rank itself. A notice counts more than what a rank finds
// by its own attempts, and a rank that sent one is never named, whether it found a lost rank or none.
class PeerHosts {
 public:
  // `ranks`: by rank; may be empty, and then nobody is ever lost. `listener`: the socket where `own` listens, which
  // this object owns from now on, or none.
  PeerHosts(std::vector<PeerHost> ranks, int own, shm::FileDescriptor listener);

  // Asks all other ranks, again and again until one does not answer or `patience` is over, then tells the others.
  std::optional<LostRank> find_lost_rank(std::chrono::milliseconds patience);

  // Stops listening: this rank has ended for the others.
  void close();

 private:
  void read_notices();
  void take(const Notice& notice);
  std::optional<LostRank> look_once() const;
  LostRank lost_rank(int rank, bool has_ended) const;
  void tell() const;

  const std::vector<PeerHost> ranks_;
  const int own_;
  std::mutex mutex_;  // gathers and reductions may fail in two threads
  shm::FileDescriptor listener_;
  std::vector<shm::FileDescriptor> incoming_;  // connections whose bytes have not come yet
  std::vector<bool> has_failed_;               // by rank: it sent a notice
  std::optional<LostRank> first_;              // that was found or told
};

}  // namespace zb
