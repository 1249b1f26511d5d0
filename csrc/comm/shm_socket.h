// Messages with file descriptors over the sequenced-packet sockets that connect ranks of one host.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "comm/file_descriptor.h"

namespace zb::shm {

// How often a rank that waits looks at its peers and the clock.
inline constexpr std::chrono::milliseconds kSlice{20};

struct Message {
  std::vector<std::byte> bytes;  // empty: the other side closed the connection
  std::vector<FileDescriptor> descriptors;
};

FileDescriptor make_socket();  // not blocking, not yet bound or connected

// `keep_waiting` is called once a slice while the socket is not ready and throws to give up.
void send_message(const FileDescriptor& socket, std::span<const std::byte> message, std::span<const int> descriptors,
                  const std::function<void()>& keep_waiting);
Message receive_message(const FileDescriptor& socket, const std::function<void()>& keep_waiting);

}  // namespace zb::shm
