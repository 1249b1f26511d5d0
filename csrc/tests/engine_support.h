// Ranks of the toy model (toy_rank.h) as threads, on the CPU and in schedules of the simulator.
#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "sim/sim_ranks.h"
#include "toy_rank.h"

namespace zb::test {

// Two rounds of the policies have all of each kind of collectives. Simulated ranks run one at a time, so the thread
// sanitizer has little to find there: one of each kind, and two of each where threads work beside the ranks.
#ifdef __SANITIZE_THREAD__
inline constexpr std::uint32_t kSimScheduleNum = 2;
inline constexpr std::uint32_t kFewSimScheduleNum = 2;
inline constexpr std::uint32_t kOffloadSimScheduleNum = 4;
#else
inline constexpr std::uint32_t kSimScheduleNum = 2 * kSimPolicyNum;
inline constexpr std::uint32_t kFewSimScheduleNum = 4;
inline constexpr std::uint32_t kOffloadSimScheduleNum = kSimPolicyNum;
#endif

using ToyBody = std::function<void(ToyRank&)>;

// Runs the body on threads as ranks; what each threw. The places are by rank.
std::vector<std::exception_ptr> run_threads(const ToyOptions& options, const std::vector<ToyPlace>& places,
                                            const ToyBody& body);

std::vector<ToyPlace> places_on_cpu(const ToyOptions& options);

// What each rank threw, on the CPU or in every schedule.
std::vector<std::exception_ptr> try_ranks(const ToyOptions& options, const ToyBody& body);

void run_in_sim(const ToyOptions& options, std::uint32_t schedule_number, const ToyBody& body);

// Runs the body on the CPU, and in every schedule, where all that is read must be what was read on the CPU.
void run_ranks(const ToyOptions& options, const ToyBody& body);

// Every rank's result, which must be the same bits on all.
Values same_on_all(const ToyOptions& options, const std::function<Values(ToyRank&)>& body);

// Stage, ranks, schedules of the simulator (0: on the CPU).
using StageTestParam = std::tuple<int, int, std::uint32_t>;

class StageTest : public testing::TestWithParam<StageTestParam> {
 protected:
  ToyOptions options() const;
  int world_size() const { return std::get<1>(GetParam()); }
  bool is_in_sim() const { return std::get<2>(GetParam()) > 0; }
};

template <typename WorldSizes>
auto on_cpu(const WorldSizes& world_sizes) {
  return testing::Combine(testing::Range(0, 4), world_sizes, testing::Values(0U));
}
template <typename WorldSizes>
auto in_sim(const WorldSizes& world_sizes, std::uint32_t schedule_num) {
  return testing::Combine(testing::Range(0, 4), world_sizes, testing::Values(schedule_num));
}
std::string stage_test_name(const testing::TestParamInfo<StageTestParam>& at);

std::string message_of(const std::exception_ptr& error);

}  // namespace zb::test
