// Dynamic loss scale for fp16, after Micikevicius et al., Mixed Precision Training (arXiv 1710.03740), with the rule of
// torch.amp.GradScaler: halve on overflow and skip the step, double after `growth_interval_steps` good steps.
#pragma once

#include <cmath>

namespace zb {

struct LossScaleOptions {
  bool enabled = false;
  bool dynamic = true;
  double initial_scale = 65536.0;
  double growth_factor = 2.0;
  double backoff_factor = 0.5;
  long growth_interval_steps = 1000;
  double min_scale = 1.0;
};

// What a run goes on from.
struct LossScaleState {
  double scale = 1.0;
  long good_steps = 0;  // since the scale last changed
};

class LossScaler {
 public:
  explicit LossScaler(const LossScaleOptions& options)
      : options_(options), scale_(options.enabled ? options.initial_scale : 1.0) {}

  bool enabled() const noexcept { return options_.enabled; }
  double scale() const noexcept { return scale_; }
  LossScaleState state() const noexcept { return {.scale = scale_, .good_steps = good_steps_}; }
  void restore(const LossScaleState& state) noexcept {
    scale_ = state.scale;
    good_steps_ = state.good_steps;
  }

  void step_succeeded() noexcept {
    if (!options_.enabled || !options_.dynamic) return;
    if (++good_steps_ >= options_.growth_interval_steps) {
      // A scale that is not finite in fp16 arithmetic's float loss would never recover.
      if (scale_ * options_.growth_factor <= 16777216.0) scale_ *= options_.growth_factor;
      good_steps_ = 0;
    }
  }

  // Whether a lower scale, or one that was chosen to stay, leaves anything to hope for. At its floor, a dynamic scale
  // would have every further step skipped in silence.
  [[nodiscard]] bool step_overflowed() noexcept {
    if (!options_.enabled) return false;
    if (!options_.dynamic) return true;
    const bool was_above_its_floor = scale_ > options_.min_scale;
    scale_ = std::fmax(options_.min_scale, scale_ * options_.backoff_factor);
    good_steps_ = 0;
    return was_above_its_floor;
  }

 private:
  LossScaleOptions options_;
  double scale_;
  long good_steps_ = 0;
};

}  // namespace zb
