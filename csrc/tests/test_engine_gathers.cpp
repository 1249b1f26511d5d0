// Explicit gathers: what is read and written inside of one, and what else may go on meanwhile.
#include <atomic>

#include "common/scope_exit.h"
#include "engine_steps.h"
#include "engine_support.h"
#include "reference.h"

namespace zb {
namespace {

using test::kRoot;
using test::kUnits;
using test::Reference;
using test::same_on_all;
using test::toy_parameters;
using test::ToyOptions;
using test::ToyRank;
using test::Values;

class EngineGathers : public test::StageTest {};

INSTANTIATE_TEST_SUITE_P(Engine, EngineGathers, test::on_cpu(testing::Range(1, 4)), test::stage_test_name);
INSTANTIATE_TEST_SUITE_P(EngineInSim, EngineGathers, test::in_sim(testing::Range(1, 4), 3), test::stage_test_name);

TEST_P(EngineGathers, ValuesWrittenInsideAGatherReachEveryRankAndTheMaster) {
  for (const DType param_dtype : {DType::kFloat32, DType::kBFloat16}) {
    ToyOptions with = options();
    with.param_dtype = param_dtype;
    const int modifier = world_size() - 1;
    Reference reference(world_size(), param_dtype);
    reference.backward(0);
    reference.step();
    const Values rounded = reference.parameters();
    // What a modifier leaves alone keeps its master's bits.
    for (const std::size_t index : {std::size_t{2}, std::size_t{6}, std::size_t{7}}) {
      for (std::size_t i = 0; i < rounded[index].size(); i += 2) reference.master[index][i] = 0.5F;
    }
    const Values changed = reference.parameters();
    reference.backward(1);
    reference.step();
    const Values master = same_on_all(with, [&](ToyRank& toy) {
      toy.train();
      const std::vector<std::size_t> units{1, 3};
      toy.engine().gather(units);
      for (const std::size_t unit : units) toy.expect_readable(unit);
      if (toy.rank() == modifier) {
        for (const std::size_t index : {std::size_t{2}, std::size_t{6}, std::size_t{7}}) {
          for (std::size_t i = 0; i < toy_parameters()[index].numel; i += 2) toy.tensor(index).set(i, 0.5F);
        }
      }
      EXPECT_THROW(toy.step(), StateError);
      toy.engine().end_gather(units, modifier);
      EXPECT_EQ(toy.tensor(2).data == nullptr, toy.sharded());
      EXPECT_EQ(toy.state(FullState::kParameters), changed);
      toy.train();
      return toy.state(FullState::kMaster);
    });
    EXPECT_EQ(master, reference.master);
  }
}

// Masters of whose values only remainders are kept keep their bits, too, however gathers are nested, and a change that
// nobody writes back reaches none.
TEST_P(EngineGathers, MastersWithRemaindersAreThoseOfWholeOnes) {
  ToyOptions with = options();
  with.param_dtype = DType::kBFloat16;
  with.keep_parameter_shards = true;
  const auto body = [&](ToyRank& toy) {
    toy.train();
    toy.engine().gather({1, 3});
    toy.engine().gather({1});
    if (toy.rank() == 0) toy.tensor(2).set(0, 0.5F);
    toy.engine().end_gather({1}, 0);
    if (toy.rank() == world_size() - 1) toy.tensor(2).set(1, 0.25F);
    toy.engine().end_gather({1, 3}, world_size() - 1);
    toy.train();
    toy.engine().gather({2, 3});
    for (const std::size_t index : {std::size_t{4}, std::size_t{6}}) toy.tensor(index).set(0, 3.0F);
    toy.engine().end_gather({2, 3}, -1);
    Values found = toy.state(FullState::kMaster);
    toy.train();
    for (const FullState kind : {FullState::kParameters, FullState::kMaster, FullState::kExpAvgSq}) {
      const Values more = toy.state(kind);
      found.insert(found.end(), more.begin(), more.end());
    }
    return found;
  };
  const Values expected = same_on_all(with, body);
  with.store_param_remainders = true;
  EXPECT_EQ(same_on_all(with, body), expected);
}

TEST_P(EngineGathers, AGatherOnlyReads) {
  const Values master = same_on_all(options(), [&](ToyRank& toy) {
    for (long step = 0; step < 2; ++step) {
      toy.engine().gather({kRoot, 1, 2, 3, 4});
      toy.engine().gather({2});
      for (std::size_t unit = 0; unit <= 4; ++unit) toy.expect_readable(unit);
      toy.engine().end_gather({2}, -1);
      toy.expect_readable(2);  // the outer gather still holds it
      toy.engine().end_gather({kRoot, 1, 2, 3, 4}, -1);
      EXPECT_EQ(toy.tensor(0).data == nullptr, toy.sharded());
      toy.train();
    }
    EXPECT_THROW(toy.engine().end_gather({1}, world_size()), ArgumentError);
    return toy.state(FullState::kMaster);
  });
  EXPECT_EQ(master, test::reference_master(world_size(), 2));
}

TEST_P(EngineGathers, AForwardInsideAGatherUsesWhatIsThere) {
  const Values master = same_on_all(options(), [&](ToyRank& toy) {
    toy.train();
    toy.engine().gather({1, 4});
    toy.forward(kUnits, false);
    toy.expect_readable(1);
    toy.engine().end_gather({1, 4}, -1);
    toy.train();
    return toy.state(FullState::kMaster);
  });
  EXPECT_EQ(master, test::reference_master(world_size(), 2));
}

// Its order names the units that are there, and gathering them anew would undo it.
TEST_P(EngineGathers, AForwardInsideAGatherKeepsWhatWasWritten) {
  same_on_all(options(), [&](ToyRank& toy) {
    toy.train();
    toy.forward(kUnits, false);  // whose order the next one goes by
    toy.engine().gather({1, 4});
    if (toy.rank() == 0) toy.tensor(2).set(0, 0.5F);
    toy.forward(kUnits, false);
    toy.engine().end_gather({1, 4}, 0);
    Values found = toy.state(FullState::kParameters);
    EXPECT_EQ(found[2][0], 0.5F);
    return found;
  });
}

// Such as an assertion of the model's, whose error the caller gets.
TEST_P(EngineGathers, ADeviceThatFailsInsideAGatherDoesNotEndTheProcess) {
  const std::vector<std::size_t> all{kRoot, 1, 2, 3, 4};
  for (std::uint32_t number = 0; number < options().sim_schedule_num; ++number) {
    test::run_in_sim(options(), number, [&](ToyRank& toy) {
      toy.train();
      toy.engine().gather(all);
      toy.sim_device().set_failed(true);
      toy.engine().end_gather(all, -1);
      toy.sim_device().set_failed(false);
      toy.train();
      EXPECT_EQ(toy.state(FullState::kMaster), test::reference_master(world_size(), 2));
    });
  }
}

// Rank 0 ends its forward while the others have not ended theirs, though it turns out to need a unit that nobody
// expected.
class FinalShardGathers : public testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(EngineInSim, FinalShardGathers, testing::Values(2, 3));

TEST_P(FinalShardGathers, NobodyWaitsForPeers) {
  ToyOptions options;
  options.stage = ZeroStage::kZero3;
  options.world_size = GetParam();
  const std::vector<std::size_t> most{1, 2, 4};
  for (std::uint32_t number = 0; number < 2 * test::kSimPolicyNum; ++number) {
    if (test::sim_collectives(number) != test::SimCollectives::kPulled) continue;
    std::atomic<bool> is_through{false};
    std::vector<Values> masters(static_cast<std::size_t>(GetParam()));
    test::run_in_sim(options, number, [&](ToyRank& toy) {
      for (int step = 0; step < 3; ++step) toy.train(most);  // sequences are agreed on by then
      const bool is_first = toy.rank() == 0;
      const ScopeExit through([&] { is_through = is_through || is_first; });
      toy.forward(is_first ? kUnits : most, true, [&] {
        while (!is_first && !is_through) toy.linger(std::chrono::microseconds(100));
      });
      if (is_first) is_through = true;
      toy.backward({4, 2, 1});
      toy.start_step();
      toy.train(most);
      masters[static_cast<std::size_t>(toy.rank())] = toy.state(FullState::kMaster);
    });
    for (const Values& master : masters) EXPECT_EQ(master, masters.front());
  }
}

// What ranks say about an earlier forward may be read in the middle of the running one, by a rank alone, which goes on
// with what the others go on with.
TEST_P(FinalShardGathers, AnEarlierForwardDoesNotChangeTheRunningOne) {
  ToyOptions options;
  options.stage = ZeroStage::kZero3;
  options.world_size = GetParam();
  const std::vector<std::size_t> few{1, 2};
  const std::vector<std::size_t> all{kRoot, 1, 2, 3, 4};
  for (std::uint32_t number = 0; number < 2 * test::kSimPolicyNum; ++number) {
    if (test::sim_collectives(number) != test::SimCollectives::kPulled) continue;
    std::vector<Values> masters(static_cast<std::size_t>(GetParam()));
    test::run_in_sim(options, number, [&](ToyRank& toy) {
      for (int step = 0; step < 3; ++step) toy.train(few);
      toy.forward(kUnits);
      toy.engine().gather(all);
      toy.engine().end_gather(all, 0);  // no shard is final now
      toy.forward(toy.rank() == 0 ? std::vector<std::size_t>{1, 2, 3} : few);
      toy.backward({4, 3, 2, 1});
      toy.start_step();
      toy.train(few);
      masters[static_cast<std::size_t>(toy.rank())] = toy.state(FullState::kMaster);
    });
    for (const Values& master : masters) EXPECT_EQ(master, masters.front());
  }
}

}  // namespace
}  // namespace zb
