// The ranges that profilers show: their names, and that each ends. (A SimDevice reports what stays open when it goes,
// in every test that has one.)
#include <algorithm>
#include <string>
#include <vector>

#include "engine_steps.h"
#include "engine_support.h"

namespace zb {
namespace {

using test::kReversed;
using test::kUnits;
using test::RangeLog;
using test::ToyOptions;
using test::ToyRank;
using Names = std::vector<std::string>;

RangeLog& ranges_of(ToyRank& toy) { return dynamic_cast<test::SimDevice&>(toy.engine().device()).ranges(); }

Names listed(const std::string& text) {
  Names names;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(", ", begin), text.size());
    names.push_back(text.substr(begin, end - begin));
    begin = end + 2;
  }
  return names;
}

// A step behind two that have taught the engine its orders.
void expect_names(ZeroStage stage, int world_size, const Names& expected) {
  ToyOptions with;
  with.stage = stage;
  with.world_size = world_size;
  for (std::uint32_t number = 0; number < test::kSimScheduleNum; ++number) {
    test::run_in_sim(with, number, [&](ToyRank& toy) {
      toy.train();
      toy.train();
      ranges_of(toy).keep();
      toy.train();
      EXPECT_EQ(ranges_of(toy).take(), expected);
      EXPECT_FALSE(ranges_of(toy).is_any_open());
    });
  }
}

TEST(EngineRanges, NameAStepOfOneRank) {
  expect_names(ZeroStage::kZero0, 1,
               listed("begin forward, end forward, begin backward, reduce d, reduce c, reduce b, reduce a, "
                      "reduce root, norm, end backward, norm, update"));
}

TEST(EngineRanges, NameAStepOfStage1) {
  Names expected = listed(
      "begin forward, end forward, begin backward, reduce d, reduce c, reduce b, reduce a, reduce root, end backward, "
      "norm");
  for (const std::string& unit : test::toy_units()) {
    for (const std::string& name : {"update " + unit, std::string("publish"), "  publish " + unit}) {
      expected.push_back(name);
    }
  }
  expect_names(ZeroStage::kZero1, 2, expected);
}

// Units are updated and published as forwards use them, however they were registered.
TEST(EngineRanges, UpdatesGoByTheOrderOfForwards) {
  for (const ZeroStage stage : {ZeroStage::kZero1, ZeroStage::kZero2, ZeroStage::kZero3}) {
    ToyOptions with;
    with.stage = stage;
    with.world_size = 2;
    for (std::uint32_t number = 0; number < test::kSimScheduleNum; ++number) {
      test::run_in_sim(with, number, [&](ToyRank& toy) {
        for (int step = 0; step < 3; ++step) toy.train({3, 1, 4, 2});
        ranges_of(toy).keep();
        toy.train({3, 1, 4, 2});
        Names updates;
        for (const std::string& name : ranges_of(toy).take()) {
          if (name.starts_with("update ") || name.starts_with("  publish ")) updates.push_back(name);
        }
        Names expected;
        for (const std::string unit : {"root", "c", "a", "d", "b"}) {
          expected.push_back("update " + unit);
          if (stage != ZeroStage::kZero3) expected.push_back("  publish " + unit);
        }
        EXPECT_EQ(updates, expected);
      });
    }
  }
}

// What a unit's forward computes stands behind its own update and gather, and behind none of a later unit: not even the
// root's, for which a forward waits at its beginning, though backward completes it among the first where it is a
// model's last norm. (Peers gather final shards behind all updates, so there stage 3 is left out.)
TEST(EngineRanges, ForwardsWaitForNothingOfLaterUnits) {
  const auto train = [](ToyRank& toy) {
    toy.forward(kUnits);
    toy.begin_backward(true);
    for (const std::size_t unit : {std::size_t{4}, test::kRoot, std::size_t{3}, std::size_t{2}, std::size_t{1}}) {
      toy.unit_backward(unit);
    }
    toy.end_backward();
    toy.start_step();
  };
  for (const ZeroStage stage : {ZeroStage::kZero1, ZeroStage::kZero2, ZeroStage::kZero3}) {
    for (std::uint32_t number = 0; number < test::kSimScheduleNum; ++number) {
      if (stage == ZeroStage::kZero3 && test::sim_collectives(number) == test::SimCollectives::kPulled) continue;
      ToyOptions with;
      with.stage = stage;
      with.world_size = 2;
      test::run_in_sim(with, number, [&](ToyRank& toy) {
        for (int step = 0; step < 3; ++step) train(toy);
        Engine& engine = toy.engine();
        engine.begin_forward(true);
        for (std::size_t unit = test::kRoot; unit < test::toy_units().size(); ++unit) {
          engine.pre_forward(unit);
          toy.expect_readable(unit);
          for (std::size_t later = unit + 1; later < test::toy_units().size(); ++later) {
            const std::string& name = test::toy_units()[later];
            EXPECT_FALSE(toy.sim_device().is_behind(Lane::kCompute, Lane::kReduce, "update " + name)) << unit;
            if (stage == ZeroStage::kZero3) continue;
            EXPECT_FALSE(toy.sim_device().is_behind(Lane::kCompute, Lane::kGather, "publish " + name)) << unit;
          }
          if (unit != test::kRoot) engine.post_forward(unit);
        }
        engine.post_forward(test::kRoot);
        engine.end_forward();
      });
    }
  }
}

