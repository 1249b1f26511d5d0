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
constexpr std::chrono::milliseconds kPause{50};  // between attempts while all answer

enum class Answer : std::uint8_t { kLives, kRefused, kNone };

struct Attempt {
  int rank = 0;
  FileDescriptor socket{};
  Answer answer = Answer::kLives;  // also of a rank that could not be asked
  bool is_under_way = false;
};

Answer answer_of(int error) {
  if (error == 0) return Answer::kLives;
  return error == ECONNREFUSED ? Answer::kRefused : Answer::kNone;
}

Attempt begin_attempt(int rank, const PeerHost& peer) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(peer.address.c_str(), std::to_string(peer.port).c_str(), &hints, &found) != 0) {
    return {.rank = rank};
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> place(found, &::freeaddrinfo);
  Attempt attempt{.rank = rank};
  attempt.socket = FileDescriptor(::socket(place->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!attempt.socket) return attempt;
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

// Tries to connect to the ranks for which `asks` is true, and calls `then` with each attempt, until that returns false.
template <typename Asks, typename Then>
void try_ranks(const std::vector<PeerHost>& ranks, const Asks& asks, const Then& then) {
  for (std::size_t first = 0; first < ranks.size(); first += kAtOnce) {
    std::vector<Attempt> attempts;
    for (std::size_t rank = first; rank < std::min(first + kAtOnce, ranks.size()); ++rank) {
      if (asks(static_cast<int>(rank))) attempts.push_back(begin_attempt(static_cast<int>(rank), ranks[rank]));
    }
    finish_attempts(attempts);
    for (const Attempt& attempt : attempts) {
      if (!then(attempt)) return;
    }
  }
}

}  // namespace

PeerHosts::PeerHosts(std::vector<PeerHost> ranks, int own, FileDescriptor listener)
    : ranks_(std::move(ranks)), own_(own), listener_(std::move(listener)), has_failed_(ranks_.size(), false) {
  if (listener_) ::fcntl(listener_.get(), F_SETFL, ::fcntl(listener_.get(), F_GETFL) | O_NONBLOCK);
}

std::optional<LostRank> PeerHosts::find_lost_rank(std::chrono::milliseconds patience) {
  const std::lock_guard lock(mutex_);
  const auto deadline = std::chrono::steady_clock::now() + patience;
  read_notices();
  while (!first_) {
    const std::optional<LostRank> lost = look_once();
    // A rank that ended because of another has told before, and its notice may be on its way.
    std::this_thread::sleep_for(lost ? kNoticeTravel : kPause);
    read_notices();
    if (first_) break;
    if (lost && !has_failed_[static_cast<std::size_t>(lost->rank)]) first_ = lost;
    if (!lost && std::chrono::steady_clock::now() >= deadline) break;
  }
  tell();
  return first_;
}

void PeerHosts::close() {
  const std::lock_guard lock(mutex_);
  listener_.reset();
}

void PeerHosts::read_notices() {
  while (listener_) {
    FileDescriptor caller(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!caller) break;
    incoming_.push_back(std::move(caller));
  }
  std::erase_if(incoming_, [this](const FileDescriptor& caller) {
    Notice notice;
    const ssize_t size = ::recv(caller.get(), &notice, sizeof notice, 0);
    if (size == static_cast<ssize_t>(sizeof notice)) take(notice);
    return size >= 0 || errno != EAGAIN;  // a rank that only asks closes its connection and sends nothing
  });
}

void PeerHosts::take(const Notice& notice) {
  const auto is_other = [this](int rank) {
    return rank >= 0 && rank < static_cast<int>(ranks_.size()) && rank != own_;
  };
  if (notice.magic != Notice::kMagic || !is_other(notice.from)) return;
  has_failed_[static_cast<std::size_t>(notice.from)] = true;
  if (!first_ && is_other(notice.lost)) first_ = lost_rank(notice.lost, notice.has_ended != 0);
}

std::optional<LostRank> PeerHosts::look_once() const {
  std::optional<LostRank> found;
  try_ranks(
      ranks_, [this](int rank) { return rank != own_ && !has_failed_[static_cast<std::size_t>(rank)]; },
      [&](const Attempt& attempt) {
        if (attempt.answer != Answer::kLives) found = lost_rank(attempt.rank, attempt.answer == Answer::kRefused);
        return !found;
      });
  return found;
}

LostRank PeerHosts::lost_rank(int rank, bool has_ended) const {
  return {.rank = rank,
          .has_ended = has_ended,
          .text = "rank " + std::to_string(rank) + " on host '" + ranks_[static_cast<std::size_t>(rank)].host +
                  (has_ended ? "' has ended" : "' cannot be reached")};
}

void PeerHosts::tell() const {
  const Notice notice{.from = own_, .lost = first_ ? first_->rank : -1, .has_ended = first_ && first_->has_ended};
  try_ranks(
      ranks_, [&](int rank) { return rank != own_ && rank != notice.lost; },
      [&](const Attempt& attempt) {
        if (attempt.socket && attempt.answer == Answer::kLives) {
          ::send(attempt.socket.get(), &notice, sizeof notice, MSG_NOSIGNAL);
        }
        return true;
      });
}

}  // namespace zb
