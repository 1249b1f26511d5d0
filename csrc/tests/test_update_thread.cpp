#include "stores/update_thread.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "common/error.h"
#include "fork_support.h"

namespace zb {
namespace {

using namespace std::chrono_literals;

class UpdateThreads : public testing::TestWithParam<UpdatesRun> {};

INSTANTIATE_TEST_SUITE_P(Runs, UpdateThreads, testing::Values(UpdatesRun::kInThread, UpdatesRun::kInCaller));

TEST_P(UpdateThreads, RunWorkInOrder) {
  UpdateThread thread(GetParam());
  EXPECT_TRUE(thread.is_done(0));
  thread.wait(0);
  std::vector<int> ran;
  UpdateThread::Ticket last = 0;
  for (int i = 0; i < 100; ++i) last = thread.queue(0, [&ran, i] { ran.push_back(i); });
  thread.wait(last);
  EXPECT_TRUE(thread.is_done(last));
  ASSERT_EQ(ran.size(), 100U);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(ran[static_cast<std::size_t>(i)], i);
}

TEST_P(UpdateThreads, AnErrorReachesWhoWaitsForItOrForLaterWork) {
  UpdateThread thread(GetParam());
  bool ran_later = false;
  const auto before = thread.queue(0, [] {});
  const auto bad = thread.queue(0, [] { throw std::runtime_error("no more memory"); });
  const auto later = thread.queue(0, [&] { ran_later = true; });
  for (int i = 0; i < 2; ++i) {
    for (const auto ticket : {later, bad}) {
      try {
        thread.wait(ticket);
        FAIL() << "no error";
      } catch (const std::runtime_error& error) {
        EXPECT_EQ(std::string(error.what()), "no more memory");
      }
    }
  }
  thread.wait(before);
  EXPECT_TRUE(thread.is_done(later));  // nobody waits for ever
  EXPECT_FALSE(ran_later);
}

TEST_P(UpdateThreads, GoWithWorkThatNobodyWaitedFor) {
  std::atomic<int> ran = 0;
  {
    UpdateThread thread(GetParam());
    for (int i = 0; i < 50; ++i) {
      thread.queue(0, [&] {
        std::this_thread::sleep_for(1ms);
        ++ran;
      });
    }
  }
  EXPECT_LT(ran, 50);
}

// As units become complete in backward, from the last one on, while the next forward begins with the first.
TEST_P(UpdateThreads, RunWhatIsMostUrgentFirst) {
  UpdateThread thread(GetParam());
  std::atomic<bool> go = false;
  std::vector<int> ran;
  std::vector<UpdateThread::Ticket> tickets;
  tickets.push_back(thread.queue(9, [&] {
    while (GetParam() == UpdatesRun::kInThread && !go) std::this_thread::yield();
    ran.push_back(9);
  }));
  if (GetParam() == UpdatesRun::kInCaller) thread.wait(tickets.front());
  // Running by now, or about to: the others wait behind it.
  while (GetParam() == UpdatesRun::kInThread && thread.waiting_num() != 0) std::this_thread::yield();
  for (const int urgency : {8, 3, 5, 3, 0, 7}) {
    tickets.push_back(thread.queue(static_cast<std::size_t>(urgency), [&ran, urgency] { ran.push_back(urgency); }));
  }
  go = true;
  thread.wait(tickets[5]);  // 0
  EXPECT_TRUE(thread.is_done(tickets[0]));
  if (GetParam() == UpdatesRun::kInCaller) {
    EXPECT_FALSE(thread.is_done(tickets[1]));
  }
  for (const auto ticket : tickets) thread.wait(ticket);
  EXPECT_EQ(ran, (std::vector<int>{9, 0, 3, 3, 5, 7, 8}));
}

TEST(UpdateThread, RunsBesideTheCaller) {
  UpdateThread thread(UpdatesRun::kInThread);
  std::atomic<bool> go = false;
  const auto ticket = thread.queue(0, [&] {
    while (!go) std::this_thread::yield();
  });
  EXPECT_FALSE(thread.is_done(ticket));
  go = true;
  thread.wait(ticket);
}

#if !defined(__SANITIZE_THREAD__)
TEST(UpdateThread, AForkedChildLetsGoOfItAndItsParentGoesOn) {
  auto thread = std::make_unique<UpdateThread>(UpdatesRun::kInThread);
  thread->wait(thread->queue(0, [] {}));
  std::this_thread::sleep_for(50ms);  // now it waits for work
  EXPECT_TRUE(test::holds_in_child([&] {
    bool refused = false;
    try {
      thread->queue(0, [] {});
    } catch (const StateError&) {
      refused = true;
    }
    thread.reset();
    return refused;
  }));
  std::atomic<bool> go = false;
  const auto ticket = thread->queue(0, [&] {
    while (!go) std::this_thread::yield();
  });
  thread->queue(0, [] {});
  std::thread waiter([&] { thread->wait(ticket); });
  std::this_thread::sleep_for(50ms);
  EXPECT_TRUE(test::holds_in_child([&] {
    const bool says_so = thread->is_done(ticket) && thread->failure();
    bool refused = false;
    try {
      thread->wait(ticket);
    } catch (const StateError&) {
      refused = true;
    }
    thread.reset();
    return says_so && refused;
  }));
  go = true;
  waiter.join();
  bool ran = false;
  thread->wait(thread->queue(0, [&] { ran = true; }));
  EXPECT_TRUE(ran);
}
#endif

}  // namespace
}  // namespace zb
