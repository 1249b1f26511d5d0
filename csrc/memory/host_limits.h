// What this process may still take of the host's memory, asked before anything is mapped: a shortage found later is the
// kernel's out-of-memory killer, not an error.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace zb {

// Where the kernel's files lie (tests name others).
struct HostFiles {
  std::string proc = "/proc";
  std::string cgroup = "/sys/fs/cgroup";
};

struct HostMemory {
  std::size_t available_bytes = 0;
  std::string limited_by;  // "MemAvailable" or the cgroup file whose limit is nearest
};

// MemAvailable, or less where this process's memory cgroup (v1 or v2) or one above it has a limit. Page cache that a
// cgroup would give back counts as free.
HostMemory available_host_memory(const HostFiles& files = {});
inline std::size_t available_host_bytes() { return available_host_memory().available_bytes; }

// RLIMIT_MEMLOCK.
std::size_t lock_limit_bytes();

// What mlock may still lock of it, or everything with CAP_IPC_LOCK. Memory that is registered with CUDA is pinned by
// its driver and does not count.
std::size_t lockable_bytes(const HostFiles& files = {});

// "12.3 GiB", "4.5 MiB" or bytes; "any amount" where there is no limit.
std::string memory_text(std::size_t bytes);

// Throw OutOfMemoryError saying how much is missing and what helps. `what` is what the memory is for.
void require_host_memory(std::size_t bytes, std::string_view what, const HostFiles& files = {});
void require_lockable(std::size_t bytes, std::string_view what, const HostFiles& files = {});

}  // namespace zb
