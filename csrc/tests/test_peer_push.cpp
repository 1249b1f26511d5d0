// Contributions that are pushed to the ranks that add them: the bits of those that are packed and pulled.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string_view>

#include "sim/sim_pulled_ranks.h"

namespace zb {
namespace {

using namespace test::pulled;

// One rank's contribution in many pieces of odd sizes: of its dtype and of float, some zero, some added to what another
// piece wrote. They lie as gradients do, in memory of the compute lane.
struct Contribution {
  std::vector<std::shared_ptr<std::byte>> memory;
  std::vector<PackItem> items;
  std::vector<float> values;  // of the whole
};

Contribution contribution_of(const Rank& at, const Region& source, std::size_t numel, DType dtype, std::uint32_t seed) {
  Contribution found;
  found.values = rounded(values_of(at.rank, numel, seed), dtype);
  std::mt19937 random(seed * 77 + static_cast<std::uint32_t>(at.rank));
  const auto bring = [&](std::size_t begin, const std::vector<float>& values, DType from, bool accumulate) {
    const std::size_t bytes = values.size() * dtype_bytes(from);
    found.memory.push_back(at.device->allocate_in_compute(bytes, "a gradient"));
    std::byte* const data = found.memory.back().get();
    at.device->put_in(Lane::kCompute, "backward", {test::SimDevice::written(data, from, values.size())},
                      [=] { cpu_kernels().cast(data, from, values.data(), DType::kFloat32, values.size()); });
    found.items.push_back({.destination = source.data() + begin * dtype_bytes(dtype),
                           .destination_dtype = dtype,
                           .source = data,
                           .source_dtype = from,
                           .numel = values.size(),
                           .accumulate = accumulate});
  };
  for (std::size_t begin = 0; begin < numel;) {
    const std::size_t part = std::min<std::size_t>(numel - begin, 1 + random() % (numel / 2 + 1));
    const std::vector<float> values = slice(found.values, begin, part);
    switch (random() % 4) {
      case 0:
        bring(begin, values, DType::kFloat32, false);
        break;
      case 1:
        std::fill_n(found.values.begin() + static_cast<std::ptrdiff_t>(begin), part, 0.0F);
        found.items.push_back(
            {.destination = source.data() + begin * dtype_bytes(dtype), .destination_dtype = dtype, .numel = part});
        break;
      case 2: {
        bring(begin, values, dtype, false);
        bring(begin, values, dtype, true);
        std::vector<float> twice = values;
        for (float& value : twice) value += value;
        twice = rounded(twice, dtype);
        std::copy(twice.begin(), twice.end(), found.values.begin() + static_cast<std::ptrdiff_t>(begin));
        break;
      }
      default:
        bring(begin, values, dtype, false);
    }
    begin += part;
  }
  at.device->wait(at.lane, at.device->mark(Lane::kCompute));
  return found;
}

// Every rank knows what the others bring.
std::vector<float> sum_of(const std::vector<std::vector<float>>& of_ranks, DType dtype) {
  std::vector<float> total = of_ranks[0];
  for (std::size_t rank = 1; rank < of_ranks.size(); ++rank) {
    for (std::size_t i = 0; i < total.size(); ++i) total[i] += of_ranks[rank][i];
  }
  return rounded(total, dtype);
}

class PeerPushes : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Pushed, PeerPushes, testing::Values(2, 3, 5, 8));

// Many in a row over one buffer, nobody waits on the host, and every third is packed and pulled.
TEST_P(PeerPushes, GiveTheBitsOfRankOrder) {
  constexpr std::uint32_t kStepNum = 7;
  const auto ranks = static_cast<std::size_t>(GetParam());
  for (std::uint32_t number = 0; number < test::kSimPolicyNum; ++number) {
    const DType dtype = std::array{DType::kFloat32, DType::kBFloat16, DType::kFloat16}[number % 3];
    const std::size_t numel = std::array<std::size_t, 3>{1, 37, 1500}[number / 3 % 3];
    std::vector<std::vector<std::vector<float>>> brought(kStepNum, std::vector<std::vector<float>>(ranks));
    std::vector<std::vector<std::vector<float>>> sums = brought;
    run_pulled(GetParam(), number, [&](Rank& at) {
      const auto own = static_cast<std::size_t>(at.rank);
      const Region source = at.shared(ranks * numel * dtype_bytes(dtype));
      std::vector<Region> targets;
      for (std::uint32_t step = 0; step < kStepNum; ++step) {
        targets.push_back(at.own(numel * dtype_bytes(dtype)));
        const bool is_pushed = step % 3 != 2;
        Contribution mine = contribution_of(at, source, ranks * numel, dtype, 10 * number + step);
        brought[step][own] = mine.values;
        if (is_pushed) {
          at.comm->push({source, numel, dtype, "unit", mine.items, step % 2 == 0 ? std::size_t{0} : std::size_t{40}});
        } else {
          for (const PackItem& item : mine.items) at.device->pack(at.lane, std::span(&item, 1));
        }
        at.comm->start_reduce_scatter({source, targets.back(), numel, dtype, "unit", is_pushed});
        // As gradients are let go of: behind what reads them.
        at.device->wait(Lane::kCompute, at.device->mark(at.lane));
        mine.memory.clear();
      }
      for (std::uint32_t step = 0; step < kStepNum; ++step) sums[step][own] = at.read(targets[step], numel, dtype);
    });
    for (std::uint32_t step = 0; step < kStepNum; ++step) {
      const std::vector<float> expected = sum_of(brought[step], dtype);
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        EXPECT_EQ(sums[step][rank], slice(expected, rank * numel, numel)) << "step " << step << ", rank " << rank;
      }
    }
    if (HasFailure()) return;
  }
}

