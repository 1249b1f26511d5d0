#include "kernels/cpu_kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <tuple>

#include "common/error.h"
#include "common/ieee_scope.h"
#include "common/simd_scalar.h"
#include "float_support.h"

namespace zb {
namespace {

using test::Elements;
using test::kDTypes;
using test::mixed_floats;
using test::ordinary_floats;
using test::same_bits;

const std::vector<std::size_t> kSizes{0, 1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 65, 127, 1000, 4096, 4099};

class EveryIsa : public testing::TestWithParam<Isa> {
 protected:
  const CpuKernels& kernels() const { return cpu_kernels(GetParam()); }
  const CpuKernels& reference() const { return cpu_kernels(Isa::kScalar); }
};

INSTANTIATE_TEST_SUITE_P(Kernels, EveryIsa, testing::ValuesIn(available_isas()), test::IsaLabel{});

// Independent of the code under test: the nearest of all finite 16-bit values, ties to the even word.
std::uint16_t nearest_half(float value) {
  const double magnitude = std::fabs(static_cast<double>(value));
  std::uint16_t best = 0;
  if (magnitude >= 65520.0) {
    best = 0x7C00;
  } else {
    std::uint16_t low = 0;
    std::uint16_t high = 0x7BFF;
    while (low < high) {  // the largest half that is not above
      const auto middle = static_cast<std::uint16_t>((low + high + 1) / 2);
      if (static_cast<double>(scalar::float_from_float16(middle)) <= magnitude) {
        low = middle;
      } else {
        high = static_cast<std::uint16_t>(middle - 1);
      }
    }
    const double below = magnitude - static_cast<double>(scalar::float_from_float16(low));
    const double next = low == 0x7BFF ? 65536.0 : static_cast<double>(scalar::float_from_float16(low + 1));
    const double above = next - magnitude;
    best = (below < above || (below == above && low % 2 == 0)) ? low : static_cast<std::uint16_t>(low + 1);
  }
  return static_cast<std::uint16_t>(best | (std::signbit(value) ? 0x8000 : 0));
}

double value_of_half(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

TEST(HalfConversion, EveryHalfHasItsValueAndComesBack) {
  for (std::uint32_t word = 0; word <= 0xFFFF; ++word) {
    const auto bits = static_cast<std::uint16_t>(word);
    const float value = scalar::float_from_float16(bits);
    if ((bits & 0x7C00) == 0x7C00) {
      ASSERT_EQ(std::isnan(value), (bits & 0x3FF) != 0) << word;
      ASSERT_EQ(std::isinf(value), (bits & 0x3FF) == 0) << word;
    } else {
      ASSERT_EQ(static_cast<double>(value), value_of_half(bits)) << word;
    }
    ASSERT_EQ(std::signbit(value), (bits & 0x8000) != 0) << word;
    const std::uint16_t back = scalar::float16_from_float(value);
    ASSERT_EQ(back, std::isnan(value) ? (bits | 0x200) : bits) << word;
  }
}

TEST(HalfConversion, RoundsToNearestEven) {
  std::vector<float> values = mixed_floats(20000, 5);
  for (std::uint32_t word = 0; word < 0x7C00; ++word) {  // the tie above every half, and its neighbours
    const float low = scalar::float_from_float16(static_cast<std::uint16_t>(word));
    const float tie =
        word == 0x7BFF ? 65520.0F : (low + scalar::float_from_float16(static_cast<std::uint16_t>(word + 1))) / 2;
    for (const float value : {tie, std::nextafter(tie, 0.0F), std::nextafter(tie, 1e9F), -tie}) values.push_back(value);
  }
  for (const float value : values) {
    if (!std::isnan(value)) {
      ASSERT_EQ(scalar::float16_from_float(value), nearest_half(value)) << value;
    }
  }
}

TEST(BFloat16Conversion, RoundsToNearestEven) {
  EXPECT_EQ(scalar::bfloat16_from_float(1.0F), 0x3F80);
  EXPECT_EQ(scalar::bfloat16_from_float(1.00390625F), 0x3F80);  // tie, even below
  EXPECT_EQ(scalar::bfloat16_from_float(1.01171875F), 0x3F82);  // tie, even above
  EXPECT_EQ(scalar::bfloat16_from_float(std::nextafter(1.00390625F, 2.0F)), 0x3F81);
  EXPECT_EQ(scalar::bfloat16_from_float(std::numeric_limits<float>::max()), 0x7F80);
  EXPECT_EQ(scalar::bfloat16_from_float(-0.0F), 0x8000);
  EXPECT_EQ(scalar::bfloat16_from_float(0x1p-149F), 0x0000);
  EXPECT_EQ(scalar::bfloat16_from_float(0x1p-133F), 0x0001);  // smallest denormal
  for (const float nan : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::quiet_NaN(),
                          std::bit_cast<float>(0x7F800001U), std::bit_cast<float>(0xFFFFFFFFU)}) {
    EXPECT_EQ(scalar::bfloat16_from_float(nan), 0x7FC0);
  }
}

TEST_P(EveryIsa, CastEqualsScalarAtEveryLength) {
  for (const DType to : kDTypes) {
    for (const DType from : kDTypes) {
      for (const std::size_t numel : kSizes) {
        const std::size_t shift = numel % 5;
        const Elements source(from, mixed_floats(numel, 1), shift);
        Elements expected(to, numel, 1);
        Elements actual(to, numel, 1);
        reference().cast(expected.data(), to, source.data(), from, numel);
        kernels().cast(actual.data(), to, source.data(), from, numel);
        ASSERT_EQ(actual.first_difference(expected), -1)
            << dtype_name(from) << " to " << dtype_name(to) << ' ' << numel;
      }
    }
  }
}

TEST_P(EveryIsa, CastWritesTheSameWordsForEveryHalfAndNan) {
  std::vector<std::uint32_t> words;
  for (std::uint32_t i = 0; i < (1U << 18); ++i) words.push_back(i * 16411U);  // spread over all bit patterns
  for (std::uint32_t i = 0; i < 64; ++i) words.push_back(0x7F800001U | (i % 2) << 31 | i << 12 | i);
  for (const DType to : {DType::kBFloat16, DType::kFloat16}) {
    std::vector<std::uint16_t> expected(words.size());
    std::vector<std::uint16_t> actual(words.size());
    reference().cast(expected.data(), to, words.data(), DType::kFloat32, words.size());
    kernels().cast(actual.data(), to, words.data(), DType::kFloat32, words.size());
    ASSERT_EQ(actual, expected) << dtype_name(to);
  }
}

TEST_P(EveryIsa, AddEqualsScalarAtEveryLength) {
  for (const DType to : kDTypes) {
    for (const DType from : kDTypes) {
      for (const std::size_t numel : kSizes) {
        const std::vector<float> start = mixed_floats(numel, 2);
        const Elements source(from, mixed_floats(numel, 3), 1);
        Elements expected(to, start, 3);
        Elements actual(to, start, 3);
        reference().add(expected.data(), to, source.data(), from, numel);
        kernels().add(actual.data(), to, source.data(), from, numel);
        ASSERT_EQ(actual.first_difference(expected), -1)
            << dtype_name(from) << " to " << dtype_name(to) << ' ' << numel;
      }
    }
  }
}

// In double the order of a float sum cannot hide: every partial sum is rounded to float by hand.
float sum_in_order(const std::vector<Elements>& sources, std::size_t index) {
  float sum = sources[0].get(index);
  for (std::size_t k = 1; k < sources.size(); ++k) {
    sum = static_cast<float>(static_cast<double>(sum) + static_cast<double>(sources[k].get(index)));
  }
  return sum;
}

std::vector<Elements> make_sources(DType dtype, std::size_t source_num, std::size_t numel, bool ordinary) {
  std::vector<Elements> sources;
  for (std::size_t k = 0; k < source_num; ++k) {
    const auto seed = static_cast<std::uint32_t>(100 + k);
    sources.emplace_back(dtype, ordinary ? ordinary_floats(numel, seed) : mixed_floats(numel, seed), k % 3);
  }
  return sources;
}

std::vector<const void*> pointers(const std::vector<Elements>& sources) {
  std::vector<const void*> result;
  for (const Elements& source : sources) result.push_back(source.data());
  return result;
}

TEST_P(EveryIsa, ReduceAddsInOrder) {
  for (const DType dtype : kDTypes) {
    for (const std::size_t source_num : {1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 64, 65}) {
      for (const std::size_t numel : {0, 1, 15, 16, 17, 100, 333}) {
        const auto sources = make_sources(dtype, source_num, numel, false);
        Elements expected(dtype, numel, 1);
        for (std::size_t i = 0; i < numel; ++i) expected.set(i, sum_in_order(sources, i));
        Elements actual(dtype, numel, 1);
        kernels().reduce(actual.data(), pointers(sources).data(), source_num, dtype, numel);
        ASSERT_EQ(actual.first_difference(expected), -1) << dtype_name(dtype) << ' ' << source_num << " x " << numel;
      }
    }
  }
}

TEST_P(EveryIsa, ReduceMayWriteOntoAnySource) {
  constexpr std::size_t kNumel = 20000;  // more than one block
  for (const DType dtype : kDTypes) {
    for (const std::size_t source_num : {2, 3, 9, 20}) {
      for (const std::size_t onto : {std::size_t{0}, source_num / 2, source_num - 1}) {
        auto sources = make_sources(dtype, source_num, kNumel, true);
        Elements expected(dtype, kNumel, onto % 3);
        reference().reduce(expected.data(), pointers(sources).data(), source_num, dtype, kNumel);
        kernels().reduce(sources[onto].data(), pointers(sources).data(), source_num, dtype, kNumel);
        ASSERT_EQ(sources[onto].first_difference(expected), -1) << source_num << " onto " << onto;
      }
    }
  }
}

TEST_P(EveryIsa, LargeReduceTakesAnyAlignment) {
  constexpr std::size_t kNumel = (std::size_t{1} << 19) + 13;  // past the caches in every dtype
  for (const DType dtype : kDTypes) {
    for (const std::size_t source_num : {3, 10}) {
      const auto sources = make_sources(dtype, source_num, kNumel, true);
      Elements expected(dtype, kNumel, 5);
      Elements actual(dtype, kNumel, 5);
      reference().reduce(expected.data(), pointers(sources).data(), source_num, dtype, kNumel);
      kernels().reduce(actual.data(), pointers(sources).data(), source_num, dtype, kNumel);
      ASSERT_EQ(actual.first_difference(expected), -1) << dtype_name(dtype) << ' ' << source_num;
    }
  }
}

// The order written in cpu_kernels.h, once more.
double written_sum_of_squares(const Elements& source) {
  double sum = 0.0;
  for (std::size_t begin = 0; begin < source.numel(); begin += kSumBlockNumel) {
    double lanes[16] = {};
    for (std::size_t i = begin; i < std::min(source.numel(), begin + kSumBlockNumel); ++i) {
      const double value = source.get(i);
      lanes[i % 16] += value * value;
    }
    for (const std::size_t half : {8, 4, 2, 1}) {
      for (std::size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    sum += lanes[0];
  }
  return sum;
}

TEST_P(EveryIsa, SumOfSquaresHasOneOrderAtEveryAlignment) {
  for (const DType dtype : kDTypes) {
    for (const std::size_t numel : {0, 1, 2, 15, 16, 17, 31, 33, 4095, 4096, 4097, 8192, 12289, 50000}) {
      const std::vector<float> values = ordinary_floats(numel, 7);
      const double expected = written_sum_of_squares(Elements(dtype, values, 0));
      for (const std::size_t shift : {0, 1, 2, 3, 7, 8, 31}) {
        const Elements source(dtype, values, shift);
        const double actual = kernels().sum_of_squares(source.data(), dtype, numel);
        ASSERT_TRUE(same_bits(actual, expected))
            << dtype_name(dtype) << ' ' << numel << ' ' << actual << ' ' << expected;
      }
    }
  }
}

TEST_P(EveryIsa, SumOfSquaresKeepsTheSmallestAndTheLargest) {
  const std::vector<float> denormals(100, 0x1p-149F);
  EXPECT_EQ(kernels().sum_of_squares(denormals.data(), DType::kFloat32, 100), 100 * 0x1p-298);
  const std::vector<float> huge(3, std::numeric_limits<float>::max());
  EXPECT_TRUE(std::isfinite(kernels().sum_of_squares(huge.data(), DType::kFloat32, 3)));
  for (const std::size_t numel : {1, 16, 21, 5000}) {
    for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
      std::vector<float> values(numel, 1.0F);
      values[numel - 1] = bad;
      EXPECT_FALSE(std::isfinite(kernels().sum_of_squares(values.data(), DType::kFloat32, numel))) << numel;
    }
  }
}

TEST_P(EveryIsa, CopyCopiesEveryByteAndNoMore) {
  for (const std::size_t bytes : {0, 1, 63, 64, 65, 1000, (1 << 20) - 1, 1 << 20, (1 << 20) + 321}) {
    for (const std::size_t shift : {0, 1, 17}) {
      std::vector<unsigned char> source(bytes + 64);
      std::mt19937 random(9);
      for (unsigned char& byte : source) byte = static_cast<unsigned char>(random());
      std::vector<unsigned char> destination(bytes + 64, 0xEE);
      kernels().copy(destination.data() + shift, source.data() + 3, bytes);
      ASSERT_TRUE(std::equal(source.begin() + 3, source.begin() + 3 + static_cast<long>(bytes),
                             destination.begin() + static_cast<long>(shift)));
      for (std::size_t i = 0; i < destination.size(); ++i) {
        if (i < shift || i >= shift + bytes) {
          ASSERT_EQ(destination[i], 0xEE) << i;
        }
      }
    }
  }
}

#if defined(__x86_64__)
TEST_P(EveryIsa, ResultsDoNotDependOnFlushToZero) {
  std::vector<float> a = mixed_floats(1000, 11);
  for (std::size_t i = 0; i < a.size(); i += 2) a[i] = std::bit_cast<float>(static_cast<std::uint32_t>(i * 7 + 1));
  const void* sources[] = {a.data(), a.data()};
  std::vector<float> expected(1000);
  kernels().reduce(expected.data(), sources, 2, DType::kFloat32, 1000);
  std::vector<float> denormals(16, 0x1p-140F);
  const double expected_squares = kernels().sum_of_squares(denormals.data(), DType::kFloat32, 16);

  const unsigned before = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(before | 0x8040 | 0x2000);  // flush to zero, denormals are zero, round down
  std::vector<float> actual(1000);
  kernels().reduce(actual.data(), sources, 2, DType::kFloat32, 1000);
  const double squares = kernels().sum_of_squares(denormals.data(), DType::kFloat32, 16);
  const unsigned after = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(before);

  EXPECT_EQ(after & 0xFFC0U, (before | 0x8040 | 0x2000) & 0xFFC0U);  // the caller's modes are back
  EXPECT_EQ(squares, expected_squares);
  for (std::size_t i = 0; i < 1000; ++i) ASSERT_TRUE(same_bits(actual[i], expected[i])) << i;
}
#endif

TEST(CpuKernels, UnavailableInstructionSetIsAnError) {
  for (const Isa isa : {Isa::kNeon, Isa::kAvx2, Isa::kAvx512}) {
    const auto& isas = available_isas();
    if (std::find(isas.begin(), isas.end(), isa) == isas.end()) {
      EXPECT_THROW(cpu_kernels(isa), ArgumentError);
    }
  }
}

}  // namespace
}  // namespace zb
