// Whether the processes of this host's ranks live, by pidfds.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "comm/file_descriptor.h"

namespace zb {

// What a rank tells its peers about its process. Plain bytes.
struct ProcessIdentity {
  std::array<char, 64> host{};  // the boot id of its kernel, or the host's name
  std::uint64_t pid_namespace = 0;
  std::int64_t pid = 0;

  static ProcessIdentity own();
};

class PeerProcesses {
 public:
  PeerProcesses() = default;  // watches nobody
  // By rank. Processes of other hosts and of other pid namespaces are not watched: they are missed at the timeout. A
  // process that dies while this runs may be taken for whoever gets its pid: let ranks meet once more afterwards.
  PeerProcesses(int rank, std::span<const ProcessIdentity> identities);

  // The lowest rank whose process has ended. Callable from any thread.
  std::optional<int> dead() const noexcept;
  bool is_empty() const noexcept { return processes_.empty(); }

 private:
  std::vector<shm::FileDescriptor> processes_;  // by rank; empty where not watched
  std::optional<int> dead_from_start_;
};

}  // namespace zb
