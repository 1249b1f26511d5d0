// What several tests of the numeric code share: inputs with every kind of float, and comparison in bits.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "common/cpu_features.h"
#include "common/dtype.h"

namespace zb::test {

std::vector<float> special_floats();

// Mixed magnitudes: ordinary, any bit pattern, special.
std::vector<float> mixed_floats(std::size_t numel, std::uint32_t seed);

std::vector<float> ordinary_floats(std::size_t numel, std::uint32_t seed);

bool same_bits(float a, float b);

bool same_bits(double a, double b);

// Elements of any dtype that begin `shift` elements past an aligned address, followed by guard bytes.
class Elements {
 public:
  Elements(DType dtype, std::size_t numel, std::size_t shift);
  Elements(DType dtype, const std::vector<float>& values, std::size_t shift);

  void* data() { return bytes_.data() + begin_; }
  const void* data() const { return bytes_.data() + begin_; }
  DType dtype() const { return dtype_; }
  std::size_t numel() const { return numel_; }

  void set(std::size_t index, float value);
  float get(std::size_t index) const;

  // Index of the first element that differs, or -1; any NaN equals any NaN, nothing outside may have been written.
  long first_difference(const Elements& other) const;

 private:
  static constexpr std::size_t kPadBytes = 128;
  static constexpr unsigned char kGuard = 0xA5;

  bool guards_intact() const;

  DType dtype_;
  std::size_t numel_;
  std::vector<unsigned char> bytes_;
  std::size_t begin_ = 0;
};

struct IsaLabel {
  std::string operator()(const testing::TestParamInfo<Isa>& parameter) const;
};

inline constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

}  // namespace zb::test