// The sum may take the place of this rank's own slice.
TEST_P(PeerPushes, AddInPlace) {
  constexpr std::size_t kNumel = 300;
  const auto ranks = static_cast<std::size_t>(GetParam());
  run_pulled(GetParam(), 1, [&](Rank& at) {
    const Region source = at.shared(ranks * kNumel * 4);
    const Region own = source.at(static_cast<std::size_t>(at.rank) * kNumel * 4);
    const std::vector<float> sums = summed(at.world_size, ranks * kNumel, 5, DType::kFloat32);
    const Region whole = at.own(ranks * kNumel * 4);
    at.write(whole, values_of(at.rank, ranks * kNumel, 5), DType::kFloat32);
    const PackItem item{.destination = source.data(), .source = whole.data(), .numel = ranks * kNumel};
    at.comm->push({source, kNumel, DType::kFloat32, "unit", std::span(&item, 1), 0});
    at.comm->start_reduce_scatter({source, own, kNumel, DType::kFloat32, "unit", true})->wait();
    EXPECT_EQ(at.read(own, kNumel, DType::kFloat32), slice(sums, static_cast<std::size_t>(at.rank) * kNumel, kNumel));
  });
}

// As in a backward: the last parameter's gradient comes first.
TEST_P(PeerPushes, TakePiecesInTheOrderOfABackward) {
  constexpr std::size_t kNumel = 96;
  constexpr DType kType = DType::kFloat32;
  const std::size_t all_numel = static_cast<std::size_t>(GetParam()) * kNumel;
  for (std::uint32_t number = 0; number < test::kSimPolicyNum; ++number) {
    run_pulled(GetParam(), number, [&](Rank& at) {
      const Region source = at.shared(all_numel * 4);
      const Region target = at.own(kNumel * 4);
      const std::size_t first = static_cast<std::size_t>(at.rank) * kNumel;
      const Region gradient = at.own(all_numel * 4);
      at.write(gradient, values_of(at.rank, all_numel, number), kType);
      std::vector<PackItem> items;
      for (std::size_t end = all_numel; end > 0;) {
        const std::size_t begin = end - std::min<std::size_t>(end, 37);
        items.push_back(
            {.destination = source.data() + begin * 4, .source = gradient.data() + begin * 4, .numel = end - begin});
        end = begin;
      }
      at.comm->push({source, kNumel, kType, "unit", items, 0});
      at.comm->start_reduce_scatter({source, target, kNumel, kType, "unit", true})->wait();
      const std::vector<float> all = summed(at.world_size, all_numel, number, kType);
      EXPECT_EQ(at.read(target, kNumel, kType), slice(all, first, kNumel));
    });
    if (HasFailure()) return;
  }
}

// What this rank has for its own shard and would copy, the sum reads where it is; what is packed or added to is put
// into the slice.
TEST_P(PeerPushes, LeavesLargeOwnPiecesWhereTheyAre) {
  constexpr std::size_t kNumel = 96;
  constexpr DType kType = DType::kFloat32;
  const std::size_t all_numel = static_cast<std::size_t>(GetParam()) * kNumel;
  for (std::uint32_t number = 0; number < test::kSimPolicyNum; ++number) {
    run_pulled(GetParam(), number, [&](Rank& at) {
      const Region source = at.shared(all_numel * 4);
      const Region target = at.own(kNumel * 4);
      const std::size_t first = static_cast<std::size_t>(at.rank) * kNumel;
      const std::vector<float> before(kNumel, -1.0F);
      at.write(source.at(first * 4), before, kType);
      at.comm->barrier("written");
      const Region gradient = at.own(all_numel * 4);
      at.write(gradient, values_of(at.rank, all_numel, number), kType);
      std::vector<PackItem> items;
      const auto bring = [&](std::size_t begin, std::size_t end, bool accumulate) {
        items.push_back({.destination = source.data() + begin * 4,
                         .source = gradient.data() + begin * 4,
                         .numel = end - begin,
                         .accumulate = accumulate});
      };
      // Of each slice: 32 that stay, 4 that are packed, 60 of which the last 20 are added to, so that they are copied.
      for (std::size_t slice_begin = 0; slice_begin < all_numel; slice_begin += kNumel) {
        bring(slice_begin + 36, slice_begin + 96, false);
        bring(slice_begin + 32, slice_begin + 36, false);
        bring(slice_begin, slice_begin + 32, false);
        bring(slice_begin + 76, slice_begin + 96, true);
      }
      at.comm->push({source, kNumel, kType, "unit", items, 20 * 4});
      at.comm->start_reduce_scatter({source, target, kNumel, kType, "unit", true})->wait();
      std::vector<float> sums(kNumel, 0.0F);
      for (int rank = 0; rank < at.world_size; ++rank) {
        const std::vector<float> brought = slice(values_of(rank, all_numel, number), first, kNumel);
        for (std::size_t i = 0; i < kNumel; ++i) sums[i] += i < 76 ? brought[i] : 2 * brought[i];
      }
      EXPECT_EQ(at.read(target, kNumel, kType), sums);
      const std::vector<float> own = at.read(source.at(first * 4), kNumel, kType);
      const std::vector<float> mine = slice(values_of(at.rank, all_numel, number), first, kNumel);
      EXPECT_EQ(slice(own, 0, 32), slice(before, 0, 32));
      EXPECT_EQ(slice(own, 32, 44), slice(mine, 32, 44));
    });
    if (HasFailure()) return;
  }
}

