#include "comm/shm_rendezvous.h"

#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <span>
#include <string>
#include <thread>
#include <type_traits>

#include "comm/shm_socket.h"
#include "comm/text.h"
#include "common/interrupts.h"
#include "common/page.h"

namespace zb::shm {
namespace {

constexpr std::uint64_t kMagic = 0x7a65726f62656e63;  // "zerobenc"
// After a mismatch rank 0 still answers ranks that are about to connect, for so long.
constexpr std::chrono::milliseconds kMismatchGrace{1000};

struct Hello {
  std::uint64_t magic = kMagic;
  std::uint32_t version = kProtocolVersion;
  std::uint32_t control_rank_bytes = sizeof(RankBlock);
  std::int32_t rank = 0;
  std::int32_t world_size = 0;
  cpu_set_t cpus{};
};

struct Reply {
  std::uint64_t magic = kMagic;
  std::int32_t cpu_num = 0;
  std::int32_t fault_rank = -1;
  std::array<char, 512> error{};  // empty when all is well
};

template <class T>
std::span<const std::byte> bytes_of(const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  return std::as_bytes(std::span(&value, 1));
}

struct Address {
  sockaddr_un name{};
  socklen_t length = 0;
};

// The abstract name keeps as much of the text as fits and a hash of all of it; users cannot meet by accident.
Address address_of(const std::string& rendezvous) {
  std::uint64_t hash = 14695981039346656037U;  // FNV-1a
  for (const char c : rendezvous) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211U;
  Address address;
  address.name.sun_family = AF_UNIX;
  std::string text = "zerobench-" + std::to_string(::geteuid()) + "-" + std::to_string(hash) + "-" + rendezvous;
  text.resize(std::min(text.size(), sizeof(address.name.sun_path) - 1));
  std::memcpy(address.name.sun_path + 1, text.data(), text.size());
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  return address;
}

FileDescriptor open_process(pid_t pid) {
  const auto number = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));  // always close-on-exec
  if (number < 0) throw IoError(errno, "pidfd_open (the shm communicator needs Linux 5.3 or newer; use gloo instead)");
  return FileDescriptor(number);
}

cpu_set_t own_cpus() {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  ::sched_getaffinity(0, sizeof(cpus), &cpus);  // a machine with more CPUs than fit leaves it empty: then nobody spins
  return cpus;
}

bool same_user(const FileDescriptor& socket) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  return ::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == ::geteuid();
}

// Rank 0's side: takes the hello of every rank, then answers all of them.
class Host {
 public:
  explicit Host(const ShmOptions& options)
      : options_(options),
        deadline_(Clock::now() + options.timeout),
        peers_(static_cast<std::size_t>(options.world_size)),
        largest_world_size_(options.world_size) {
    cpus_ = own_cpus();
  }

  Connection run() {
    try {
      meet();
    } catch (const Interrupted& interrupt) {
      fail(0, std::string("rank 0 was ") + interrupt.what() + " while ranks connected");
      listener_.reset();
      refuse();
      throw;
    }
    listener_.reset();  // before any rank is answered, so that the name is free for the next communicator
    return answer();
  }

 private:
  struct Peer {
    FileDescriptor socket;
    FileDescriptor process;
  };

  void meet() {
    listen();
    while (!all_here()) {
      if (Clock::now() >= deadline_) {
        if (error_.empty())
          fail(first_missing(),
               "after " + seconds_text(options_.timeout) + " rank(s) " + missing() + " had not connected to rank 0");
        break;
      }
      poll_once();
      signals_.look();
    }
  }

