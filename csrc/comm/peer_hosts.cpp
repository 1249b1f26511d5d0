#include "comm/peer_hosts.h"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <thread>
#include <utility>

namespace zb {
namespace {

using shm::FileDescriptor;

constexpr std::chrono::milliseconds kAnswer{1000};  // to a connection
constexpr std::size_t kAtOnce = 64;                 // connections that are tried together
constexpr std::chrono::milliseconds kNoticeTravel{200};

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

void finish_attempts(std::vector<std::pair<int, Attempt>>& attempts) {
  const auto deadline = std::chrono::steady_clock::now() + kAnswer;
  const auto is_open = [](const auto& each) { return each.second.is_under_way; };
  while (std::any_of(attempts.begin(), attempts.end(), is_open)) {
    std::vector<pollfd> polls;
    for (const auto& each : attempts) polls.push_back({is_open(each) ? each.second.socket.get() : -1, POLLOUT, 0});
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0 || ::poll(polls.data(), polls.size(), static_cast<int>(left.count())) == 0) break;
    for (std::size_t i = 0; i < attempts.size(); ++i) {
      if (polls[i].revents == 0) continue;
      Attempt& attempt = attempts[i].second;
      int error = 0;
      socklen_t size = sizeof error;
      ::getsockopt(attempt.socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
      attempt.answer = answer_of(error);
      attempt.is_under_way = false;
    }
  }
  for (auto& [rank, attempt] : attempts) {
    if (attempt.is_under_way) attempt.answer = Answer::kNone;
  }
}

// Tries to connect to kAtOnce ranks from `first` on, all but `own`.
std::vector<std::pair<int, Attempt>> attempts_from(const std::vector<PeerHost>& ranks, std::size_t first, int own) {
  std::vector<std::pair<int, Attempt>> attempts;
  for (std::size_t rank = first; rank < std::min(first + kAtOnce, ranks.size()); ++rank) {
    if (static_cast<int>(rank) != own) attempts.emplace_back(static_cast<int>(rank), begin_attempt(ranks[rank]));
  }
  finish_attempts(attempts);
  return attempts;
}

// What one rank sends to another.
struct Notice {
  std::int32_t rank = -1;
  std::uint32_t has_ended = 0;
};

}  // namespace

PeerHosts::PeerHosts(std::vector<PeerHost> ranks, int own, FileDescriptor listener)
    : ranks_(std::move(ranks)), own_(own), listener_(std::move(listener)) {
  if (listener_) ::fcntl(listener_.get(), F_SETFL, ::fcntl(listener_.get(), F_GETFL) | O_NONBLOCK);
}

std::optional<LostRank> PeerHosts::find_lost_rank(std::chrono::milliseconds patience) {
  const std::lock_guard lock(mutex_);
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (!first_) {
    first_ = read_notice();
    if (first_) break;
    if (auto lost = look_once()) {
      // A rank that ended because of another has told before: what it told may be on its way.
      std::this_thread::sleep_for(kNoticeTravel);
      first_ = read_notice();
      if (!first_) first_ = std::move(lost);
      break;
    }
    if (std::chrono::steady_clock::now() >= deadline) return std::nullopt;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  if (!std::exchange(has_told_, true)) tell(*first_);
  return first_;
}

void PeerHosts::close() {
  const std::lock_guard lock(mutex_);
  listener_.reset();
}

std::optional<LostRank> PeerHosts::read_notice() {
  while (listener_) {
    // Attempts of others to connect wait here too; they bring nothing.
    const FileDescriptor caller(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!caller) return std::nullopt;
    Notice notice;
    if (::recv(caller.get(), &notice, sizeof notice, 0) != static_cast<ssize_t>(sizeof notice)) continue;
    if (notice.rank < 0 || notice.rank >= static_cast<int>(ranks_.size()) || notice.rank == own_) continue;
    return lost_rank(notice.rank, notice.has_ended != 0);
  }
  return std::nullopt;
}

std::optional<LostRank> PeerHosts::look_once() const {
  std::optional<LostRank> found;
  for (std::size_t first = 0; first < ranks_.size() && !found; first += kAtOnce) {
    for (const auto& [rank, attempt] : attempts_from(ranks_, first, own_)) {
      if (attempt.answer == Answer::kLives) continue;
      found = lost_rank(rank, attempt.answer == Answer::kRefused);
      break;
    }
  }
  return found;
}

LostRank PeerHosts::lost_rank(int rank, bool has_ended) const {
  return {.rank = rank,
          .has_ended = has_ended,
          .text = "rank " + std::to_string(rank) + " on host '" + ranks_[static_cast<std::size_t>(rank)].host +
                  (has_ended ? "' has ended" : "' cannot be reached")};
}

void PeerHosts::tell(const LostRank& lost) const {
  const Notice notice{.rank = lost.rank, .has_ended = lost.has_ended ? 1U : 0U};
  for (std::size_t first = 0; first < ranks_.size(); first += kAtOnce) {
    for (const auto& [rank, attempt] : attempts_from(ranks_, first, own_)) {
      if (rank == lost.rank || attempt.answer != Answer::kLives || !attempt.socket) continue;
      ::send(attempt.socket.get(), &notice, sizeof notice, MSG_NOSIGNAL);
    }
  }
}

}  // namespace zb
