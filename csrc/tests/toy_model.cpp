#include "toy_model.h"

#include <algorithm>
#include <array>

#include "kernels/cpu_kernels.h"
#include "sim/sim_device.h"

namespace zb::test {

void compute(Device& device, std::string_view operation, const std::vector<Touched>& touched,
             const std::function<void()>& work) {
  if (auto* const sim_device = dynamic_cast<SimDevice*>(&device)) {
    sim_device->put_in(Lane::kCompute, operation, touched, work);
  } else {
    work();
  }
}

float ToyTensor::get(std::size_t index) const {
  std::array<std::byte, sizeof(float)> bytes{};
  device->download(bytes.data(), data + index * dtype_bytes(dtype), dtype_bytes(dtype));
  float value = 0.0F;
  cpu_kernels().cast(&value, DType::kFloat32, bytes.data(), dtype, 1);
  return value;
}

void ToyTensor::set(std::size_t index, float value) {
  std::array<std::byte, sizeof(float)> bytes{};
  cpu_kernels().cast(bytes.data(), dtype, &value, DType::kFloat32, 1);
  device->upload(data + index * dtype_bytes(dtype), bytes.data(), dtype_bytes(dtype));
}

void ToyBinding::attach(std::byte* data) {
  tensor_->data = data;
  tensor_->owned = {};
}

void ToyBinding::attach_owned(const Region& region) {
  tensor_->data = region.data();
  tensor_->owned = region;
}

void ToyBinding::detach(const std::string& message) {
  tensor_->data = nullptr;
  tensor_->owned = {};
  tensor_->message = message;
}

void ToyBinding::read(float* destination) const {
  const std::vector<float>& values = tensor_->initial;
  compute(*tensor_->device, "read of a parameter", {SimDevice::written(destination, DType::kFloat32, values.size())},
          [destination, values] { std::copy(values.begin(), values.end(), destination); });
}

void ToyBinding::adopt(DType param_dtype) {
  tensor_->dtype = param_dtype;
  tensor_->initial.clear();
  tensor_->data = nullptr;
}

const std::vector<ToyParameter>& toy_parameters() {
  static const std::vector<ToyParameter> parameters{
      {"norm", 5, 0},         {"tied", 33, 0, 1},  {"a.weight", 70, 1},  {"a.bias", 1, 1, 1},
      {"b.weight", 70, 2},    {"b.bias", 1, 2, 1}, {"c.weight", 300, 3}, {"c.frozen", 17, 3, 0, false},
      {"d.weight", 128, 4, 1}};
  return parameters;
}

const std::vector<std::string>& toy_units() {
  static const std::vector<std::string> names{"root", "a", "b", "c", "d"};
  return names;
}

std::vector<std::size_t> parameters_of(std::size_t unit) {
  std::vector<std::size_t> found;
  for (std::size_t index = 0; index < toy_parameters().size(); ++index) {
    if (toy_parameters()[index].unit == unit && toy_parameters()[index].trainable) found.push_back(index);
  }
  return found;
}

float initial_value(std::size_t parameter, std::size_t index) {
  return static_cast<float>(static_cast<int>((parameter * 31 + index * 7) % 41) - 20) / 16.0F;
}

float gradient_value(int rank, long micro_step, std::size_t parameter, std::size_t index) {
  const auto mixed = static_cast<std::size_t>(rank) * 5 + static_cast<std::size_t>(micro_step) * 3 + parameter * 7;
  return static_cast<float>(static_cast<int>((mixed + index) % 17) - 8) / 4.0F;
}

std::vector<AdamHyperparameters> toy_groups() {
  return {{.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1},
          {.lr = 3e-3, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.0}};
}

}  // namespace zb::test