  void listen() {
    const Address address = address_of(options_.rendezvous);
    listener_ = make_socket();
    while (::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address.name), address.length) != 0) {
      if (errno != EADDRINUSE) throw IoError(errno, "bind of the rendezvous socket");
      if (Clock::now() >= deadline_) {
        throw CommunicationError(
            "the rendezvous '" + options_.rendezvous + "' is in use by another run; give each run a name of its own",
            0);
      }
      std::this_thread::sleep_for(kSlice);
      signals_.look();
    }
    ZB_SYS(::listen(listener_.get(), options_.world_size));
  }

  bool all_here() const {
    if (!error_.empty()) return heard_num_ + 1 >= largest_world_size_;
    return heard_num_ + 1 >= options_.world_size;
  }

  void poll_once() {
    std::vector<pollfd> entries{{listener_.get(), POLLIN, 0}};
    for (const FileDescriptor& socket : strangers_) entries.push_back({socket.get(), POLLIN, 0});
    const std::size_t peers_begin = entries.size();
    for (const Peer& peer : peers_) entries.push_back({peer.socket.get(), POLLIN, 0});  // negative ones are ignored
    if (::poll(entries.data(), entries.size(), static_cast<int>(kSlice.count())) <= 0) return;
    for (std::size_t i = peers_begin; i < entries.size(); ++i) {
      if (entries[i].revents == 0) continue;
      const auto rank = static_cast<int>(i - peers_begin);
      peers_[i - peers_begin] = {};
      fail(rank, "rank " + std::to_string(rank) + " died or left while ranks connected");
    }
    for (std::size_t i = peers_begin; i-- > 1;) {
      if (entries[i].revents == 0) continue;
      FileDescriptor socket = std::move(strangers_[i - 1]);
      strangers_.erase(strangers_.begin() + static_cast<std::ptrdiff_t>(i - 1));
      hear(std::move(socket));
    }
    if (entries[0].revents != 0) {
      FileDescriptor socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket && errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
        throw IoError(errno, "accept of a rank's socket (too many open files: raise the limit, ulimit -n)");
      }
      if (socket && same_user(socket)) strangers_.push_back(std::move(socket));
    }
  }

  void hear(FileDescriptor socket) {
    Message message = receive_message(socket, [] {});
    Hello hello;
    if (message.bytes.empty()) return;  // died before it spoke; if it was a rank, it is missing at the deadline
    std::memcpy(&hello, message.bytes.data(), std::min(message.bytes.size(), sizeof(hello)));
    heard_num_ += 1;
    largest_world_size_ = std::max(largest_world_size_, hello.world_size);
    if (check(hello, message)) {
      Peer& peer = peers_[static_cast<std::size_t>(hello.rank)];
      peer.socket = std::move(socket);
      peer.process = std::move(message.descriptors[0]);
      CPU_OR(&cpus_, &cpus_, &hello.cpus);
    } else {
      rejected_.push_back(std::move(socket));
    }
  }

  bool check(const Hello& hello, const Message& message) {
    const std::string who = "rank " + std::to_string(hello.rank);
    if (message.bytes.size() != sizeof(Hello) || hello.magic != kMagic || hello.version != kProtocolVersion ||
        hello.control_rank_bytes != sizeof(RankBlock) || message.descriptors.size() != 1) {
      fail(hello.rank, "a rank runs another build of zerobench than rank 0; install one version for all ranks");
    } else if (hello.world_size != options_.world_size) {
      fail(hello.rank, who + " was started with world_size " + std::to_string(hello.world_size) + ", rank 0 with " +
                           std::to_string(options_.world_size) + "; start all ranks with the same world_size");
    } else if (hello.rank <= 0 || hello.rank >= options_.world_size) {
      fail(hello.rank, who + " is out of range: with world_size " + std::to_string(options_.world_size) +
                           ", ranks are 0 to " + std::to_string(options_.world_size - 1));
    } else if (peers_[static_cast<std::size_t>(hello.rank)].socket) {
      fail(hello.rank, "two processes were started as " + who + "; give each process its own rank");
    } else {
      return true;
    }
    return false;
  }

  void fail(int rank, const std::string& error) {
    if (!error_.empty()) return;
    error_ = error;
    fault_rank_ = rank;
    deadline_ = std::min(deadline_, Clock::now() + kMismatchGrace);
  }

  int first_missing() const {
    for (int rank = 1; rank < options_.world_size; ++rank) {
      if (!peers_[static_cast<std::size_t>(rank)].socket) return rank;
    }
    return -1;
  }

  std::string missing() const {
    std::string text;
    for (int rank = 1; rank < options_.world_size; ++rank) {
      if (!peers_[static_cast<std::size_t>(rank)].socket) text += (text.empty() ? "" : ", ") + std::to_string(rank);
    }
    return text;
  }

  Connection answer() {
    if (!error_.empty()) {
      refuse();
      throw CommunicationError(error_, fault_rank_);
    }
    Reply reply;
    reply.cpu_num = CPU_COUNT(&cpus_);
    return welcome(reply);
  }

  void refuse() {
    Reply reply;
    reply.fault_rank = fault_rank_;
    error_.copy(reply.error.data(), reply.error.size() - 1);
    for (const FileDescriptor& socket : rejected_) send_message(socket, bytes_of(reply), {}, [] {});
    for (const Peer& peer : peers_) {
      if (peer.socket) send_message(peer.socket, bytes_of(reply), {}, [] {});
    }
  }

  Connection welcome(const Reply& reply) {
    const std::size_t control_bytes = round_up_to_page(ControlBlock::bytes(options_.world_size));
    const FileDescriptor memfd = create_memfd(control_bytes);
    Connection connection;
    connection.control = Mapping::of_file(memfd, control_bytes);
    const int error_number = populate_file(memfd, *connection.control, 0, control_bytes);
    if (error_number != 0) throw_out_of_memory(control_bytes, "the control block of the shm communicator");
    auto* control = new (connection.control->data()) ControlBlock{};
    for (int rank = 0; rank < options_.world_size; ++rank) new (&control->rank(rank)) RankBlock{};
    const FileDescriptor own_process = open_process(::getpid());
    std::vector<int> descriptors{memfd.get(), own_process.get()};
    for (int rank = 1; rank < options_.world_size; ++rank) {
      descriptors.push_back(peers_[static_cast<std::size_t>(rank)].process.get());
    }
    for (int rank = 1; rank < options_.world_size; ++rank) {
      send_message(peers_[static_cast<std::size_t>(rank)].socket, bytes_of(reply), descriptors, [this] {
        if (Clock::now() >= deadline_) throw CommunicationError("ranks stopped answering while they connected", -1);
      });
    }
    connection.cpu_num = reply.cpu_num;
    for (Peer& peer : peers_) {
      connection.sockets.push_back(std::move(peer.socket));
      connection.processes.push_back(std::move(peer.process));
    }
    return connection;
  }

  const ShmOptions& options_;
  Clock::time_point deadline_;
  SignalWatch signals_;
  std::vector<Peer> peers_;
  std::vector<FileDescriptor> strangers_;  // connected, not heard yet
  std::vector<FileDescriptor> rejected_;
  FileDescriptor listener_;
  cpu_set_t cpus_{};
  int heard_num_ = 0;
  int largest_world_size_;  // that a rank was started with
  std::string error_;
  int fault_rank_ = -1;
};