TEST(EngineRanges, NameAStepOfStage3) {
  const Names expected = listed(
      "begin forward, gather root, gather a, gather b, wait for gather root, begin forward root, "
      "wait for gather a, begin forward a, end forward a, "
      "gather c, wait for gather b, begin forward b, end forward b, "
      "gather d, wait for gather c, begin forward c, end forward c, "
      "wait for gather d, begin forward d, end forward d, end forward root, end forward, "
      "begin backward, gather c, begin backward d, reduce d, end backward d, "
      "gather b, gather a, wait for gather c, begin backward c, reduce c, end backward c, "
      "wait for gather b, begin backward b, reduce b, end backward b, "
      "wait for gather a, begin backward a, reduce a, end backward a, reduce root, end backward, "
      "norm, update root, update a, update b, update c, update d");
  expect_names(ZeroStage::kZero3, 2, expected);
}

// A module that runs again inside a backward, and one whose backward is reached twice.
TEST(EngineRanges, OfRecomputationsLieInTheBackward) {
  ToyOptions with;
  with.stage = ZeroStage::kZero3;
  with.world_size = 2;
  test::run_in_sim(with, 0, [&](ToyRank& toy) {
    toy.train();
    toy.forward(kUnits);
    toy.begin_backward(true);
    ranges_of(toy).keep();
    toy.engine().pre_backward(4);
    toy.engine().pre_forward(4);
    toy.engine().post_forward(4);
    toy.unit_backward(4);
    EXPECT_EQ(ranges_of(toy).take(),
              listed("begin backward d, begin forward d, end forward d, reduce d, end backward d"));
    toy.engine().abort_backward();
  });
}

TEST(EngineRanges, EndWithPassesThatAreLeft) {
  for (const ZeroStage stage : {ZeroStage::kZero1, ZeroStage::kZero3}) {
    ToyOptions with;
    with.stage = stage;
    with.world_size = 2;
    test::run_in_sim(with, 0, [&](ToyRank& toy) {
      toy.train();
      toy.failing_forward({1, 2});
      EXPECT_FALSE(ranges_of(toy).is_any_open());
      toy.forward(kUnits);
      toy.begin_backward(true);
      toy.engine().pre_backward(4);
      EXPECT_TRUE(ranges_of(toy).is_any_open());
      toy.engine().abort_backward();
      EXPECT_FALSE(ranges_of(toy).is_any_open());
    });
  }
}

// A fault inside of pushed ranges, which leaves an engine that nobody can call any more.
TEST(EngineRanges, EndWhateverIsThrown) {
  for (const ZeroStage stage : {ZeroStage::kZero1, ZeroStage::kZero3}) {
    for (const bool in_backward : {false, true}) {
      ToyOptions with;
      with.stage = stage;
      with.world_size = 2;
      test::run_in_sim(with, 0, [&](ToyRank& toy) {
        RangeLog& ranges = ranges_of(toy);
        ranges.keep();
        const auto fail = [&] {  // on one rank by its own fault, on the other some time later
          toy.train();
          toy.forward(kUnits);
          if (in_backward) toy.begin_backward(true);
          if (toy.rank() == 1) toy.engine().abort("a fault of the test");
          if (in_backward) {
            for (const std::size_t unit : kReversed) toy.unit_backward(unit);
            toy.engine().end_backward();
          }
          toy.train();
        };
        EXPECT_THROW(fail(), CommunicationError);
        EXPECT_FALSE(ranges.take().empty());
        EXPECT_FALSE(ranges.is_any_pushed());
        toy.close();
        EXPECT_FALSE(ranges.is_any_open());
      });
    }
  }
}

}  // namespace
}  // namespace zb
