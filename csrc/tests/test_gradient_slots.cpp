#include "zero/gradient_slots.h"

#include <gtest/gtest.h>

#include "comm/shm_communicator.h"
#include "kernels/cpu_device.h"

namespace zb {
namespace {

// Three units of a size share two slots. One that comes early does not take the slot of the unit before it, which is
// reduced first, on all ranks from the same slot.
TEST(GradientSlots, AnEarlyUnitLeavesTheSlotToTheOneBeforeIt) {
  std::vector<Parameter> parameters;
  std::vector<ParameterSpec> specs;
  for (std::size_t unit = 1; unit <= 3; ++unit) specs.push_back({.name = "p", .numel = 100, .unit = unit});
  std::vector<Unit> units = make_units({"root", "a", "b", "c"}, 0, specs, 1, parameters);
  const std::vector<std::size_t> order{3, 2, 1};
  const auto device = make_cpu_device();
  const auto communicator = make_shm_communicator({.rank = 0, .world_size = 1, .rendezvous = "gradient-slots"});
  CommunicationClock clock;
  GradientSlots slots(*device, *communicator, nullptr, units, clock);
  slots.reserve(order, 1);
  slots.assign(order);
  for (const bool has_begun : {false, true}) {
    if (has_begun) units[3].set_gradient_state(GradientState::kAccumulating);
    EXPECT_FALSE(slots.try_take(1));
    slots.take_or_spare(1, [] {});
    EXPECT_FALSE(units[1].gradient_slot);
    EXPECT_NE(units[1].spare, nullptr);
  }
  EXPECT_TRUE(slots.try_take(3));
  EXPECT_TRUE(slots.try_take(2));
  const std::byte* const place = units[3].gradient_slot.region().data();
  units[3].set_gradient_state(GradientState::kReducing);
  EXPECT_FALSE(slots.try_take(1));  // it is still read there
  units[3].gradient_slot.reset();
  EXPECT_TRUE(slots.try_take(1));
  EXPECT_EQ(units[1].gradient_slot.region().data(), place);
  for (Unit& unit : units) unit.gradient_slot.reset();
}

}  // namespace
}  // namespace zb
