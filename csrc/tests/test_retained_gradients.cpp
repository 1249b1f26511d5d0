// How long gradients are retained that the lane of reductions reads.
#include "zero/retained_gradients.h"

#include <gtest/gtest.h>

#include <climits>
#include <memory>

#include "sim/sim_device.h"

namespace zb {
namespace {

// What the lane of reductions waits for; comes when it is told to, or when the host has waited for long.
class LatePeer final : public test::Peers {
 public:
  void idle() override { has_come_ = has_come_ || ++idle_num_ >= patience_; }
  void come() { has_come_ = true; }
  bool has_come() const { return has_come_; }
  void come_after(int idle_num) { patience_ = idle_num; }

 private:
  int idle_num_ = 0;
  int patience_ = INT_MAX;
  bool has_come_ = false;
};

class RetainedGradientsInLanes : public testing::Test {
 protected:
  RetainedGradientsInLanes() {
    device_->put_in_polled(Lane::kReduce, "a meeting", {}, [this] { return peer_->has_come(); });
  }
  ~RetainedGradientsInLanes() override {
    peer_->come();
    retained_.release();
    EXPECT_EQ(retained_num(), 0U);
    device_->synchronize();
  }
  // A unit's gradient, which the lane of reductions reads.
  void add_unit() {
    retained_.make_room();
    const auto gradient = device_->allocate_in_compute(sizeof(float), "a gradient");
    device_->wait(Lane::kReduce, device_->mark(Lane::kCompute));
    device_->put_in(Lane::kReduce, "pack", {{gradient.get(), sizeof(float), false}}, [] {});
    retained_.retain({{.data = gradient.get(), .owner = gradient}}, Lane::kReduce);
  }
  std::size_t retained_num() { return device_->block_num("a gradient"); }

  bool gathers_meet_ = false;
  std::shared_ptr<LatePeer> peer_ = std::make_shared<LatePeer>();
  std::shared_ptr<test::SimDevice> device_ = std::make_shared<test::SimDevice>(test::SimSchedule{}, peer_);
  RetainedGradients retained_{*device_, [this] { return gathers_meet_; }, [] { return false; }};
};

TEST_F(RetainedGradientsInLanes, TheComputeLaneWaitsWhereNoGatherMeetsPeers) {
  for (int unit = 0; unit < 5; ++unit) {
    add_unit();
    EXPECT_LE(retained_num(), 2U);
  }
  EXPECT_FALSE(peer_->has_come());
}

TEST_F(RetainedGradientsInLanes, TheHostWaitsForABusyDeviceWhereGathersMeetPeers) {
  gathers_meet_ = true;
  peer_->come_after(5);
  device_->put_in_polled(Lane::kCompute, "a long kernel", {}, [this] { return peer_->has_come(); });
  add_unit();
  add_unit();
  EXPECT_FALSE(peer_->has_come());
  add_unit();
  EXPECT_TRUE(peer_->has_come());
  EXPECT_LE(retained_num(), 2U);
}

// The peer may wait for this rank to take part in a gather.
TEST_F(RetainedGradientsInLanes, TheHostGivesUpWhenItsComputeLaneIsIdle) {
  gathers_meet_ = true;
  for (int unit = 0; unit < 4; ++unit) add_unit();
  EXPECT_FALSE(peer_->has_come());
  EXPECT_EQ(retained_num(), 4U);
}

}  // namespace
}  // namespace zb
