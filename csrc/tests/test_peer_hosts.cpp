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

TEST(PeerHosts, AllThatListenLive) {
  const Listener first;
  const Listener second;
  EXPECT_FALSE(find_lost_rank({first.host, second.host}, 0, 0ms).has_value());
}

TEST(PeerHosts, ARankThatEndedIsNamedWithItsHost) {
  const Listener first;
  PeerHost gone = Listener().host;
  gone.host = "there";
  const auto lost = find_lost_rank({first.host, gone}, 0, 0ms);
  ASSERT_TRUE(lost.has_value());
  EXPECT_EQ(lost->rank, 1);
  EXPECT_EQ(lost->text, "rank 1 on host 'there' has ended");
}

TEST(PeerHosts, ARankDoesNotAskItself) {
  const Listener second;
  EXPECT_FALSE(find_lost_rank({Listener().host, second.host}, 0, 0ms).has_value());
}

TEST(PeerHosts, NobodyIsLostWhereNoHostsAreKnown) { EXPECT_FALSE(find_lost_rank({}, 0, 0ms).has_value()); }

}  // namespace
}  // namespace zb
