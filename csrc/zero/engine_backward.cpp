// The optimizer in backward: see the note in engine.h.
#include <algorithm>
#include <cstring>
#include <utility>

#include "common/error.h"
#include "zero/engine.h"

namespace zb {

void Engine::throw_torn() const {
  throw StateError(
      "an error came when the optimizer had begun to update parameters in backward, so they belong to no step; load a "
      "state (engine.load_full_state) before anything else");
}

// Between a backward with updates and its step parameters are neither of the old step nor of the new one.
void Engine::expect_no_updates() const {
  ZB_EXPECT_STATE(!backward_updates_.is_on,
                  "the optimizer has updated parameters in backward; call engine.step() before anything else");
}

void Engine::expect_not_updated(const Unit& unit) const {
  const bool is_reduced =
      unit.gradient_state == GradientState::kReducing || unit.gradient_state == GradientState::kReduced;
  ZB_EXPECT_STATE(
      !backward_updates_.is_on || !is_reduced,
      "unit '" + unit.name +
          "' is used again in a backward after its gradients were complete and its update was begun; a model "
          "that does so cannot train with optimizer_in_backward");
}

// The trial step that precedes the choice of a place updates behind its backward.
bool Engine::updates_in_backward(bool last) const {
  return options_.optimizer_in_backward && last && !store_->awaits_share();
}

// Hyperparameters and scalars of the step that this backward ends are known when it begins.
void Engine::begin_updates(bool last, std::span<const AdamHyperparameters> groups) {
  BackwardUpdates& updates = backward_updates_;
  updates.has_begun = false;
  if (!updates_in_backward(last)) return;
  if (!held_in_step_.empty()) wait_step();  // what was held has its own count of steps
  take_update_order();
  const long step = steps_applied_ + (pending_.is_pending ? 2 : 1);  // one that is not finite tears the engine
  updates.rows = make_rows(groups, step);
  const double divisor = static_cast<double>(world_size()) * static_cast<double>(reduces_->window_backwards() + 1);
  const StepScalars scalars{.factor = static_cast<float>(1.0 / divisor)};
  if (scalars.factor != updates.factor) {
    device().upload(updates.scalars.data(), &scalars, sizeof(scalars));
    std::memcpy(updates.scalars_on_host.get(), &scalars, sizeof(scalars));
    updates.factor = scalars.factor;
  }
  updates.is_on = true;
}

void Engine::on_reduced(Unit& unit) {
  if (!backward_updates_.is_on) {
    offer_gradients(unit);
    return;
  }
  backward_updates_.reduced.emplace_back(&unit,
                                         parameters_sharded() ? device().mark(reduce_communicator_->lane()) : nullptr);
  start_updates_behind_peers();
}

void Engine::start_updates_behind_peers() {
  std::deque<std::pair<Unit*, MarkPtr>>& reduced = backward_updates_.reduced;
  const auto is_read = [](const WorkPtr& gather) { return gather->test_source_free(); };
  while (!reduced.empty() && device().has_passed(reduced.front().second) &&
         std::all_of(reduced.front().first->reads.begin(), reduced.front().first->reads.end(), is_read)) {
    Unit& unit = *reduced.front().first;
    reduced.pop_front();
    start_update_in_backward(unit);
  }
}

void Engine::start_update_in_backward(Unit& unit) {
  BackwardUpdates& updates = backward_updates_;
  const Lane lane = reduce_communicator_->lane();
  if (lane != reduces_->lane()) device().wait(lane, device().mark(reduces_->lane()));
  for (const WorkPtr& gather : unit.reads) gather->wait_source_free(lane);
  unit.reads.clear();
  update_units({&unit, 1}, lane, updates.rows,
               {.on_device = updates.scalars.as<StepScalars>(),
                .on_host = reinterpret_cast<const StepScalars*>(updates.scalars_on_host.get())});
  if (makes_gradients_each_step() && store_->issues_at_once()) updates.updated.emplace_back(&unit, device().mark(lane));
}

// The backward's gathers are over.
void Engine::finish_updates_in_backward() {
  std::deque<std::pair<Unit*, MarkPtr>>& reduced = backward_updates_.reduced;
  for (; !reduced.empty(); reduced.pop_front()) start_update_in_backward(*reduced.front().first);
}

// What updates have read can go once they have passed, with no wait.
void Engine::release_passed_gradients() {
  std::deque<std::pair<Unit*, MarkPtr>>& updated = backward_updates_.updated;
  while (!updated.empty() && device().has_passed(updated.front().second)) {
    release_gradients(*updated.front().first);
    updated.pop_front();
  }
}

// A backward was left.
void Engine::tear() {
  BackwardUpdates& updates = backward_updates_;
  updates.reduced.clear();
  if (std::exchange(updates.is_on, false) && updates.has_begun) is_torn_ = true;
}

// The step behind a backward with updates.
void Engine::publish_updates() {
  backward_updates_.updated.clear();
  published_.clear();
  take_update_order();
  if (publishes()) unpublished_ = 0;
  if (store_->issues_at_once()) {
    for (std::size_t turn = 0; turn < units_.size(); ++turn) publish_small_together(turn + 1);
    // Parameters that every rank updates are readable behind a step.
    for (Unit& unit : units_) {
      if (!state_sharded()) wait_updated(unit);
    }
  }
  finish_where_nothing_runs_beside();
}

}  // namespace zb
