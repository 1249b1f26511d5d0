// A window's gradients between its last backward and its step: the norm, clipping, reading, changing and dropping them.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "common/error.h"
#include "kernels/drain.h"
#include "zero/engine.h"

namespace zb {

void Engine::begin_window() {
  window_multiplier_ = 1.0;
  for (Parameter& parameter : parameters_) parameter.is_held = false;
}

void Engine::expect_whole_window(const char* what) const {
  ZB_EXPECT_STATE(!reduces_->in_backward() && !gathers_->in_pass(),
                  std::string(what) +
                      " was called inside a forward or backward; call it between engine.backward(loss) "
                      "and engine.step()");
  ZB_EXPECT_STATE(!backward_updates_.is_on,
                  std::string(what) +
                      " comes too late: with optimizer_in_backward the gradients have been used when "
                      "backward returns; set optimizer_in_backward to false");
  ZB_EXPECT_STATE(reduces_->window_backwards() > 0,
                  std::string(what) +
                      " was called without gradients; call it between engine.backward(loss) and "
                      "engine.step()");
  ZB_EXPECT_STATE(reduces_->is_window_reduced(),
                  std::string(what) + " was called after " + std::to_string(reduces_->window_backwards()) + " of " +
                      std::to_string(options_.accumulation_steps) +
                      " micro-batches, before their gradients are averaged; call it after the last one, or before that "
                      "one's backward call engine.set_gradient_accumulation_boundary(True)");
}

double Engine::gradient_norm() {
  return enter([&] {
    expect_whole_window("engine.grad_norm()");
    wait_step();
    or_abort([&] {
      // A change of the gradients sums squares anew, once peers have read these.
      if (const WorkPtr work = put_in_norm()) work->wait_source_free(reduces_->lane());
    });
    device().synchronize(device().mark_for_host(reduces_->lane()));
    check_communicators();
    StepScalars scalars;
    std::memcpy(&scalars, norm_on_host_.get(), sizeof(scalars));
    return scalars.norm;
  });
}

// One factor more instead of a pass over all gradients, so that nothing is rounded.
double Engine::clip_gradients(double max_norm) {
  ZB_EXPECT(max_norm > 0.0, "max_norm must be positive, got " + std::to_string(max_norm));
  const double norm = gradient_norm();
  return enter([&] {
    if (std::isfinite(norm) && max_norm < norm + 1e-6) window_multiplier_ *= max_norm / (norm + 1e-6);
    return norm;
  });
}

// This rank's pieces of a flat buffer's reduced gradients, as its update reads them.
std::vector<FlatPiece> Engine::own_gradients(const FlatBuffer& flat) const {
  if (!flat.in_place_pieces.empty()) return flat.in_place_pieces;
  const std::size_t numel = state_sharded() ? flat.layout.shard_numel() : flat.layout.padded_numel();
  return {{.begin = 0, .numel = numel, .data = update_gradient(flat)}};
}

void Engine::read_gradients(const VisitGradient& visit) {
  enter([&] {
    expect_whole_window("engine.gradients()");
    or_abort([&] {
      Communicator& communicator = *reduce_communicator_;
      device().wait(Lane::kCompute, device().mark(reduces_->lane()));
      for (const FlatBuffer* flat : trainable_flats_) {
        const std::size_t full_bytes = flat->layout.padded_numel() * sizeof(float);
        const std::size_t own_bytes = state_sharded() ? flat->layout.shard_numel() * sizeof(float) : full_bytes;
        const BufferRole role = state_sharded() ? BufferRole::kShared : BufferRole::kPrivate;
        const Region own{communicator.allocate(own_bytes, role, &ledger_, Category::kStaging)};
        Region full = own;
        const Drain drain(device());
        for (const FlatPiece& piece : own_gradients(*flat)) {
          device().cast(Lane::kCompute, own.data() + piece.begin * sizeof(float), DType::kFloat32, piece.data,
                        flat->accumulate_dtype, piece.numel);
        }
        if (state_sharded()) {
          full = {communicator.allocate(full_bytes, BufferRole::kPrivate, &ledger_, Category::kStaging)};
          device().wait(communicator.lane(), device().mark(Lane::kCompute));
          const WorkPtr work = communicator.start_all_gather(
              {.source = own, .destination = full, .shard_bytes = own_bytes, .label = flat->label});
          work->wait();
          work->wait_source_free();
        }
        for (const std::size_t index : flat->parameters) {
          visit(index, reinterpret_cast<float*>(full.data()) + parameters_[index].offset_numel);
        }
      }
      check_communicators();
    });
  });
}

void Engine::write_gradients(const GradientChange& change) {
  enter([&] {
    expect_whole_window("engine.gradients()");
    or_abort([&] {
      Communicator& communicator = *reduce_communicator_;
      const bool is_sent = world_size() > 1 && change.source_rank >= 0;
      drop_offers();  // a store that has begun to fetch them fetches them again
      device().wait(Lane::kCompute, device().mark(reduces_->lane()));
      for (const FlatBuffer* flat : trainable_flats_) {
        const std::size_t bytes = flat->layout.padded_numel() * sizeof(float);
        const Region full{communicator.allocate(bytes, is_sent ? BufferRole::kShared : BufferRole::kPrivate, &ledger_,
                                                Category::kStaging)};
        const Drain drain(device());
        WorkPtr work;
        if (!is_sent || rank() == change.source_rank) {
          device().zero(Lane::kCompute, full.data(), bytes);
          for (const std::size_t index : flat->parameters) {
            change.fill(index, reinterpret_cast<float*>(full.data()) + parameters_[index].offset_numel);
          }
        }
        if (is_sent) {
          device().wait(communicator.lane(), device().mark(Lane::kCompute));
          work = communicator.start_broadcast(
              {.buffer = full, .bytes = bytes, .root = change.source_rank, .label = flat->label});
          work->wait();
        }
        const std::size_t begin = state_sharded() ? static_cast<std::size_t>(rank()) * flat->layout.shard_numel() : 0;
        const auto* const values = reinterpret_cast<const float*>(full.data()) + begin;
        for (const FlatPiece& piece : own_gradients(*flat)) {
          change.merge(values + piece.begin, const_cast<void*>(piece.data), flat->accumulate_dtype, piece.numel);
        }
        if (work) work->wait_source_free();
      }
      device().wait(reduces_->lane(), device().mark(Lane::kCompute));
      reduces_->sum_squares();
      for (const std::size_t index : change.held) parameters_[index].is_held = true;
      has_own_steps_ = has_own_steps_ || !change.held.empty();
      check_communicators();
    });
  });
}

void Engine::drop_gradients() {
  enter([&] {
    ZB_EXPECT_STATE(!reduces_->in_backward() && !gathers_->in_pass(),
                    "gradients cannot be dropped inside a forward or backward");
    if (reduces_->window_backwards() == 0) return;
    ZB_EXPECT_STATE(
        !backward_updates_.is_on,
        "gradients cannot be dropped: with optimizer_in_backward they have been used when backward returns; "
        "call engine.step(), or set optimizer_in_backward to false");
    or_abort([&] {
      drop_offers();
      reduces_->drop_window();
    });
  });
}

std::vector<std::int64_t> Engine::held_steps() {
  return enter([&] {
    wait_step();
    std::vector<std::int64_t> found;
    for (const Parameter& parameter : parameters_) found.push_back(parameter.held_steps);
    return found;
  });
}

void Engine::await_all_updates() {
  enter([&] {
    expect_no_updates();
    go_on();
    finish_updates();
  });
}

}  // namespace zb
