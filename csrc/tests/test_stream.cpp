#include "optim/stream.h"

#include <gtest/gtest.h>

#include "float_support.h"

namespace zb {
namespace {

using test::Elements;

TEST(Stream, MixTouchesEveryElementOnceAtAnyThreadCountAndAlignment) {
  constexpr std::size_t kNumel = 10007;
  for (const DType gradient_dtype : test::kDTypes) {
    for (const std::size_t thread_num : {1, 2, 3}) {
      ThreadPool pool(thread_num);
      const std::vector<float> ones(kNumel, 1.0F);
      Elements master(DType::kFloat32, ones, 1);
      Elements exp_avg(DType::kFloat32, std::vector<float>(kNumel, 2.0F), 2);
      Elements exp_avg_sq(DType::kFloat32, std::vector<float>(kNumel, 3.0F), 3);
      const Elements gradient(gradient_dtype, std::vector<float>(kNumel, 4.0F), 1);
      Elements low(DType::kFloat16, kNumel, 5);
      const AdamSpan span{.master = static_cast<float*>(master.data()),
                          .exp_avg = static_cast<float*>(exp_avg.data()),
                          .exp_avg_sq = static_cast<float*>(exp_avg_sq.data()),
                          .gradient = gradient.data(),
                          .gradient_dtype = gradient_dtype,
                          .low_precision = low.data(),
                          .low_precision_dtype = DType::kFloat16,
                          .numel = kNumel};
      EXPECT_EQ(adam_mix_bytes(span), kNumel * (24 + dtype_bytes(gradient_dtype) + 2));
      stream_adam_mix(span, pool);
      EXPECT_EQ(master.first_difference(Elements(DType::kFloat32, std::vector<float>(kNumel, 5.0F), 0)), -1);
      EXPECT_EQ(exp_avg.first_difference(Elements(DType::kFloat32, std::vector<float>(kNumel, 6.0F), 0)), -1);
      EXPECT_EQ(exp_avg_sq.first_difference(Elements(DType::kFloat32, std::vector<float>(kNumel, 7.0F), 0)), -1);
      EXPECT_EQ(low.first_difference(Elements(DType::kFloat16, std::vector<float>(kNumel, 5.0F), 0)), -1);
      AdamSpan without = span;
      without.low_precision = nullptr;
      EXPECT_EQ(adam_mix_bytes(without), kNumel * (24 + dtype_bytes(gradient_dtype)));
      stream_adam_mix(without, pool);
      EXPECT_EQ(master.first_difference(Elements(DType::kFloat32, std::vector<float>(kNumel, 9.0F), 0)), -1);
      EXPECT_EQ(low.first_difference(Elements(DType::kFloat16, std::vector<float>(kNumel, 5.0F), 0)), -1);
    }
  }
}

TEST(Stream, TriadIsWhatItSays) {
  ThreadPool pool(2);
  for (const std::size_t numel : {0, 1, 15, 33, 5000, 9001}) {
    for (const std::size_t shift : {0, 1, 5}) {
      const Elements a(DType::kFloat32, std::vector<float>(numel, 1.5F), 1);
      const Elements b(DType::kFloat32, std::vector<float>(numel, 2.0F), 2);
      Elements destination(DType::kFloat32, numel, shift);
      stream_triad(static_cast<float*>(destination.data()), static_cast<const float*>(a.data()),
                   static_cast<const float*>(b.data()), 3.0F, numel, pool);
      EXPECT_EQ(destination.first_difference(Elements(DType::kFloat32, std::vector<float>(numel, 7.5F), 0)), -1);
    }
  }
}

}  // namespace
}  // namespace zb
