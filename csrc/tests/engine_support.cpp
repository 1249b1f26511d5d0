#include "engine_support.h"

#include <mutex>
#include <optional>
#include <utility>

#include "common/scope_exit.h"
#include "rank_threads.h"

namespace zb::test {

std::vector<std::exception_ptr> run_threads(const ToyOptions& options, const std::vector<ToyPlace>& places,
                                            const ToyBody& body) {
  return run_rank_threads(options.world_size, [&](int rank) {
    const ToyPlace& place = places[static_cast<std::size_t>(rank)];
    if (place.sim) place.sim->turns().enter(rank);
    const ScopeExit leave([&] {
      if (place.sim) place.sim->turns().leave(rank);
    });
    SCOPED_TRACE("rank " + std::to_string(rank) + (place.sim ? ", " + place.sim->text() : ""));
    ToyRank toy(options, rank, place);
    try {
      body(toy);
    } catch (const std::exception& error) {
      toy.engine().abort(error.what());
      throw;
    }
  });
}

std::vector<ToyPlace> places_on_cpu(const ToyOptions& options) {
  return std::vector<ToyPlace>(static_cast<std::size_t>(options.world_size),
                               ToyPlace{.rendezvous = unique_rendezvous()});
}

std::vector<std::exception_ptr> try_ranks(const ToyOptions& options, const ToyBody& body) {
  if (options.sim_schedule_num == 0) return run_threads(options, places_on_cpu(options), body);
  std::vector<std::exception_ptr> errors;
  for (std::uint32_t number = 0; number < options.sim_schedule_num; ++number) {
    SimWorld world(options.world_size, sim_schedule(number), sim_collectives(number));
    const std::vector<ToyPlace> places(static_cast<std::size_t>(options.world_size), ToyPlace{.sim = &world});
    const std::vector<std::exception_ptr> found = run_threads(options, places, body);
    errors.insert(errors.end(), found.begin(), found.end());
  }
  return errors;
}

void run_in_sim(const ToyOptions& options, std::uint32_t schedule_number, const ToyBody& body) {
  SimWorld world(options.world_size, sim_schedule(schedule_number), sim_collectives(schedule_number));
  rethrow_first(run_threads(
      options, std::vector<ToyPlace>(static_cast<std::size_t>(options.world_size), ToyPlace{.sim = &world}), body));
}

void run_ranks(const ToyOptions& options, const ToyBody& body) {
  std::vector<Reads> reads(static_cast<std::size_t>(options.world_size));
  std::vector<ToyPlace> places = places_on_cpu(options);
  for (std::size_t rank = 0; rank < places.size(); ++rank) places[rank].reads = &reads[rank];
  rethrow_first(run_threads(options, places, body));
  for (std::uint32_t number = 0; number < options.sim_schedule_num; ++number) {
    SimWorld world(options.world_size, sim_schedule(number), sim_collectives(number));
    for (std::size_t rank = 0; rank < places.size(); ++rank) {
      places[rank] = {.sim = &world, .expected_reads = &reads[rank]};
    }
    rethrow_first(run_threads(options, places, body));
    if (testing::Test::HasFailure()) return;
  }
}

Values same_on_all(const ToyOptions& options, const std::function<Values(ToyRank&)>& body) {
  std::optional<Values> first;  // of the CPU, then of every schedule
  std::mutex mutex;
  run_ranks(options, [&](ToyRank& toy) {
    Values values = body(toy);
    const std::lock_guard lock(mutex);
    if (!first)
      first = std::move(values);
    else
      EXPECT_EQ(values, *first);
  });
  return *first;
}

ToyOptions StageTest::options() const {
  ToyOptions result;
  result.stage = zero_stage_from_int(std::get<0>(GetParam()));
  result.world_size = world_size();
  result.sim_schedule_num = std::get<2>(GetParam());
  return result;
}

std::string stage_test_name(const testing::TestParamInfo<StageTestParam>& at) {
  return "Stage" + std::to_string(std::get<0>(at.param)) + "Ranks" + std::to_string(std::get<1>(at.param));
}

std::string message_of(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const std::exception& caught) {
    return caught.what();
  }
  return "nothing was thrown";
}

}  // namespace zb::test
