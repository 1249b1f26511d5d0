#include "reference.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cpu_kernels.h"
#include "optim/adam.h"

namespace zb::test {

Reference::Reference(int world_size, DType param_dtype) : world_size_(world_size), param_dtype_(param_dtype) {
  for (std::size_t index = 0; index < toy_parameters().size(); ++index) {
    const std::size_t numel = toy_parameters()[index].numel;
    master.emplace_back(numel);
    for (std::size_t i = 0; i < numel; ++i) master.back()[i] = initial_value(index, i);
    exp_avg.emplace_back(numel, 0.0F);
    exp_avg_sq.emplace_back(numel, 0.0F);
    sums_.emplace_back(numel, 0.0F);
  }
}

void Reference::backward(long micro_step, const std::function<float(int rank, std::size_t unit)>& count) {
  for (std::size_t index = 0; index < sums_.size(); ++index) {
    for (int rank = 0; rank < world_size_; ++rank) {
      const float times = count ? count(rank, toy_parameters()[index].unit) : 1.0F;
      for (std::size_t i = 0; i < sums_[index].size(); ++i) {
        sums_[index][i] += times * gradient_value(rank, micro_step, index, i);
      }
    }
  }
  ++backwards_;
}

double Reference::norm() const {
  double total = 0.0;
  for (std::size_t index = 0; index < sums_.size(); ++index) {
    if (!toy_parameters()[index].trainable) continue;
    for (const float value : sums_[index]) total += static_cast<double>(value) * static_cast<double>(value);
  }
  return std::sqrt(total) / (world_size_ * static_cast<double>(backwards_));
}

void Reference::step(double clip) {
  double factor = 1.0 / (static_cast<double>(world_size_) * static_cast<double>(backwards_));
  if (clip > 0.0) factor *= std::min(1.0, clip / (norm() + 1e-6));
  ++steps_;
  for (std::size_t index = 0; index < master.size(); ++index) {
    if (toy_parameters()[index].trainable) {
      const auto group = static_cast<std::size_t>(toy_parameters()[index].param_group);
      adam_function(Isa::kScalar)({.master = master[index].data(),
                                   .exp_avg = exp_avg[index].data(),
                                   .exp_avg_sq = exp_avg_sq[index].data(),
                                   .gradient = sums_[index].data(),
                                   .gradient_dtype = DType::kFloat32,
                                   .low_precision = nullptr,
                                   .low_precision_dtype = DType::kFloat32,
                                   .numel = master[index].size()},
                                  make_adam_scalars(toy_groups()[group], steps_, static_cast<float>(factor)));
    }
  }
  drop();
}

void Reference::drop() {
  for (std::vector<float>& sum : sums_) std::fill(sum.begin(), sum.end(), 0.0F);
  backwards_ = 0;
}

Values Reference::parameters() const {
  Values values = master;
  for (std::vector<float>& of_one : values) {
    std::vector<std::byte> rounded(of_one.size() * dtype_bytes(param_dtype_));
    cpu_kernels().cast(rounded.data(), param_dtype_, of_one.data(), DType::kFloat32, of_one.size());
    cpu_kernels().cast(of_one.data(), DType::kFloat32, rounded.data(), param_dtype_, of_one.size());
  }
  return values;
}

Values reference_master(int world_size, long step_num) {
  Reference reference(world_size);
  for (long step = 0; step < step_num; ++step) {
    reference.backward(step);
    reference.step();
  }
  return reference.master;
}

Values without_frozen(Values values) {
  for (std::size_t index = 0; index < values.size(); ++index) {
    if (!toy_parameters()[index].trainable) values[index].clear();
  }
  return values;
}

}  // namespace zb::test
