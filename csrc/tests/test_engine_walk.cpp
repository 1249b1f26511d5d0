// Random walks: whatever happens between steps, on however differently timed ranks, the parameters are those of a plain
// loop. Under the thread sanitizer these look for reads and writes of shared memory that nothing orders.
#include <random>

#include "engine_support.h"
#include "reference.h"

namespace zb {
namespace {

using test::kRoot;
using test::parameters_of;
using test::Reference;
using test::same_on_all;
using test::toy_parameters;
using test::ToyOptions;
using test::ToyRank;
using test::Values;

enum class Event : std::uint8_t { kTrain, kEvaluate, kFailForward, kFailBackward, kGather, kWrite, kReadState };

// What all ranks do between two steps, and which unit each rank leaves out.
struct Plan {
  std::vector<Event> events;
  std::vector<std::size_t> units;
  std::vector<std::size_t> skipped_by_rank;  // 0 for none
};

std::vector<Plan> make_plans(std::uint32_t seed, int world_size, long micro_step_num) {
  std::mt19937 random(seed);
  std::vector<Plan> plans;
  for (long i = 0; i < micro_step_num; ++i) {
    Plan plan;
    for (std::size_t event = random() % 3; event > 0; --event) {
      plan.events.push_back(static_cast<Event>(1 + random() % 6));
    }
    plan.units = {1, 2, 3, 4};
    if (random() % 3 == 0) std::shuffle(plan.units.begin(), plan.units.end(), random);
    for (int rank = 0; rank < world_size; ++rank) {
      plan.skipped_by_rank.push_back(random() % 4 == 0 ? 1 + random() % 4 : 0);
    }
    plans.push_back(plan);
  }
  return plans;
}

class Walker {
 public:
  Walker(ToyRank& toy, std::uint32_t seed) : toy_(toy), random_(seed * 101 + static_cast<std::uint32_t>(toy.rank())) {}

  void micro_step(const Plan& plan, bool first_of_window, bool last) {
    for (const Event event : plan.events) {
      linger();
      // What drops gradients, or changes parameters under them, comes before the first of a window.
      if (first_of_window || event == Event::kEvaluate) happen(event, plan);
    }
    std::vector<std::size_t> units;
    for (const std::size_t unit : plan.units) {
      if (unit != plan.skipped_by_rank[static_cast<std::size_t>(toy_.rank())]) units.push_back(unit);
    }
    forward(units);
    linger();
    std::reverse(units.begin(), units.end());
    toy_.begin_backward(last);
    backward_of(units, units.size());
    for (const std::size_t parameter : parameters_of(kRoot)) toy_.give_gradient(parameter);
    toy_.engine().end_backward();
    toy_.set_micro_step(toy_.micro_step() + 1);
  }

  void linger() {
    if (random_() % 3 == 0) toy_.linger(std::chrono::microseconds(random_() % 400));
  }

 private:
  void forward(const std::vector<std::size_t>& units) {
    Engine& engine = toy_.engine();
    engine.begin_forward(true);
    engine.pre_forward(kRoot);
    for (const std::size_t unit : units) {
      linger();
      engine.pre_forward(unit);
      if (engine.has_frozen(unit) && toy_.sharded() && random_() % 2 == 0) {
        engine.await_inputs(unit);
        awaiting_ = unit;
      }
      toy_.expect_readable(unit);
      engine.post_forward(unit);
    }
    engine.post_forward(kRoot);
    engine.end_forward();
  }

  void backward_of(const std::vector<std::size_t>& units, std::size_t unit_num) {
    for (std::size_t i = 0; i < unit_num; ++i) {
      linger();
      const std::size_t unit = units[i];
      const bool inputs_first = random_() % 2 == 0;
      toy_.engine().pre_backward(unit);
      if (awaiting_ == unit && inputs_first) inputs_done();
      toy_.expect_readable(unit);
      for (const std::size_t parameter : parameters_of(unit)) toy_.give_gradient(parameter);
      if (awaiting_ == unit) inputs_done();
    }
  }

