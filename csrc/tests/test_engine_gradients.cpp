// Gradients between a window's last backward and its step, on the CPU and in schedules of the simulator.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <ranges>
#include <vector>

#include "common/error.h"
#include "engine_support.h"
#include "kernels/device_buffer.h"
#include "reference.h"

namespace zb {
namespace {

using test::toy_parameters;
using test::ToyOptions;
using test::ToyRank;
using test::Values;

const std::vector<std::size_t> kUnits{1, 2, 3, 4};
const std::vector<std::size_t> kReversed{4, 3, 2, 1};

class EngineGradients : public test::StageTest {};
INSTANTIATE_TEST_SUITE_P(Engine, EngineGradients, test::on_cpu(testing::Range(1, 4)), test::stage_test_name);
INSTANTIATE_TEST_SUITE_P(EngineInSim, EngineGradients, test::in_sim(testing::Range(1, 4), test::kFewSimScheduleNum),
                         test::stage_test_name);

TEST_P(EngineGradients, DroppedGradientsLeaveNoTrace) {
  const Values expected = test::reference_master(world_size(), 2);
  test::run_ranks(options(), [&](ToyRank& toy) {
    toy.engine().drop_gradients();  // nothing where there are none
    for (long step = 0; step < 2; ++step) {
      toy.set_micro_step(7);
      toy.forward(kUnits);
      toy.backward(kReversed);
      toy.engine().drop_gradients();
      EXPECT_EQ(toy.engine().window_backwards(), 0);
      toy.set_micro_step(step);
      toy.train();
    }
    EXPECT_EQ(toy.state(FullState::kMaster), expected);
  });
}

// Trains windows of two micro-batches, of at most `most`.
Values masters_of_windows(ToyOptions with, long most) {
  with.accumulation_steps = most;
  return test::same_on_all(with, [&](ToyRank& toy) {
    for (int step = 0; step < 3; ++step) {
      for (int micro = 0; micro < 2; ++micro) {
        toy.forward(kUnits);
        toy.backward(kReversed, micro + 1 == most);
      }
      if (most > 2) {
        EXPECT_THROW(toy.engine().step(test::toy_groups()), StateError);
        toy.engine().end_window();
        toy.engine().end_window();  // nothing where it has ended
      }
      toy.start_step();
    }
    return toy.state(FullState::kMaster);
  });
}

TEST_P(EngineGradients, AShortWindowTrainsWhatOneOfItsLengthTrains) {
  EXPECT_EQ(masters_of_windows(options(), 5), masters_of_windows(options(), 2));
}

TEST_P(EngineGradients, TheNormBeforeAStepIsTheSteps) {
  test::run_ranks(options(), [&](ToyRank& toy) {
    for (int step = 0; step < 3; ++step) {
      toy.forward(kUnits);
      toy.backward(kReversed);
      double norm = toy.engine().gradient_norm();
      if (step == 1) {
        EXPECT_EQ(toy.engine().clip_gradients(2.0 * norm + 1.0), norm);
        EXPECT_EQ(toy.engine().gradient_norm(), norm);
      } else if (step == 2) {
        EXPECT_EQ(toy.engine().clip_gradients(0.25 * norm), norm);
        EXPECT_NEAR(toy.engine().gradient_norm(), 0.25 * norm, 1e-5 * norm);
        norm = toy.engine().gradient_norm();
      }
      EXPECT_EQ(toy.step().grad_norm, norm);
    }
  });
}

TEST_P(EngineGradients, AreRefusedWithoutAWholeWindow) {
  ToyOptions with = options();
  with.accumulation_steps = 2;
  test::run_ranks(with, [&](ToyRank& toy) {
    EXPECT_THROW(static_cast<void>(toy.engine().gradient_norm()), StateError);
    toy.forward(kUnits);
    toy.backward(kReversed, false);
    EXPECT_THROW(static_cast<void>(toy.engine().gradient_norm()), StateError);
    EXPECT_THROW(toy.engine().read_gradients([](std::size_t, float*) {}), StateError);
    toy.forward(kUnits);
    EXPECT_THROW(toy.engine().clip_gradients(0.0), ArgumentError);
    toy.backward(kReversed);
    static_cast<void>(toy.engine().gradient_norm());
    toy.start_step();
  });
}

// Copies of the window's sums, in device memory.
class KeptSums {
 public:
  explicit KeptSums(ToyRank& toy) : toy_(toy), of_(toy_parameters().size()) {
    Device& device = toy_.engine().device();
    toy_.engine().read_gradients([&](std::size_t index, float* sums) {
      const std::size_t bytes = toy_parameters()[index].numel * sizeof(float);
      of_[index] = std::make_unique<DeviceBuffer>(device, bytes, nullptr, Category::kStaging);
      device.copy(Lane::kCompute, of_[index]->data(), sums, bytes);
    });
  }

