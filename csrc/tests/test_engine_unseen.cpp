// Units whose modules nobody calls (a forward that calls block.forward(), say): no hook tells that their parameters are
// about to be read, and updates may be under way.
#include "engine_steps.h"
#include "engine_support.h"
#include "reference.h"
#include "sim/sim_late_store.h"

namespace zb {
namespace {

using test::kReversed;
using test::kUnits;
using test::Reference;
using test::run_ranks;
using test::toy_parameters;
using test::ToyOptions;
using test::ToyRank;

constexpr std::size_t kHidden = 2;

class EngineUnseen : public test::StageTest {
 protected:
  // Whose updates are issued when somebody waits for them.
  ToyOptions late() const {
    ToyOptions result = options();
    result.make_store = test::make_late_store;
    return result;
  }
};

// What comes too late is read all the same, which the race detector of lanes would report.
class EngineUnseenLater : public EngineUnseen {};

INSTANTIATE_TEST_SUITE_P(OnCpu, EngineUnseen, test::on_cpu(testing::Range(1, 4)), test::stage_test_name);
INSTANTIATE_TEST_SUITE_P(InSim, EngineUnseen, test::in_sim(testing::Range(1, 4), test::kSimPolicyNum),
                         test::stage_test_name);

INSTANTIATE_TEST_SUITE_P(OnCpu, EngineUnseenLater, test::on_cpu(testing::Range(1, 4)), test::stage_test_name);

void expect_current(ToyRank& toy, const Reference& reference) {
  for (std::size_t index = 0; index < toy_parameters().size(); ++index) {
    if (toy_parameters()[index].unit != kHidden) continue;
    for (std::size_t i = 0; i < toy_parameters()[index].numel; ++i) {
      ASSERT_EQ(toy.tensor(index).get(i), reference.master[index][i]) << toy_parameters()[index].name << " " << i;
    }
  }
}

TEST_P(EngineUnseen, AUnitThatNobodyCallsIsCurrentInEveryForward) {
  run_ranks(late(), [&](ToyRank& toy) {
    if (toy.sharded()) return;  // touching its parameters is an error there
    Reference reference(world_size());
    toy.hide(kHidden);
    for (int step = 0; step < 4; ++step) {
      toy.forward(kUnits, false, [&] { expect_current(toy, reference); });
      toy.forward(kUnits, true, [&] { expect_current(toy, reference); });
      reference.backward(toy.micro_step());
      toy.backward(kReversed);
      toy.start_step();
      reference.step();
    }
    EXPECT_EQ(toy.state(FullState::kMaster), reference.master);
  });
}

TEST_P(EngineUnseenLater, IsAnErrorWhereItsUpdateMayBeUnderWay) {
  run_ranks(late(), [&](ToyRank& toy) {
    if (toy.sharded()) return;
    Reference reference(world_size());
    const auto train = [&] {
      reference.backward(toy.micro_step());
      reference.step();
      toy.train();
    };
    train();
    train();
    toy.hide(kHidden);
    toy.forward(kUnits);
    toy.begin_backward(true);
    toy.unit_backward(4);
    toy.unit_backward(3);
    EXPECT_THROW(toy.unit_backward(kHidden), StateError);
    toy.engine().abort_backward();
    toy.hide(SIZE_MAX);
    train();
    EXPECT_EQ(toy.state(FullState::kMaster), reference.master);
  });
}

}  // namespace
}  // namespace zb