FileDescriptor connect_to_host(const ShmOptions& options, Clock::time_point deadline, SignalWatch& signals) {
  const Address address = address_of(options.rendezvous);
  auto pause = std::chrono::microseconds(500);
  for (;;) {
    FileDescriptor socket = make_socket();
    if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address.name), address.length) == 0) {
      if (same_user(socket)) return socket;
      throw CommunicationError("the rendezvous socket '" + options.rendezvous + "' belongs to another user", 0);
    }
    if (errno != ECONNREFUSED && errno != EAGAIN && errno != EINTR) throw IoError(errno, "connect to rank 0");
    if (Clock::now() >= deadline) {
      throw CommunicationError("rank " + std::to_string(options.rank) + " found no rank 0 at the rendezvous '" +
                                   options.rendezvous + "' within " + seconds_text(options.timeout) +
                                   "; start all ranks on one host with the same rendezvous",
                               0);
    }
    std::this_thread::sleep_for(pause);
    signals.look();
    pause = std::min(pause * 2, std::chrono::microseconds(kSlice));
  }
}

Connection join(const ShmOptions& options) {
  // Rank 0 reports what goes wrong at its own deadline; a little more time here lets its answer arrive.
  const Clock::time_point deadline = Clock::now() + options.timeout;
  SignalWatch signals;
  const auto keep_waiting = [&] {
    signals.look();
    if (Clock::now() < deadline + 2 * kMismatchGrace) return;
    throw CommunicationError("rank 0 did not answer rank " + std::to_string(options.rank) + " within " +
                                 seconds_text(options.timeout) + " while ranks connected",
                             0);
  };
  FileDescriptor socket = connect_to_host(options, deadline, signals);
  Hello hello;
  hello.rank = options.rank;
  hello.world_size = options.world_size;
  hello.cpus = own_cpus();
  const FileDescriptor own_process = open_process(::getpid());
  const int own_number = own_process.get();
  send_message(socket, bytes_of(hello), {&own_number, 1}, keep_waiting);

  Message message = receive_message(socket, keep_waiting);
  Reply reply;
  if (message.bytes.empty()) throw CommunicationError("rank 0 died or left while ranks connected", 0);
  std::memcpy(&reply, message.bytes.data(), std::min(message.bytes.size(), sizeof(reply)));
  if (message.bytes.size() != sizeof(reply) || reply.magic != kMagic) {
    throw CommunicationError("rank 0 runs another build of zerobench; install one version for all ranks", 0);
  }
  if (reply.error[0] != '\0') throw CommunicationError(reply.error.data(), reply.fault_rank);

  Connection connection;
  connection.cpu_num = reply.cpu_num;
  connection.control =
      Mapping::of_file(message.descriptors.at(0), round_up_to_page(ControlBlock::bytes(options.world_size)));
  for (int rank = 0; rank < options.world_size; ++rank) {
    FileDescriptor& process = message.descriptors.at(static_cast<std::size_t>(rank) + 1);
    connection.processes.push_back(rank == options.rank ? FileDescriptor() : std::move(process));
  }
  connection.sockets.push_back(std::move(socket));
  return connection;
}

}  // namespace

Connection connect_ranks(const ShmOptions& options) { return options.rank == 0 ? Host(options).run() : join(options); }

}  // namespace zb::shm
