// Where products and their operands go: stores around the caches, blocks packed part by part, sums rounded into outputs.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "tests/backends/cpu/packed_matrices.h"

namespace tileloss::test {
namespace {

// Around the caches or not, on a line's boundary or not: the same bits, and nothing beyond them.
TEST(Matmul, StreamsTheSameBits) {
  for (const std::int64_t n : {48, 96, 110}) {
    for (const std::int64_t m : {8, 13}) {
      const Matrix a({.seed = 31}, m, 40), b({.seed = 32}, n, 40);
      for (const Compute compute : kComputes) {
        const std::vector<float> expected = product(a, b, compute);
        const tools::GuardBuffer left = pack(Side::kLeft, a, compute), right = pack(Side::kRight, b, compute);
        for (const std::int64_t stride : {n, (n + 15) / 16 * 16}) {
          for (const std::size_t misalignment : {0, 4, 32, 64}) {
            const tools::GuardBuffer c(static_cast<std::size_t>((m - 1) * stride + n) * sizeof(float), Flush::kLeft,
                                       misalignment);
            table().multiply(left.as<float>(), right.as<float>(), m, n, a.depth(), compute, c.as<float>(), stride,
                             Store::kStream);
            for (std::int64_t i = 0; i < m; ++i) {
              ASSERT_EQ(std::memcmp(c.as<float>() + i * stride, &expected[static_cast<std::size_t>(i * n)],
                                    static_cast<std::size_t>(n) * sizeof(float)),
                        0)
                  << m << "x" << n << " stride " << stride << " misalignment " << misalignment << " row " << i;
              for (std::int64_t j = n; j < stride && i + 1 < m; ++j) ASSERT_TRUE(std::isnan(c.as<float>()[i * stride + j]));
            }
            ASSERT_TRUE(c.canary_intact());
          }
        }
      }
    }
  }
}

// A block whose k are packed in two calls is the block packed in one.
TEST(Matmul, PacksABlockPartByPart) {
  const MatmulTable& t = table();
  constexpr std::int64_t kRows = 101, kDepth = 171;
  for (const NumberFormat format : kFormats) {
    for (const Layout layout : kLayouts) {
      for (const Compute compute : kComputes) {
        const Matrix x({.format = format, .layout = layout, .seed = 4}, kRows, kDepth);
        for (const Side side : {Side::kLeft, Side::kRight}) {
          const std::int64_t panel = side == Side::kLeft ? t.a_panel : t.b_panel;
          const tools::GuardBuffer expected = pack(side, x, compute);
          const tools::GuardBuffer got(expected.bytes(), Flush::kRight);
          const std::int64_t words = t.words(kDepth, compute);
          for (const std::int64_t k : {0, 64, 128}) {
            (side == Side::kLeft ? t.pack_a_part : t.pack_b_part)(x.operand(), 0, kRows, k,
                                                                  std::min<std::int64_t>(64, kDepth - k), compute,
                                                                  got.as<float>(), t.words(k, compute), words);
          }
          const std::int64_t floats = (kRows + panel - 1) / panel * panel * words;
          ASSERT_EQ(std::memcmp(expected.data(), got.data(), static_cast<std::size_t>(floats) * sizeof(float)), 0)
              << oracle::format_info(format).name << " layout " << static_cast<int>(layout);
        }
      }
    }
  }
}

// Sums into an output of any type and layout: what is rounded one by one is expected, to the bit, and nothing else is touched.
TEST(Matmul, WritesSumsRoundedOnce) {
  constexpr std::int64_t kRows = 5, kSumsStride = 103, kFirst = 2;
  std::vector<float> sums(kRows * kSumsStride);
  for (std::size_t i = 0; i < sums.size(); ++i) {
    sums[i] = static_cast<float>(Random(9, Stream::kLogits, 0).normal(i) * std::exp2(static_cast<double>(i % 20) - 10));
  }
  sums[1] = 0x1.01p0f, sums[2] = 0x1.03p0f, sums[3] = -0.0f, sums[4] = INFINITY, sums[5] = -1e30f;
  sums[6] = std::bit_cast<float>(0x7f800001u), sums[7] = std::bit_cast<float>(0xffffffffu);
  for (const NumberFormat format : kFormats) {
    for (const std::int64_t columns : {1, 15, 32, 64, 100}) {
      for (const Layout layout : {Layout::kAlongK, Layout::kAlongRows, Layout::kStrided}) {
        for (const bool adds : {false, true}) {
          const auto bytes = static_cast<std::int64_t>(oracle::format_info(format).bytes);
          const std::int64_t row_stride = layout == Layout::kAlongRows ? 1
                                          : layout == Layout::kStrided ? 2 * columns + 1
                                                                       : 64 + columns / 65 * 64;
          const std::int64_t col_stride = layout == Layout::kAlongRows ? kFirst + kRows : layout == Layout::kStrided ? 2 : 1;
          const std::int64_t elements = (kFirst + kRows - 1) * row_stride + (columns - 1) * col_stride + 1;
          const tools::GuardBuffer got(static_cast<std::size_t>(elements * bytes), Flush::kLeft);
          std::vector<bool> written(static_cast<std::size_t>(elements));
          const auto at = [&](std::int64_t i, std::int64_t j) { return (kFirst + i) * row_stride + j * col_stride; };
          const auto old = [](std::int64_t i, std::int64_t j) { return static_cast<double>((i * 3 + j) % 7) - 3; };
          for (std::int64_t i = 0; i < kRows; ++i) {
            for (std::int64_t j = 0; j < columns; ++j) {
              written[static_cast<std::size_t>(at(i, j))] = true;
              if (adds) oracle::encode_at(format, got.data(), at(i, j), old(i, j));
            }
          }
          table().write(sums.data(), kSumsStride, kRows, columns, {got.data(), storage_of(format), row_stride, col_stride},
                        kFirst, adds);
          for (std::int64_t i = 0; i < kRows; ++i) {
            for (std::int64_t j = 0; j < columns; ++j) {
              const float sum = sums[static_cast<std::size_t>(i * kSumsStride + j)];
              const double value = adds ? static_cast<double>(static_cast<float>(old(i, j)) + sum) : sum;
              const double wanted = oracle::decode(format, oracle::encode(format, value));
              const double is = oracle::decode_at(format, got.data(), at(i, j));
              ASSERT_TRUE(std::isnan(wanted) ? std::isnan(is) : is == wanted && std::signbit(is) == std::signbit(wanted))
                  << oracle::format_info(format).name << " [" << i << "," << j << "]: " << is << ", not " << wanted;
            }
          }
          for (std::int64_t e = 0; e < elements; ++e) {
            if (written[static_cast<std::size_t>(e)]) continue;
            ASSERT_TRUE(std::isnan(oracle::decode_at(format, got.data(), e)));
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace tileloss::test
