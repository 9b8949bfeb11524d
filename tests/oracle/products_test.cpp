// The oracle's products against plain loops.
#include "oracle/products.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "support/synthetic.h"

namespace tileloss::oracle {
namespace {

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

template <typename T>
std::vector<T> random_values(std::int64_t count, std::int64_t stream) {
  tools::Random random(7, tools::Stream::kLogits, stream);
  std::vector<T> values(index(count));
  for (T& value : values) value = static_cast<T>(random.next_normal());
  return values;
}

// Sizes around the tiles (4 x 6, 4 x 12, 4 x 24) and around the blocks (192, 256).
TEST(Products, AreThoseOfAPlainLoopAtEverySize) {
  for (const auto& [rows, depth, cols] : std::vector<std::array<std::int64_t, 3>>{
           {1, 1, 1}, {3, 7, 5}, {4, 256, 192}, {5, 257, 193}, {9, 300, 25}, {257, 3, 13}, {2, 1, 400}, {0, 4, 4}, {4, 0, 4}}) {
    SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(depth) + " x " + std::to_string(cols));
    const std::vector<double> a = random_values<double>(rows * depth, 1);
    const std::vector<float> b = random_values<float>(depth * cols, 2);
    for (const bool transposed : {false, true}) {
      const View<double> a_view = transposed ? View<double>{a.data(), 1, rows} : View<double>{a.data(), depth, 1};
      const View<float> b_view = transposed ? View<float>{b.data(), 1, depth} : View<float>{b.data(), cols, 1};
      const std::int64_t stride = cols + 3;
      std::vector<double> c(index(rows * stride), 2.0);
      std::vector<float> c_float(index(rows * stride), 2.0F);
      add_product({rows, depth, cols}, a_view, b_view, c.data(), stride);
      add_product({rows, depth, cols}, a_view, b_view, c_float.data(), stride);
      for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t j = 0; j < stride; ++j) {
          double expected = 2, size = 2;
          for (std::int64_t k = 0; k < depth && j < cols; ++k) {
            expected += a_view.at(i, k) * b_view.at(k, j);
            size += std::fabs(a_view.at(i, k) * b_view.at(k, j));
          }
          ASSERT_NEAR(c[index(i * stride + j)], expected, 1e-15 * size) << i << " " << j;
          ASSERT_NEAR(c_float[index(i * stride + j)], expected, 1e-6 * size) << i << " " << j;
        }
      }
    }
  }
}

TEST(Products, WorkIsSplitWithoutGapOrOverlap) {
  for (const int threads : {1, 2, 3, 16}) {
    for (const std::int64_t count : {0, 1, 63, 64, 65, 1000}) {
      std::vector<int> seen(index(count), 0);
      split_work(threads, count, 64, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) ++seen[index(i)];
      });
      EXPECT_EQ(std::accumulate(seen.begin(), seen.end(), 0), count);
      for (const int times : seen) ASSERT_EQ(times, 1);
    }
  }
}

}  // namespace
}  // namespace tileloss::oracle
