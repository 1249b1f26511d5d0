#include "zero/slot_pool.h"

#include <gtest/gtest.h>

#include <utility>

#include "comm/shm_communicator.h"
#include "kernels/cpu_device.h"
#include "memory/ledger.h"

namespace zb {
namespace {

constexpr std::size_t kBytes = 4096;

class SlotPools : public testing::Test {
 protected:
  SlotPool pool(BufferRole role) {
    return {*device_, *communicator_, &ledger_, role, Category::kGatherSlots, {Lane::kGather, Lane::kCompute}};
  }
  std::int64_t held_bytes() const { return ledger_.entry(Tier::kDevice, Category::kGatherSlots).current_bytes; }

  Ledger ledger_;
  std::shared_ptr<Device> device_ = make_cpu_device();
  std::unique_ptr<Communicator> communicator_ =
      make_shm_communicator({.rank = 0, .world_size = 1, .rendezvous = "slot-pool"});
};

TEST_F(SlotPools, AUnitFindsItsSlotAgain) {
  SlotPool slots = pool(BufferRole::kPrivate);
  slots.reserve(kBytes, 3);
  EXPECT_EQ(slots.slot_num(kBytes), 3U);
  EXPECT_EQ(slots.slot_num(2 * kBytes), 0U);
  std::byte* first = slots.acquire(kBytes, 2).region().data();
  const SlotLease other = slots.acquire(kBytes, 0);
  EXPECT_EQ(slots.acquire(kBytes, 2).region().data(), first);
  EXPECT_NE(other.region().data(), first);
  EXPECT_EQ(held_bytes(), static_cast<std::int64_t>(3 * kBytes));
}

TEST_F(SlotPools, PrivateSlotsGrowBySparesThatGoAgain) {
  SlotPool slots = pool(BufferRole::kPrivate);
  slots.reserve(kBytes, 2);
  SlotLease first = slots.acquire(kBytes, 0);
  SlotLease second = slots.acquire(kBytes, 0);  // another free one
  EXPECT_EQ(held_bytes(), static_cast<std::int64_t>(2 * kBytes));
  SlotLease spare = slots.acquire(kBytes, 0);
  SlotLease further = slots.acquire(kBytes, 1);
  EXPECT_EQ(held_bytes(), static_cast<std::int64_t>(4 * kBytes));
  EXPECT_NE(spare.region().data(), further.region().data());
  spare.reset();
  EXPECT_EQ(held_bytes(), static_cast<std::int64_t>(3 * kBytes));
  spare = slots.acquire(kBytes, 0);  // takes the place of the spare that went
  further.reset();
  spare.reset();
  EXPECT_EQ(held_bytes(), static_cast<std::int64_t>(2 * kBytes));
  first.reset();
  EXPECT_TRUE(slots.acquire(kBytes, 0));
}

TEST_F(SlotPools, SharedSlotsNeverGrow) {
  SlotPool slots = pool(BufferRole::kShared);
  slots.reserve(kBytes, 2);
  SlotLease first = slots.acquire(kBytes, 1);
  EXPECT_TRUE(first);
  EXPECT_FALSE(slots.acquire(kBytes, 1));  // taken; the other one belongs to other units
  EXPECT_EQ(held_bytes(), static_cast<std::int64_t>(2 * kBytes));
  first.reset();
  EXPECT_TRUE(slots.acquire(kBytes, 1));
}

TEST_F(SlotPools, LeasesMove) {
  SlotPool slots = pool(BufferRole::kShared);
  slots.reserve(kBytes, 1);
  SlotLease empty;
  EXPECT_FALSE(empty);
  empty.reset();
  SlotLease lease = slots.acquire(kBytes, 0);
  SlotLease moved = std::move(lease);
  EXPECT_TRUE(moved);
  EXPECT_FALSE(slots.acquire(kBytes, 0));
  empty = std::move(moved);
  EXPECT_FALSE(slots.acquire(kBytes, 0));
  empty = SlotLease();
  EXPECT_TRUE(slots.acquire(kBytes, 0));
}

TEST_F(SlotPools, ReservingAgainOnlyAdds) {
  SlotPool slots = pool(BufferRole::kShared);
  slots.reserve(kBytes, 2);
  const SlotLease held = slots.acquire(kBytes, 0);
  slots.reserve(kBytes, 1);
  EXPECT_EQ(slots.slot_num(kBytes), 2U);
  slots.reserve(kBytes, 4);
  EXPECT_EQ(slots.slot_num(kBytes), 4U);
  EXPECT_FALSE(slots.acquire(kBytes, 0));
  EXPECT_TRUE(slots.acquire(kBytes, 3));
}

}  // namespace
}  // namespace zb
