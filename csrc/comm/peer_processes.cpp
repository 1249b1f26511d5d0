#include "comm/peer_processes.h"

#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <string>

namespace zb {

ProcessIdentity ProcessIdentity::own() {
  ProcessIdentity identity;
  std::string host;
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  if (!(file >> host)) {
    std::array<char, 64> name{};
    if (::gethostname(name.data(), name.size() - 1) == 0) host = name.data();
  }
  host.copy(identity.host.data(), identity.host.size() - 1);
  struct stat space{};
  if (::stat("/proc/self/ns/pid", &space) == 0) identity.pid_namespace = space.st_ino;
  identity.pid = ::getpid();
  return identity;
}

PeerProcesses::PeerProcesses(int rank, std::span<const ProcessIdentity> identities) : processes_(identities.size()) {
  const ProcessIdentity& own = identities[static_cast<std::size_t>(rank)];
  for (std::size_t peer = 0; peer < identities.size(); ++peer) {
    const ProcessIdentity& identity = identities[peer];
    const bool is_near = identity.host == own.host && identity.pid_namespace == own.pid_namespace;
    if (!is_near || own.pid_namespace == 0 || identity.pid == own.pid) continue;
    processes_[peer] = shm::FileDescriptor(static_cast<int>(::syscall(SYS_pidfd_open, identity.pid, 0)));
    if (!processes_[peer] && errno == ESRCH && !dead_from_start_) dead_from_start_ = static_cast<int>(peer);
  }
}

std::optional<int> PeerProcesses::dead() const noexcept {
  if (dead_from_start_) return dead_from_start_;
  for (std::size_t peer = 0; peer < processes_.size(); ++peer) {
    pollfd entry{processes_[peer].get(), POLLIN, 0};  // a negative one is ignored
    if (::poll(&entry, 1, 0) > 0) return static_cast<int>(peer);
  }
  return std::nullopt;
}

}  // namespace zb