// The race detector's own tests: two ranks do what is right, which it has nothing to say of, and then what is wrong.
void expect_found(std::string_view finding, const std::function<void(Rank&, bool is_wrong)>& body) {
  std::vector<std::string> findings;
  const auto run = [&](bool is_wrong) {
    findings.clear();
    run_pulled(2, 0, [&](Rank& at) { body(at, is_wrong); }, [&](const std::string& text) { findings.push_back(text); });
  };
  run(false);
  EXPECT_TRUE(findings.empty());
  run(true);
  ASSERT_FALSE(findings.empty());
  EXPECT_NE(findings[0].find(finding), std::string::npos) << findings[0];
}

// Gradients must stay until the sum has read them.
TEST(PeerPush, LettingGoBeforeTheSumIsFound) {
  expect_found("reads in sum", [](Rank& at, bool is_early) {
    const Region source = at.shared(512);
    const Region target = at.own(256);
    std::shared_ptr<std::byte> gradient = at.device->allocate_in_compute(512, "a gradient");
    const PackItem item{.destination = source.data(), .source = gradient.get(), .numel = 128};
    at.device->wait(at.lane, at.device->mark(Lane::kCompute));
    at.comm->push({source, 64, DType::kFloat32, "unit", std::span(&item, 1), 0});
    const MarkPtr pushed = at.device->mark(at.lane);
    at.comm->start_reduce_scatter({source, target, 64, DType::kFloat32, "unit", true});
    at.device->wait(Lane::kCompute, is_early ? pushed : at.device->mark(at.lane));
    gradient.reset();
    at.device->synchronize();
  });
}

TEST(PeerPush, ItemsMustLieInTheSource) {
  run_pulled(2, 0, [](Rank& at) {
    const Region source = at.shared(512);
    const Region gradient = at.own(516);
    const PackItem item{.destination = source.data(), .source = gradient.data(), .numel = 129};
    EXPECT_THROW(at.comm->push({source, 64, DType::kFloat32, "unit", std::span(&item, 1), 0}), ArgumentError);
    const PackItem other{
        .destination = source.data(), .destination_dtype = DType::kBFloat16, .source = gradient.data(), .numel = 2};
    EXPECT_THROW(at.comm->push({source, 64, DType::kFloat32, "unit", std::span(&other, 1), 0}), ArgumentError);
  });
}

TEST(PeerPush, ADisagreementIsFound) {
  std::array<std::string, 2> errors;
  run_pulled(2, 0, [&](Rank& at) {
    const Region source = at.shared(512);
    const Region target = at.own(256);
    if (at.rank == 0) at.comm->push({source, 64, DType::kFloat32, "unit", {}, 0});
    at.comm->start_reduce_scatter({source, target, 64, DType::kFloat32, "unit", at.rank == 0})->wait();
    try {
      at.comm->barrier("apart");
    } catch (const CommunicationError& error) {
      errors[static_cast<std::size_t>(at.rank)] = error.what();
      at.device->synchronize();
    }
  });
  for (const std::string& error : errors) {
    EXPECT_NE(
        error.find("rank 0 reduce_scatter of 'unit' (256 bytes, float32, pushed), rank 1 reduce_scatter of 'unit' "
                   "(256 bytes, float32)"),
        std::string::npos)
        << error;
  }
}

// Peers may be pushing from the end of the operation before.
TEST(PeerPush, WhoTouchesTheSourceMeanwhileIsFound) {
  expect_found("what peers push", [](Rank& at, bool touches) {
    const Region source = at.shared(512);
    const Region target = at.own(256);
    const PackItem zeros{.destination = source.data(), .numel = 128};
    at.comm->start_reduce_scatter({source, target, 64, DType::kFloat32, "before"})->wait();
    const Region of_peer = source.at(at.rank == 0 ? 256 : 0);
    if (touches) at.device->zero(at.lane, of_peer.data(), 4);
    at.comm->push({source, 64, DType::kFloat32, "unit", std::span(&zeros, 1), 0});
    at.comm->start_reduce_scatter({source, target, 64, DType::kFloat32, "unit", true})->wait();
    at.device->synchronize();
  });
}

}  // namespace
}  // namespace zb
