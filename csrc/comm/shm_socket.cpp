#include "comm/shm_socket.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <thread>

#include "common/error.h"

namespace zb::shm {
namespace {

constexpr std::size_t kMessageBytes = 4096;
constexpr std::size_t kMessageDescriptors = 253;  // SCM_MAX_FD

void wait_for(const FileDescriptor& socket, short events, const std::function<void()>& keep_waiting) {
  for (;;) {
    pollfd entry{socket.get(), events, 0};
    const int ready = ::poll(&entry, 1, static_cast<int>(kSlice.count()));
    if (ready > 0) return;
    if (ready < 0 && errno != EINTR) throw IoError(errno, "poll of a rank's socket");
    keep_waiting();
  }
}

struct alignas(cmsghdr) ControlBuffer {
  std::array<char, CMSG_SPACE(sizeof(int) * kMessageDescriptors)> bytes;
};

}  // namespace

FileDescriptor make_socket() {
  return FileDescriptor(ZB_SYS(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)));
}

void send_message(const FileDescriptor& socket, std::span<const std::byte> message, std::span<const int> descriptors,
                  const std::function<void()>& keep_waiting) {
  iovec data{const_cast<std::byte*>(message.data()), message.size()};
  ControlBuffer control{};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  if (!descriptors.empty()) {
    header.msg_control = control.bytes.data();
    header.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
    cmsghdr* part = CMSG_FIRSTHDR(&header);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(descriptors.size_bytes());
    std::memcpy(CMSG_DATA(part), descriptors.data(), descriptors.size_bytes());
  }
  while (::sendmsg(socket.get(), &header, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    switch (errno) {
      case EINTR:
        break;
      case EAGAIN:
        wait_for(socket, POLLOUT, keep_waiting);
        break;
      case ETOOMANYREFS:  // the system's limit of descriptors in flight: receivers make room
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        keep_waiting();
        break;
      case EPIPE:
      case ECONNRESET:
        return;  // the reader is gone; the next receive or wait for it says so
      default:
        throw IoError(errno, "sendmsg to a rank of this host");
    }
  }
}

Message receive_message(const FileDescriptor& socket, const std::function<void()>& keep_waiting) {
  Message message;
  message.bytes.resize(kMessageBytes);
  ControlBuffer control{};
  iovec data{message.bytes.data(), message.bytes.size()};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = control.bytes.data();
  header.msg_controllen = control.bytes.size();
  ssize_t received_bytes = 0;
  while ((received_bytes = ::recvmsg(socket.get(), &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT)) < 0) {
    if (errno == ECONNRESET) return {};
    if (errno == EAGAIN) {
      wait_for(socket, POLLIN, keep_waiting);
    } else if (errno != EINTR) {
      throw IoError(errno, "recvmsg from a rank of this host");
    }
  }
  message.bytes.resize(static_cast<std::size_t>(received_bytes));
  for (cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr; part = CMSG_NXTHDR(&header, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t descriptor_num = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    std::array<int, kMessageDescriptors> numbers{};
    std::memcpy(numbers.data(), CMSG_DATA(part), descriptor_num * sizeof(int));
    for (std::size_t i = 0; i < descriptor_num; ++i) message.descriptors.emplace_back(numbers[i]);
  }
  if ((header.msg_flags & MSG_CTRUNC) != 0) {
    throw IoError(EMFILE, "file descriptors of peers do not fit; raise the limit of open files (ulimit -n)");
  }
  return message;
}

}  // namespace zb::shm
