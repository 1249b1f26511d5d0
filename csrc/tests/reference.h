// Training on one thread with no engine: what every stage must end with, bit for bit.
#pragma once

#include <functional>

#include "toy_model.h"

namespace zb::test {

// Every rank's gradients summed, then the scalar Adam.
class Reference {
 public:
  explicit Reference(int world_size, DType param_dtype = DType::kFloat32);

  // Adds a micro-batch; `has` tells which rank brings a gradient of which unit.
  void backward(long micro_step, const std::function<float(int rank, std::size_t unit)>& count = {});

  double norm() const;

  void step(double clip = 0.0);
  void drop();

  // The parameters as the model sees them.
  Values parameters() const;

  Values master, exp_avg, exp_avg_sq;

 private:
  int world_size_;
  DType param_dtype_;
  Values sums_;
  long steps_ = 0;
  long backwards_ = 0;
};

// The masters after so many steps of one micro-batch each.
Values reference_master(int world_size, long step_num);

// The moments that only trainable parameters have.
Values without_frozen(Values values);

}  // namespace zb::test