  void inputs_done() {
    toy_.engine().inputs_done(awaiting_);
    awaiting_ = kRoot;
  }

  void happen(Event event, const Plan& plan) {
    const std::size_t some = random_() % 5;
    switch (event) {
      case Event::kEvaluate:
        toy_.forward(plan.units, false);
        break;
      case Event::kFailForward:
        toy_.failing_forward({plan.units.begin(), plan.units.begin() + static_cast<std::ptrdiff_t>(some)});
        break;
      case Event::kFailBackward:
        toy_.forward(plan.units);
        toy_.engine().begin_backward(true);
        backward_of({plan.units.rbegin(), plan.units.rend()}, some);
        toy_.engine().abort_backward();
        break;
      case Event::kGather:
        toy_.engine().gather({1, 3});
        linger();
        toy_.expect_readable(3);
        toy_.engine().end_gather({1, 3}, -1);
        break;
      case Event::kWrite:
        write_the_same();
        break;
      case Event::kReadState:
        static_cast<void>(toy_.state(FullState::kMaster));
        break;
      case Event::kTrain:
        break;
    }
  }

  // Values that change nothing, written all the same.
  void write_the_same() {
    toy_.engine().gather({2});
    linger();
    if (toy_.rank() == 0) {
      for (const std::size_t parameter : parameters_of(2)) {
        for (std::size_t i = 0; i < toy_parameters()[parameter].numel; ++i) {
          toy_.tensor(parameter).set(i, toy_.tensor(parameter).get(i));
        }
      }
    }
    toy_.engine().end_gather({2}, 0);
  }

  ToyRank& toy_;
  std::mt19937 random_;
  std::size_t awaiting_ = kRoot;  // the unit whose inputs' gradients are to come; the root for none
};

using EngineWalk = test::StageTest;

INSTANTIATE_TEST_SUITE_P(Engine, EngineWalk, test::on_cpu(testing::Values(2, 3)), test::stage_test_name);
INSTANTIATE_TEST_SUITE_P(EngineInSim, EngineWalk, test::in_sim(testing::Values(2, 3), test::kFewSimScheduleNum),
                         test::stage_test_name);

TEST_P(EngineWalk, EndsWithTheReference) {
  constexpr long kStepNum = 5;
  ToyOptions options = this->options();
  for (std::uint32_t seed = 0; seed < 12; ++seed) {
    options.accumulation_steps = 1 + seed % 2;
    options.param_dtype = seed % 3 == 2 ? DType::kBFloat16 : DType::kFloat32;
    options.prefetch_bytes = seed % 4 == 3 ? 4096 : SIZE_MAX;
    const std::vector<Plan> plans = make_plans(seed, options.world_size, kStepNum * options.accumulation_steps);
    const auto is_last = [&](std::size_t i) { return (static_cast<long>(i) + 1) % options.accumulation_steps == 0; };
    Reference reference(options.world_size, options.param_dtype);
    for (std::size_t i = 0; i < plans.size(); ++i) {
      reference.backward(static_cast<long>(i), [&](int rank, std::size_t unit) {
        return unit != kRoot && plans[i].skipped_by_rank[static_cast<std::size_t>(rank)] == unit ? 0.0F : 1.0F;
      });
      if (is_last(i)) reference.step();
    }
    const Values master = same_on_all(options, [&](ToyRank& toy) {
      Walker walker(toy, seed);
      for (std::size_t i = 0; i < plans.size(); ++i) {
        walker.micro_step(plans[i], static_cast<long>(i) % options.accumulation_steps == 0, is_last(i));
        if (is_last(i)) {
          walker.linger();
          toy.start_step();
        }
      }
      EXPECT_EQ(toy.engine().steps_applied(), kStepNum);
      return toy.state(FullState::kMaster);
    });
    ASSERT_EQ(master, reference.master) << "seed " << seed;
  }
}

}  // namespace
}  // namespace zb
