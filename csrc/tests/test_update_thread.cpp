#include "stores/update_thread.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <vector>

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
  for (int i = 0; i < 100; ++i) last = thread.queue([&ran, i] { ran.push_back(i); });
  thread.wait(last);
  EXPECT_TRUE(thread.is_done(last));
  ASSERT_EQ(ran.size(), 100U);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(ran[static_cast<std::size_t>(i)], i);
}

TEST_P(UpdateThreads, AnErrorReachesWhoWaitsForItOrForLaterWork) {
  UpdateThread thread(GetParam());
  bool ran_later = false;
  const auto before = thread.queue([] {});
  const auto bad = thread.queue([] { throw std::runtime_error("no more memory"); });
  const auto later = thread.queue([&] { ran_later = true; });
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
      thread.queue([&] {
        std::this_thread::sleep_for(1ms);
        ++ran;
      });
    }
  }
  EXPECT_LT(ran, 50);
}

TEST(UpdateThread, RunsBesideTheCaller) {
  UpdateThread thread(UpdatesRun::kInThread);
  std::atomic<bool> go = false;
  const auto ticket = thread.queue([&] {
    while (!go) std::this_thread::yield();
  });
  EXPECT_FALSE(thread.is_done(ticket));
  go = true;
  thread.wait(ticket);
}

}  // namespace
}  // namespace zb
