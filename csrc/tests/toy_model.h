// A toy model for tests of the engine: parameters in plain memory, and gradients that are exact functions of (rank,
// step, parameter), so that sums do not depend on their order.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sim/sim_races.h"
#include "zero/engine.h"

namespace zb::test {

// Work of the model in the compute lane: at once on the CPU, some time later in the simulator.
void compute(Device& device, std::string_view operation, const std::vector<Touched>& touched,
             const std::function<void()>& work);

// What a fake parameter's storage is now. Outlives its binding.
struct ToyTensor {
  std::vector<float> initial;  // the "user's" memory until the engine adopts it
  DType dtype = DType::kFloat32;
  std::byte* data = nullptr;
  Region owned;
  std::string message;
  std::string guard_message;  // empty: may be read
  bool intact = true;

  std::shared_ptr<Device> device;

  // From the host: these wait for the device.
  float get(std::size_t index) const;
  void set(std::size_t index, float value);
};

class ToyBinding final : public ParameterBinding {
 public:
  explicit ToyBinding(std::shared_ptr<ToyTensor> tensor) : tensor_(std::move(tensor)) {}

  void attach(std::byte* data) override;
  void attach_owned(const Region& region) override;
  void detach(const std::string& message) override;
  void guard(const std::string& message) override { tensor_->guard_message = message; }
  void unguard() override { tensor_->guard_message.clear(); }
  bool intact() const override { return tensor_->intact; }
  void read(float* destination) const override;
  void adopt(DType param_dtype) override;

 private:
  std::shared_ptr<ToyTensor> tensor_;
};

struct ToyParameter {
  std::string name;
  std::size_t numel;
  std::size_t unit;
  int param_group = 0;
  bool trainable = true;
};

inline constexpr std::size_t kRoot = 0;

// A root, four blocks of different sizes (odd, scalar, fewer elements than ranks), one of them with a frozen parameter.
const std::vector<ToyParameter>& toy_parameters();
const std::vector<std::string>& toy_units();
std::vector<std::size_t> parameters_of(std::size_t unit);

// Sixteenths: exact in every dtype.
float initial_value(std::size_t parameter, std::size_t index);
// Quarters of small integers: exact in fp16 and bf16, and so are their sums over some ranks and micro-batches.
float gradient_value(int rank, long micro_step, std::size_t parameter, std::size_t index);

std::vector<AdamHyperparameters> toy_groups();

using Values = std::vector<std::vector<float>>;  // by parameter

}  // namespace zb::test
