#include "comm/peer_hosts.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <thread>

#include "comm/file_descriptor.h"

namespace zb {
namespace {

using shm::FileDescriptor;

constexpr std::chrono::milliseconds kAnswer{1000};  // to a connection
constexpr std::size_t kAtOnce = 64;                 // connections that are tried together

enum class Answer : std::uint8_t { kLives, kRefused, kNone };

struct Attempt {
  FileDescriptor socket;
  Answer answer = Answer::kLives;  // also of a rank that could not be asked
  bool is_under_way = false;
};

Answer answer_of(int error) {
  if (error == 0) return Answer::kLives;
  return error == ECONNREFUSED ? Answer::kRefused : Answer::kNone;
}

Attempt begin_attempt(const PeerHost& peer) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(peer.address.c_str(), std::to_string(peer.port).c_str(), &hints, &found) != 0) return {};
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> place(found, &::freeaddrinfo);
  Attempt attempt;
  attempt.socket = FileDescriptor(::socket(place->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!attempt.socket) return {};
  if (::connect(attempt.socket.get(), place->ai_addr, place->ai_addrlen) == 0) return attempt;
  attempt.is_under_way = errno == EINPROGRESS;
  if (!attempt.is_under_way) attempt.answer = answer_of(errno);
  return attempt;
}

void finish_attempts(std::vector<Attempt>& attempts) {
  const auto deadline = std::chrono::steady_clock::now() + kAnswer;
  const auto is_open = [](const Attempt& attempt) { return attempt.is_under_way; };
  while (std::any_of(attempts.begin(), attempts.end(), is_open)) {
    std::vector<pollfd> polls;
    for (const Attempt& attempt : attempts) polls.push_back({is_open(attempt) ? attempt.socket.get() : -1, POLLOUT, 0});
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0 || ::poll(polls.data(), polls.size(), static_cast<int>(left.count())) == 0) break;
    for (std::size_t i = 0; i < attempts.size(); ++i) {
      if (polls[i].revents == 0) continue;
      int error = 0;
      socklen_t size = sizeof error;
      ::getsockopt(attempts[i].socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
      attempts[i].answer = answer_of(error);
      attempts[i].is_under_way = false;
    }
  }
  for (Attempt& attempt : attempts) {
    if (is_open(attempt)) attempt.answer = Answer::kNone;
  }
}

std::optional<LostRank> look_once(const std::vector<PeerHost>& ranks, int own) {
  for (std::size_t first = 0; first < ranks.size(); first += kAtOnce) {
    std::vector<Attempt> attempts;
    for (std::size_t rank = first; rank < std::min(first + kAtOnce, ranks.size()); ++rank) {
      attempts.push_back(static_cast<int>(rank) == own ? Attempt() : begin_attempt(ranks[rank]));
    }
    finish_attempts(attempts);
    for (std::size_t i = 0; i < attempts.size(); ++i) {
      if (attempts[i].answer == Answer::kLives) continue;
      const std::size_t rank = first + i;
      const char* how = attempts[i].answer == Answer::kRefused ? "' has ended" : "' cannot be reached";
      return LostRank{static_cast<int>(rank), "rank " + std::to_string(rank) + " on host '" + ranks[rank].host + how};
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<LostRank> find_lost_rank(const std::vector<PeerHost>& ranks, int own,
                                       std::chrono::milliseconds patience) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (true) {
    if (auto lost = look_once(ranks, own)) return lost;
    if (std::chrono::steady_clock::now() >= deadline) return std::nullopt;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

}  // namespace zb
