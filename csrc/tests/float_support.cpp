#include "float_support.h"

#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "common/simd_scalar.h"

namespace zb::test {

std::vector<float> special_floats() {
  using Limits = std::numeric_limits<float>;
  std::vector<float> values{0.0F,
                            1.0F,
                            1e-3F,
                            3.14159F,
                            65504.0F,
                            65519.9F,
                            65520.0F,
                            1e5F,
                            1e19F,
                            1e20F,
                            1e30F,
                            Limits::max(),
                            0x1p-14F,
                            0x1p-24F,
                            0x1p-25F,
                            0x1.000002p-25F,
                            0x1.8p-24F,
                            0x1p-26F,
                            0x1p-126F,
                            0x1p-127F,
                            0x1p-149F,
                            Limits::min(),
                            1e-20F,
                            1e-38F,
                            1.00390625F,
                            1.01171875F,
                            1.0009765625F,
                            1.00048828125F,
                            0x1.fep127F,
                            0x1.ffp127F,
                            Limits::infinity(),
                            Limits::quiet_NaN(),
                            Limits::signaling_NaN()};
  const std::size_t positive_num = values.size();
  for (std::size_t i = 0; i < positive_num; ++i) values.push_back(-values[i]);
  return values;
}

std::vector<float> mixed_floats(std::size_t numel, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> ordinary;
  const std::vector<float> specials = special_floats();
  std::vector<float> values(numel);
  for (float& value : values) {
    const std::uint32_t choice = random() % 8;
    if (choice == 0) {
      value = specials[random() % specials.size()];
    } else if (choice == 1) {
      value = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    } else {
      value = std::ldexp(ordinary(random), static_cast<int>(random() % 40) - 30);
    }
  }
  return values;
}

std::vector<float> ordinary_floats(std::size_t numel, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> ordinary;
  std::vector<float> values(numel);
  for (float& value : values) value = ordinary(random);
  return values;
}

bool same_bits(float a, float b) {
  return (std::isnan(a) && std::isnan(b)) || std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

bool same_bits(double a, double b) {
  return (std::isnan(a) && std::isnan(b)) || std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b);
}

Elements::Elements(DType dtype, std::size_t numel, std::size_t shift)
    : dtype_(dtype), numel_(numel), bytes_((shift + numel) * dtype_bytes(dtype) + 2 * kPadBytes, kGuard) {
  const auto address = reinterpret_cast<std::uintptr_t>(bytes_.data());
  begin_ = (kPadBytes - address % kPadBytes) % kPadBytes + shift * dtype_bytes(dtype);
  for (std::size_t i = 0; i < numel; ++i) set(i, 0.0F);
}

Elements::Elements(DType dtype, const std::vector<float>& values, std::size_t shift)
    : Elements(dtype, values.size(), shift) {
  for (std::size_t i = 0; i < numel_; ++i) set(i, values[i]);
}

void Elements::set(std::size_t index, float value) {
  if (dtype_ == DType::kFloat32) return scalar::store<DType::kFloat32>(data(), index, value);
  if (dtype_ == DType::kBFloat16) return scalar::store<DType::kBFloat16>(data(), index, value);
  scalar::store<DType::kFloat16>(data(), index, value);
}

float Elements::get(std::size_t index) const {
  if (dtype_ == DType::kFloat32) return scalar::load<DType::kFloat32>(data(), index);
  if (dtype_ == DType::kBFloat16) return scalar::load<DType::kBFloat16>(data(), index);
  return scalar::load<DType::kFloat16>(data(), index);
}

long Elements::first_difference(const Elements& other) const {
  for (std::size_t i = 0; i < numel_; ++i) {
    if (!same_bits(get(i), other.get(i))) return static_cast<long>(i);
  }
  return guards_intact() && other.guards_intact() ? -1 : static_cast<long>(numel_);
}

bool Elements::guards_intact() const {
  const std::size_t end = begin_ + numel_ * dtype_bytes(dtype_);
  for (std::size_t i = 0; i < bytes_.size(); ++i) {
    if ((i < begin_ || i >= end) && bytes_[i] != kGuard) return false;
  }
  return true;
}

std::string IsaLabel::operator()(const testing::TestParamInfo<Isa>& parameter) const {
  return std::string(isa_name(parameter.param));
}

}  // namespace zb::test
