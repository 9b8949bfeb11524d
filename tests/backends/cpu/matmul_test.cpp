// The matrix products of each instruction set against a double loop: every awkward size, storage type and layout, on memory
// between guard pages.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/number_formats.h"
#include "tests/backends/cpu/packed_matrices.h"

namespace tileloss::test {
namespace {

using impl::Bfloat16;
using impl::from_float;
using impl::to_float;

constexpr std::array<std::int64_t, 10> kSizes{1, 2, 7, 15, 16, 17, 31, 33, 64, 100};
struct ProductSpec {
  std::int64_t m = 17, n = 33, depth = 31;
  MatrixSpec a, b;
  Compute compute = Compute::kFloat32;
  bool accumulate = false;
  Flush flush = Flush::kRight;  // of c
};

std::string describe(const ProductSpec& s) {
  const auto matrix = [](const MatrixSpec& x) {
    return std::string(oracle::format_info(x.format).name) + " layout " + std::to_string(static_cast<int>(x.layout));
  };
  return std::to_string(s.m) + "x" + std::to_string(s.n) + "x" + std::to_string(s.depth) + ", " + matrix(s.a) + " by " +
         matrix(s.b) + (s.compute == Compute::kBfloat16 ? " in bfloat16" : " in float32") + (s.accumulate ? " accumulated" : "") +
         (s.a.values == Values::kSmallIntegers ? ", integers" : "");
}

// Sums of integers are exact; others may be rounded once a step, and once more when they are added to c.
testing::AssertionResult agrees(const ProductSpec& s) {
  Matrix a(s.a, s.m, s.depth), b(s.b, s.n, s.depth);
  a.make_read_only();
  b.make_read_only();
  const tools::GuardBuffer left = pack(Side::kLeft, a, s.compute), right = pack(Side::kRight, b, s.compute);
  const std::int64_t stride = s.n + 3;
  const auto before = [](std::int64_t i, std::int64_t j) { return static_cast<float>((i * 5 + j) % 11 - 5); };
  const tools::GuardBuffer c(static_cast<std::size_t>((s.m - 1) * stride + s.n) * sizeof(float), s.flush);
  if (s.accumulate) {
    for (std::int64_t i = 0; i < s.m; ++i) {
      for (std::int64_t j = 0; j < s.n; ++j) c.as<float>()[i * stride + j] = before(i, j);
    }
  }
  table().multiply(left.as<float>(), right.as<float>(), s.m, s.n, s.depth, s.compute, c.as<float>(), stride,
                   s.accumulate ? Store::kAdd : Store::kReplace);

  for (std::int64_t i = 0; i < s.m; ++i) {
    for (std::int64_t j = 0; j < (i + 1 < s.m ? stride : s.n); ++j) {
      const float got = c.as<float>()[i * stride + j];
      if (j >= s.n) {
        if (!std::isnan(got)) return testing::AssertionFailure() << describe(s) << ": wrote behind row " << i;
        continue;
      }
      const double old = s.accumulate ? before(i, j) : 0;
      double sum = 0, magnitude = 0;
      for (std::int64_t k = 0; k < s.depth; ++k) {
        const double x = a.at(i, k, s.compute) * b.at(j, k, s.compute);
        sum += x;
        magnitude += std::abs(x);
      }
      const bool exact = s.a.values == Values::kSmallIntegers && s.b.values == Values::kSmallIntegers;
      const double steps = static_cast<double>(2 * s.depth);  // without a fused multiply-add two roundings a step
      const double bound = exact ? 0 : 0x1p-24 * (steps * magnitude + std::abs(old + sum)) + 1e-37;
      if (!(std::abs(got - (old + sum)) <= bound)) {
        return testing::AssertionFailure() << describe(s) << ": c[" << i << "," << j << "] is " << got << ", not " << old + sum
                                           << " +- " << bound;
      }
    }
  }
  return testing::AssertionSuccess();
}

// Every size; storage, layout and the rest are drawn.
TEST(Matmul, AgreesWithADoubleLoopAtEverySize) {
  std::uint64_t turn = 0;
  for (const std::int64_t m : kSizes) {
    for (const std::int64_t n : kSizes) {
      for (const std::int64_t depth : kSizes) {
        Random random(++turn, Stream::kShapes, 0);
        const auto draw = [&](const auto& from) { return from[static_cast<std::size_t>(random.next_below(std::ssize(from)))]; };
        const Values values = turn % 2 == 0 ? Values::kSmallIntegers : Values::kNormal;
        ProductSpec spec;
        spec.m = m, spec.n = n, spec.depth = depth;
        spec.a = {draw(kFormats), draw(kLayouts), values, draw(kFlushes), 2 * turn};
        spec.b = {draw(kFormats), draw(kLayouts), values, draw(kFlushes), 2 * turn + 1};
        spec.compute = draw(kComputes);
        spec.accumulate = random.next_below(2) == 0;
        spec.flush = draw(kFlushes);
        ASSERT_TRUE(agrees(spec));
      }
    }
  }
}

// More panels of the right operand than stay in L2 at a time.
TEST(Matmul, AgreesInSeveralBlocksOfPanels) {
  for (const std::int64_t depth : {500, 1400}) {
    ProductSpec spec;
    spec.m = 11, spec.n = 150, spec.depth = depth;
    spec.a.seed = 7, spec.b.seed = 8;
    ASSERT_TRUE(agrees(spec));
    spec.compute = Compute::kBfloat16;
    spec.accumulate = true;
    ASSERT_TRUE(agrees(spec));
  }
}

// Every combination of storage and layout at sizes that no tile divides.
TEST(Matmul, AgreesForEveryStorageAndLayout) {
  std::uint64_t turn = 0;
  for (const NumberFormat a_format : kFormats) {
    for (const NumberFormat b_format : kFormats) {
      for (const Layout a_layout : kLayouts) {
        for (const Layout b_layout : kLayouts) {
          for (const Compute compute : kComputes) {
            for (const Values values : {Values::kSmallIntegers, Values::kNormal}) {
              ++turn;
              ProductSpec spec;
              spec.m = 13, spec.n = 61, spec.depth = 37;
              spec.compute = compute;
              spec.accumulate = turn % 3 == 0;
              spec.a = {a_format, a_layout, values, kFlushes[turn % 2], turn};
              spec.b = {b_format, b_layout, values, kFlushes[turn / 2 % 2], turn + 1000};
              ASSERT_TRUE(agrees(spec));
            }
          }
        }
      }
    }
  }
}

// What a schedule packs is part of a matrix: blocks of it, at any row and k, give the bits of the same block packed from a matrix
// of its own.
TEST(Matmul, PacksAnyPartOfAMatrix) {
  for (const NumberFormat format : kFormats) {
    for (const Layout layout : kLayouts) {
      for (const Compute compute : kComputes) {
        for (const Side side : {Side::kLeft, Side::kRight}) {
          const Matrix whole({.format = format, .layout = layout, .seed = 3}, 70, 45);
          constexpr std::int64_t kRow = 9, kRows = 51, kK = 5, kDepth = 38;
          Matrix part({.format = format, .layout = layout}, kRows, kDepth);
          for (std::int64_t i = 0; i < kRows; ++i) {
            for (std::int64_t k = 0; k < kDepth; ++k) part.set(i, k, whole.at(kRow + i, kK + k, Compute::kFloat32));
          }
          const tools::GuardBuffer expected = pack(side, part, compute);
          const tools::GuardBuffer got = pack(side, whole.operand(), kRow, kRows, kK, kDepth, compute);
          const std::int64_t panel = side == Side::kLeft ? table().a_panel : table().b_panel;
          const std::int64_t floats = (kRows + panel - 1) / panel * panel * table().words(kDepth, compute);
          ASSERT_EQ(std::memcmp(expected.data(), got.data(), static_cast<std::size_t>(floats) * sizeof(float)), 0)
              << oracle::format_info(format).name << " layout " << static_cast<int>(layout);
        }
      }
    }
  }
}

// Rounded while packed: 1 times x, summed alone, shows it.
TEST(Matmul, RoundsOperandsToNearestEven) {
  std::vector<float> values{0.0f,
                            -0.0f,
                            1.0f,
                            0x1.01p0f,
                            0x1.03p0f,
                            0x1.010002p0f,
                            0x1.00fffep0f,
                            -0x1.03p0f,
                            0x1.fep0f,
                            0x1.ffp0f,
                            0x1p-126f,
                            0x1.fdp127f,
                            0x1.fefffep127f,
                            0x1.ffp127f,
                            std::numeric_limits<float>::max(),
                            INFINITY,
                            -INFINITY};
  const Random random(5, Stream::kLogits, 0);
  for (std::uint64_t k = 0; values.size() < 300; ++k) {
    const float x = std::bit_cast<float>(static_cast<std::uint32_t>(random.bits(k)));
    if (std::isnormal(x)) values.push_back(x);
  }
  const auto count = static_cast<std::int64_t>(values.size());
  Matrix one({}, 1, 1);
  one.set(0, 0, 1);
  for (const Layout layout : {Layout::kAlongK, Layout::kAlongRows}) {
    for (const Side side : {Side::kLeft, Side::kRight}) {
      Matrix x({.layout = layout}, count, 1);
      for (std::int64_t i = 0; i < count; ++i) x.set(i, 0, values[static_cast<std::size_t>(i)]);
      const std::vector<float> got =
          side == Side::kLeft ? product(x, one, Compute::kBfloat16) : product(one, x, Compute::kBfloat16);
      for (std::size_t i = 0; i < values.size(); ++i) {
        ASSERT_EQ(got[i], to_float(from_float<Bfloat16>(values[i]))) << std::hexfloat << values[i];
      }
    }
  }
}

// Whatever their payload: rounding by addition would make some of these an infinity or 0.
TEST(Matmul, KeepsEveryNaN) {
  const std::vector<std::uint32_t> floats{0x7f800001, 0x7fc00000, 0x7fffffff, 0xff800001, 0xffc00000, 0xffffffff, 0x7f80ffff};
  const std::vector<std::uint16_t> halves{0x7c01, 0x7e00, 0x7fff, 0xfc01, 0xffff};
  Matrix one({}, 1, 1);
  one.set(0, 0, 1);
  const auto expect_nans = [&](const void* data, impl::cpu::StorageType storage, std::size_t count) {
    const auto rows = static_cast<std::int64_t>(count);
    const Operand x{data, storage, 1, 1};
    for (const Compute compute : kComputes) {
      const tools::GuardBuffer left = pack(Side::kLeft, x, 0, rows, 0, 1, compute), right = pack(Side::kRight, one, compute);
      std::vector<float> c(count, 0.0f);
      table().multiply(left.as<float>(), right.as<float>(), rows, 1, 1, compute, c.data(), 1, Store::kReplace);
      for (const float value : c) EXPECT_TRUE(std::isnan(value)) << value << " of storage " << storage;
    }
  };
  expect_nans(floats.data(), impl::cpu::kStorageFloat32, floats.size());
  expect_nans(halves.data(), impl::cpu::kStorageFloat16, halves.size());
}

TEST(Matmul, NaNAndInfinityReachTheirRowOrColumnAlone) {
  constexpr std::int64_t kM = 19, kN = 50, kDepth = 21, kBadRow = 17, kBadColumn = 49;
  for (const Compute compute : kComputes) {
    for (const double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
      Matrix a({.seed = 11}, kM, kDepth), b({.layout = Layout::kAlongRows, .seed = 12}, kN, kDepth);
      const std::vector<float> clean = product(a, b, compute);
      a.set(kBadRow, kDepth - 1, bad);
      b.set(kBadColumn, 0, bad);
      const std::vector<float> c = product(a, b, compute);
      for (std::int64_t i = 0; i < kM; ++i) {
        for (std::int64_t j = 0; j < kN; ++j) {
          const auto at = static_cast<std::size_t>(i * kN + j);
          if (i != kBadRow && j != kBadColumn) {
            ASSERT_EQ(c[at], clean[at]);
            continue;
          }
          double expected = 0;
          for (std::int64_t k = 0; k < kDepth; ++k) expected += a.at(i, k, compute) * b.at(j, k, compute);
          ASSERT_FALSE(std::isfinite(expected));
          ASSERT_TRUE(std::isnan(expected) ? std::isnan(c[at]) : c[at] == expected) << c[at] << " not " << expected;
        }
      }
    }
  }
}

// VDPBF16PS flushes, the others do as the control word says, which here keeps subnormal numbers.
TEST(Matmul, FlushesSubnormalSumsOfPairsAlone) {
  Matrix a({}, 1, 1), b({}, 1, 1);
  a.set(0, 0, 0x1p-100);
  b.set(0, 0, 0x1p-30);
  EXPECT_EQ(product(a, b, Compute::kFloat32)[0], 0x1p-130f);
  EXPECT_EQ(product(a, b, Compute::kBfloat16)[0], table().bfloat16_in_word == 2 ? 0.0f : 0x1p-130f);
}

// A product's bits do not depend on how many rows and columns are computed with it, nor on its place among them.
TEST(Matmul, BitsDoNotDependOnTheRestOfTheTile) {
  constexpr std::int64_t kM = 40, kN = 110, kDepth = 77;
  for (const Compute compute : kComputes) {
    const Matrix a({.seed = 21}, kM, kDepth), b({.seed = 22}, kN, kDepth);
    const std::vector<float> whole = product(a, b, compute);
    for (std::int64_t rows = 1; rows <= 17; ++rows) {
      for (const std::int64_t columns : {1, 5, 12, 15, 16, 17, 30, 33, 48, 49}) {
        const std::int64_t row = rows * 5 % (kM - rows), column = columns * 7 % (kN - columns);
        const tools::GuardBuffer left = pack(Side::kLeft, a.operand(), row, rows, 0, kDepth, compute);
        const tools::GuardBuffer right = pack(Side::kRight, b.operand(), column, columns, 0, kDepth, compute);
        std::vector<float> c(static_cast<std::size_t>(rows * columns));
        table().multiply(left.as<float>(), right.as<float>(), rows, columns, kDepth, compute, c.data(), columns, Store::kReplace);
        for (std::int64_t i = 0; i < rows; ++i) {
          for (std::int64_t j = 0; j < columns; ++j) {
            ASSERT_EQ(std::bit_cast<std::uint32_t>(c[static_cast<std::size_t>(i * columns + j)]),
                      std::bit_cast<std::uint32_t>(whole[static_cast<std::size_t>((row + i) * kN + column + j)]))
                << rows << "x" << columns << " at " << row << "," << column;
          }
        }
      }
    }
  }
}

// Of ones: every product and every repeat is in the sum.
TEST(Matmul, TheTileLoopDoesAllItsWork) {
  for (const Compute compute : kComputes) {
    const MatmulTable& t = table();
    constexpr std::int64_t kDepth = 12, kRepeats = 5;
    Matrix a({}, t.a_panel, kDepth), b({}, t.b_panel, kDepth);
    for (Matrix* const x : {&a, &b}) {
      for (std::int64_t i = 0; i < x->rows(); ++i) {
        for (std::int64_t k = 0; k < kDepth; ++k) x->set(i, k, 1);
      }
    }
    const tools::GuardBuffer left = pack(Side::kLeft, a, compute), right = pack(Side::kRight, b, compute);
    EXPECT_EQ(t.tile_loop(left.as<float>(), right.as<float>(), kDepth, kRepeats, compute),
              static_cast<float>(t.a_panel * t.b_panel * kDepth * kRepeats));
  }
}

}  // namespace
}  // namespace tileloss::test
