// The device that the engine's lanes are tested on: what it runs when, and what it finds.
#include "sim/sim_device.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "engine_support.h"

namespace zb {
namespace {

using test::SimDevice;
using test::SimPolicy;
using test::SimSchedule;

class SimDevices : public testing::Test {
 protected:
  std::shared_ptr<SimDevice> make(const SimSchedule& schedule = {.policy = SimPolicy::kNone}) {
    return std::make_shared<SimDevice>(schedule, std::make_shared<test::Peers>(),
                                       [this](const std::string& finding) { findings_.push_back(finding); });
  }
  bool found(const std::string& text) const {
    return std::any_of(findings_.begin(), findings_.end(),
                       [&](const std::string& finding) { return finding.find(text) != std::string::npos; });
  }

  std::vector<std::string> findings_;
};

TEST_F(SimDevices, RunsLanesAloneAndInOrder) {
  std::vector<int> ran;
  for (std::uint32_t seed = 0; seed < 8; ++seed) {
    const auto device = make({.seed = seed, .policy = SimPolicy::kAllButCompute});
    ran.clear();
    for (const int number : {1, 2}) device->put_in(Lane::kCompute, "a", {}, [&ran, number] { ran.push_back(number); });
    EXPECT_TRUE(ran.empty());
    for (const int number : {3, 4}) device->put_in(Lane::kGather, "b", {}, [&ran, number] { ran.push_back(number); });
    EXPECT_EQ(ran, (std::vector<int>{3, 4}));
    device->synchronize();
    EXPECT_EQ(ran, (std::vector<int>{3, 4, 1, 2}));
  }
}

TEST_F(SimDevices, AMarkHoldsALaneBack) {
  for (std::uint32_t number = 0; number < 4 * test::kSimPolicyNum; ++number) {
    const auto device = make(test::sim_schedule(number));
    const auto memory = device->allocate(sizeof(float), "a float");
    auto* value = reinterpret_cast<float*>(memory.get());
    float seen = 0.0F;
    device->put_in(Lane::kCompute, "write", {{value, sizeof(float), true}}, [value] { *value = 3.0F; });
    device->wait(Lane::kReduce, device->mark(Lane::kCompute));
    device->put_in(Lane::kReduce, "read", {{value, sizeof(float), false}}, [value, &seen] { seen = *value; });
    const MarkPtr read = device->mark(Lane::kReduce);
    device->synchronize(read);
    EXPECT_TRUE(device->has_passed(read));
    EXPECT_EQ(seen, 3.0F);
    device->zero(Lane::kGather, value, sizeof(float));  // the host has seen both
    device->synchronize();
  }
  EXPECT_EQ(findings_, std::vector<std::string>());
}

TEST_F(SimDevices, FindsAccessesThatNothingOrders) {
  const auto device = make();
  const auto memory = device->allocate(64, "some memory");
  device->zero(Lane::kCompute, memory.get(), 32);
  device->zero(Lane::kGather, memory.get() + 32, 32);  // other bytes
  EXPECT_EQ(findings_, std::vector<std::string>());
  device->put_in(Lane::kReduce, "a late reader", {{memory.get() + 16, 8, false}}, [] {});
  EXPECT_TRUE(
      found("the reduce lane reads in a late reader ('some memory'), and nothing orders that behind: the "
            "compute lane writes in zero"));
  device->wait(Lane::kCompute, device->mark(Lane::kGather));
  const std::size_t finding_num = findings_.size();
  device->zero(Lane::kCompute, memory.get() + 40, 8);
  EXPECT_EQ(findings_.size(), finding_num);
  device->zero(Lane::kCompute, memory.get() + 16, 8);  // the reader may not have read yet
  EXPECT_TRUE(found("behind: the reduce lane reads in a late reader"));
  device->synchronize();
}

TEST_F(SimDevices, FindsMemoryThatGoesTooEarly) {
  const auto device = make();
  auto memory = device->allocate(64, "some memory");
  std::byte* const data = memory.get();
  device->zero(Lane::kGather, data, 64);
  memory.reset();
  EXPECT_TRUE(found("the host frees ('some memory'), and nothing orders that behind: the gather lane writes in zero"));
  device->zero(Lane::kGather, data, 64);
  EXPECT_TRUE(found("zero touches memory that is none of the device's"));
  device->synchronize();
  findings_.clear();
  memory = device->allocate(64, "some memory");
  device->zero(Lane::kGather, memory.get(), 64);
  device->synchronize();
  memory.reset();
  EXPECT_EQ(findings_, std::vector<std::string>());
}

TEST_F(SimDevices, GivesMemoryOfTheComputeLaneToItsLaterWork) {
  const auto device = make();
  auto gradient = device->allocate_in_compute(64, "a gradient");
  const auto flat = device->allocate(64, "a flat buffer");
  device->copy(Lane::kCompute, flat.get(), gradient.get(), 64);
  EXPECT_EQ(device->block_num("a gradient"), 1U);
  std::byte* const data = gradient.get();
  gradient.reset();
  EXPECT_EQ(device->block_num("a gradient"), 0U);
  EXPECT_EQ(findings_, std::vector<std::string>());
  device->copy(Lane::kCompute, flat.get(), data, 64);
  EXPECT_TRUE(found("copy touches memory that is none of the device's"));
  auto other = device->allocate_in_compute(64, "a gradient");
  device->put_in(Lane::kReduce, "another lane", {{other.get(), 64, false}}, [] {});
  other.reset();
  EXPECT_TRUE(found("nothing orders that behind: the reduce lane reads in another lane"));
  device->synchronize();
}

// Two ranks whose collectives stand in different orders end by the watchdog, not never.
TEST_F(SimDevices, RanksThatWaitForEachOtherEnd) {
  test::ToyOptions options;
  options.world_size = 2;
  options.timeout = std::chrono::milliseconds(200);
  options.sim_schedule_num = 1;
  const auto errors = test::try_ranks(options, [](test::ToyRank& toy) {
    if (toy.rank() == 0) static_cast<void>(toy.state(FullState::kExpAvg));
    std::string text = "text";
    if (toy.rank() == 1) toy.engine().broadcast(reinterpret_cast<std::byte*>(text.data()), text.size());
    static_cast<void>(toy.train_step());
  });
  for (const std::exception_ptr& error : errors) EXPECT_NE(error, nullptr);
}

}  // namespace
}  // namespace zb
