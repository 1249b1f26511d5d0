// Ranks of other hosts that answer, and that do not.
#include "comm/peer_hosts.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include "comm/file_descriptor.h"

namespace zb {
namespace {

using namespace std::chrono_literals;

struct Listener {
  shm::FileDescriptor socket{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  PeerHost host{"here", "127.0.0.1", 0};

  Listener() {
    sockaddr_in place{};
    place.sin_family = AF_INET;
    place.sin_addr.s_addr = ::htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof place;
    auto* const address = reinterpret_cast<sockaddr*>(&place);
    EXPECT_EQ(::bind(socket.get(), address, size), 0);
    EXPECT_EQ(::listen(socket.get(), 8), 0);
    EXPECT_EQ(::getsockname(socket.get(), address, &size), 0);
    host.port = ::ntohs(place.sin_port);
  }
};

shm::FileDescriptor connected_to(const PeerHost& host) {
  shm::FileDescriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in place{};
  place.sin_family = AF_INET;
  place.sin_addr.s_addr = ::htonl(INADDR_LOOPBACK);
  place.sin_port = ::htons(host.port);
  EXPECT_EQ(::connect(socket.get(), reinterpret_cast<sockaddr*>(&place), sizeof place), 0);
  return socket;
}

std::optional<LostRank> found_by(std::vector<PeerHost> ranks, int own, Listener& listener) {
  return PeerHosts(std::move(ranks), own, std::move(listener.socket)).find_lost_rank(0ms);
}

TEST(PeerHosts, AllThatListenLive) {
  Listener first;
  const Listener second;
  EXPECT_FALSE(found_by({first.host, second.host}, 0, first).has_value());
}

TEST(PeerHosts, ARankThatEndedIsNamedWithItsHost) {
  Listener first;
  PeerHost gone = Listener().host;
  gone.host = "there";
  const auto lost = found_by({first.host, gone}, 0, first);
  ASSERT_TRUE(lost.has_value());
  EXPECT_EQ(lost->rank, 1);
  EXPECT_EQ(lost->text, "rank 1 on host 'there' has ended");
}

TEST(PeerHosts, ARankDoesNotAskItself) {
  Listener closed;
  closed.socket.reset();
  const Listener second;
  EXPECT_FALSE(found_by({closed.host, second.host}, 0, closed).has_value());
}

TEST(PeerHosts, NobodyIsLostWhereNoHostsAreKnown) {
  Listener listener;
  EXPECT_FALSE(found_by({}, 0, listener).has_value());
}

TEST(PeerHosts, ASurvivorThatEndedFirstIsNotNamedButTheRankThatItLost) {
  Listener survivor;
  Listener slow;
  const std::vector<PeerHost> ranks = {survivor.host, Listener().host, slow.host};
  EXPECT_EQ(found_by(ranks, 0, survivor)->rank, 1);  // and its socket is closed
  EXPECT_EQ(found_by(ranks, 2, slow)->rank, 1);
}

TEST(PeerHosts, ANoticeCountsThoughAllAnswerAgain) {
  Listener teller;
  Listener told;
  Listener third;
  std::vector<PeerHost> ranks = {teller.host, Listener().host, told.host};
  EXPECT_EQ(found_by(ranks, 0, teller)->rank, 1);
  const Listener teller_again;
  ranks = {teller_again.host, third.host, told.host};
  EXPECT_EQ(found_by(ranks, 2, told)->rank, 1);
}

TEST(PeerHosts, ConnectionsWithoutANoticeNameNobody) {
  Listener asking;
  Listener asked;
  const std::vector<PeerHost> ranks = {asking.host, asked.host};
  PeerHosts hosts(ranks, 0, std::move(asking.socket));
  EXPECT_FALSE(hosts.find_lost_rank(0ms).has_value());
  EXPECT_FALSE(hosts.find_lost_rank(0ms).has_value());
  EXPECT_FALSE(found_by(ranks, 1, asked).has_value());
}

TEST(PeerHosts, ARankThatFailedAndFoundNobodyIsNotNamed) {
  Listener failed;
  const Listener silent;  // its kernel answers
  Listener slow;
  const std::vector<PeerHost> ranks = {failed.host, silent.host, slow.host};
  EXPECT_FALSE(found_by(ranks, 0, failed).has_value());  // and its socket is closed
  EXPECT_FALSE(found_by(ranks, 2, slow).has_value());
}

TEST(PeerHosts, ANoticeWhoseBytesComeLateIsRead) {
  Listener own;
  const Listener second;
  const Listener third;
  PeerHosts hosts({own.host, second.host, third.host}, 0, std::move(own.socket));
  const shm::FileDescriptor teller = connected_to(own.host);
  EXPECT_FALSE(hosts.find_lost_rank(0ms).has_value());  // has accepted the connection
  const Notice notice{.from = 2, .lost = 1, .has_ended = 1};
  ASSERT_EQ(::send(teller.get(), &notice, sizeof notice, 0), static_cast<ssize_t>(sizeof notice));
  EXPECT_EQ(hosts.find_lost_rank(0ms)->rank, 1);
}

TEST(PeerHosts, BytesThatAreNoNoticeNameNobody) {
  Listener own;
  const Listener second;
  PeerHosts hosts({own.host, second.host}, 0, std::move(own.socket));
  for (const Notice& notice : {Notice{.magic = 1, .from = 1, .lost = 1}, Notice{.from = 7, .lost = 1},
                               Notice{.from = 1, .lost = 0}, Notice{.from = 1, .lost = 7}}) {
    const shm::FileDescriptor teller = connected_to(own.host);
    ASSERT_GT(::send(teller.get(), &notice, sizeof notice, 0), 0);
  }
  EXPECT_FALSE(hosts.find_lost_rank(0ms).has_value());
}

TEST(PeerHosts, TheFirstNoticeStays) {
  Listener own;
  Listener second;
  const std::vector<PeerHost> ranks = {own.host, second.host, Listener().host};
  PeerHosts hosts(ranks, 0, std::move(own.socket));
  EXPECT_EQ(hosts.find_lost_rank(0ms)->rank, 2);
  second.socket.reset();
  EXPECT_EQ(hosts.find_lost_rank(0ms)->rank, 2);
}

}  // namespace
}  // namespace zb