  // What writes them back, but for `zeroed`, and leaves `held` alone.
  GradientChange written_back(int source_rank, std::size_t zeroed, std::vector<std::size_t> held) {
    Device& device = toy_.engine().device();
    return {.source_rank = source_rank,
            .fill =
                [this, &device, zeroed, held](std::size_t index, float* values) {
                  if (index == zeroed || std::ranges::count(held, index) > 0) return;
                  const std::size_t bytes = toy_parameters()[index].numel * sizeof(float);
                  device.copy(Lane::kCompute, values, of_[index]->data(), bytes);
                },
            .merge =
                [&device](const float* values, void* sums, DType dtype, std::size_t numel) {
                  device.cast(Lane::kCompute, sums, dtype, values, DType::kFloat32, numel);
                },
            .held = held};
  }

 private:
  ToyRank& toy_;
  std::vector<std::unique_ptr<DeviceBuffer>> of_;
};

std::size_t trainable(std::size_t number) {
  for (std::size_t index = 0;; ++index) {
    if (toy_parameters()[index].trainable && number-- == 0) return index;
  }
}

TEST_P(EngineGradients, WrittenBackUnchangedTrainTheReference) {
  const Values expected = test::reference_master(world_size(), 2);
  for (const int source_rank : {-1, world_size() - 1}) {
    test::run_ranks(options(), [&](ToyRank& toy) {
      for (int step = 0; step < 2; ++step) {
        toy.forward(kUnits);
        toy.backward(kReversed);
        const double norm = toy.engine().gradient_norm();
        KeptSums sums(toy);
        toy.engine().write_gradients(sums.written_back(source_rank, SIZE_MAX, {}));
        EXPECT_EQ(toy.step().grad_norm, norm);
      }
      EXPECT_EQ(toy.state(FullState::kMaster), expected);
    });
    if (HasFailure()) return;
  }
}

// Held in steps 1 and 2 of 4: it stays as it was, and its third step is the reference's first two applied.
TEST_P(EngineGradients, AHeldParameterStaysAndCountsItsOwnSteps) {
  const std::size_t held = trainable(2);
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    ToyOptions with = options();
    with.param_dtype = with.reduce_dtype = dtype;
    const Values ended = test::same_on_all(with, [&](ToyRank& toy) {
      const Values first = toy.state(FullState::kMaster);
      Values before;
      for (int step = 0; step < 4; ++step) {
        toy.forward(kUnits);
        toy.backward(kReversed);
        if (step < 2) {
          KeptSums sums(toy);
          toy.engine().write_gradients(sums.written_back(step % toy.engine().world_size(), trainable(0), {held}));
        }
        toy.start_step();
        if (step == 1) before = toy.state(FullState::kMaster);
      }
      EXPECT_EQ(before[held], first[held]);
      EXPECT_NE(before[trainable(1)], first[trainable(1)]);
      EXPECT_EQ(toy.engine().held_steps()[held], 2);
      EXPECT_EQ(toy.engine().held_steps()[trainable(1)], 0);
      return toy.state(FullState::kMaster);
    });
    // The same gradients of steps 2 and 3 alone, from the same values, train this parameter the same.
    Values alone;
    test::run_ranks(with, [&](ToyRank& toy) {
      toy.set_micro_step(2);
      for (int step = 0; step < 2; ++step) toy.train();
      const Values found = toy.state(FullState::kMaster);
      if (toy.rank() == 0) alone = found;
    });
    EXPECT_EQ(ended[held], alone[held]);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace zb
