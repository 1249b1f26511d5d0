#include "comm/descriptor_mesh.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>

#include "comm/or_abort.h"
#include "comm/shm_socket.h"
#include "comm/text.h"

namespace zb {
namespace {

using shm::FileDescriptor;
using Clock = std::chrono::steady_clock;

// Where a rank listens. The name is the kernel's choice; only who was told the secret is let in.
struct Address {
  sockaddr_un name{};
  socklen_t length = 0;
  std::uint64_t secret = 0;
};

struct Hello {
  std::uint64_t secret = 0;
  std::int64_t rank = -1;
};

}  // namespace

DescriptorMesh::DescriptorMesh(Communicator& control, std::chrono::milliseconds timeout)
    : control_(control), timeout_(timeout), sockets_(static_cast<std::size_t>(control.world_size())) {
  or_abort(control_, [&] { listen_and_connect(); });
}

void DescriptorMesh::listen_and_connect() {
  const FileDescriptor listener = shm::make_socket();
  const sockaddr_un any{.sun_family = AF_UNIX, .sun_path = {}};
  ZB_SYS(::bind(listener.get(), reinterpret_cast<const sockaddr*>(&any), sizeof(any.sun_family)));
  ZB_SYS(::listen(listener.get(), control_.world_size()));
  connect(listener);
}

void DescriptorMesh::connect(const FileDescriptor& listener) {
  const int rank = control_.rank();
  const int world_size = control_.world_size();
  Address mine;
  mine.length = sizeof(mine.name);
  ZB_SYS(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&mine.name), &mine.length));
  std::random_device random;
  mine.secret = std::uint64_t{random()} << 32U | random();
  std::vector<Address> addresses(static_cast<std::size_t>(world_size));
  control_.exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(addresses)), "descriptors");

  Patience patience{Clock::now() + timeout_};
  for (int peer = 0; peer < rank; ++peer) {
    const Address& address = addresses[static_cast<std::size_t>(peer)];
    FileDescriptor& socket = sockets_[static_cast<std::size_t>(peer)];
    socket = shm::make_socket();
    while (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address.name), address.length) != 0) {
      if (errno != EAGAIN && errno != EINTR) {
        throw CommunicationError(rank_text(rank) + " cannot reach " + rank_text(peer) +
                                     " over a Unix socket; start all ranks in one network namespace",
                                 peer);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      keep_waiting(patience, peer);
    }
    const Hello hello{address.secret, rank};
    shm::send_message(socket, std::as_bytes(std::span(&hello, 1)), {}, [&] { keep_waiting(patience, peer); });
  }
  for (int missing = world_size - 1 - rank; missing > 0;) {
    FileDescriptor socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) throw IoError(errno, "accept of a rank's socket");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      keep_waiting(patience, -1);
      continue;
    }
    const shm::Message message = shm::receive_message(socket, [&] { keep_waiting(patience, -1); });
    Hello hello;
    if (message.bytes.size() != sizeof(hello)) continue;
    std::memcpy(&hello, message.bytes.data(), sizeof(hello));
    if (hello.secret != mine.secret || hello.rank <= rank || hello.rank >= world_size) continue;
    sockets_[static_cast<std::size_t>(hello.rank)] = std::move(socket);
    --missing;
  }
}

void DescriptorMesh::check_control() const {
  if (const auto cause = control_.poisoned()) throw CommunicationError(*cause);
}

void DescriptorMesh::keep_waiting(Patience& patience, int peer) const {
  patience.signals.look();
  check_control();
  if (Clock::now() < patience.deadline) return;
  throw CommunicationError(rank_text(control_.rank()) + " waited " + seconds_text(timeout_) + " for " +
                               (peer < 0 ? "its peers" : rank_text(peer)) + " to pass a file descriptor",
                           peer);
}

std::vector<FileDescriptor> DescriptorMesh::exchange(const FileDescriptor& mine, std::uint64_t number) {
  return or_abort(control_, [&] { return pass(mine, number); });
}

std::vector<FileDescriptor> DescriptorMesh::pass(const FileDescriptor& mine, std::uint64_t number) {
  Patience patience{Clock::now() + timeout_};
  const int rank = control_.rank();
  const int own_number = mine.get();
  for (int peer = 0; peer < control_.world_size(); ++peer) {
    if (peer == rank) continue;
    shm::send_message(sockets_[static_cast<std::size_t>(peer)], std::as_bytes(std::span(&number, 1)), {&own_number, 1},
                      [&] { keep_waiting(patience, peer); });
  }
  std::vector<FileDescriptor> all(sockets_.size());
  for (int peer = 0; peer < control_.world_size(); ++peer) {
    if (peer == rank) continue;
    const auto index = static_cast<std::size_t>(peer);
    shm::Message message = shm::receive_message(sockets_[index], [&] { keep_waiting(patience, peer); });
    std::uint64_t theirs = 0;
    if (message.bytes.empty()) {
      check_control();
      throw CommunicationError(
          rank_text(peer) + " died or left while ranks passed file descriptors (noticed by " + rank_text(rank) + ")",
          peer);
    }
    std::memcpy(&theirs, message.bytes.data(), std::min(message.bytes.size(), sizeof(theirs)));
    if (theirs != number || message.descriptors.size() != 1) {
      throw CommunicationError(rank_text(peer) + " passed the file descriptor of another allocation", peer);
    }
    all[index] = std::move(message.descriptors[0]);
  }
  return all;
}

}  // namespace zb
