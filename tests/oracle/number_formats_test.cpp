#include "oracle/number_formats.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "support/synthetic.h"

namespace tileloss::oracle {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(NumberFormats, Float32AgreesWithTheCompiler) {
  tools::Random random(1, tools::Stream::kShapes, 0);
  for (int i = 0; i < 200000; ++i) {
    const auto bits = static_cast<std::uint32_t>(random.next_bits());
    const auto value = std::bit_cast<float>(bits);
    const double decoded = decode(NumberFormat::kFloat32, bits);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(decoded));
      continue;
    }
    EXPECT_EQ(decoded, static_cast<double>(value));
    // A double near it, or between it and its neighbour: the compiler's conversion rounds to nearest even as well.
    const double near = decoded * (1.0 + (random.next_uniform() - 0.5) * 0x1p-21);
    EXPECT_EQ(encode(NumberFormat::kFloat32, near), std::bit_cast<std::uint32_t>(static_cast<float>(near)));
  }
}

TEST(NumberFormats, EveryHalfPrecisionPatternSurvivesARoundTrip) {
  for (const NumberFormat format : {NumberFormat::kBfloat16, NumberFormat::kFloat16}) {
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
      const double value = decode(format, bits);
      if (!std::isnan(value)) {
        ASSERT_EQ(encode(format, value), bits);
      }
    }
  }
}

TEST(NumberFormats, KnownPatterns) {
  EXPECT_EQ(decode(NumberFormat::kBfloat16, 0x3f80), 1.0);
  EXPECT_EQ(decode(NumberFormat::kBfloat16, 0xc049), -3.140625);
  EXPECT_EQ(decode(NumberFormat::kBfloat16, 0x0001), 0x1p-133);
  EXPECT_EQ(decode(NumberFormat::kFloat16, 0x3c00), 1.0);
  EXPECT_EQ(decode(NumberFormat::kFloat16, 0x7bff), 65504.0);
  EXPECT_EQ(decode(NumberFormat::kFloat16, 0x0001), 0x1p-24);
  EXPECT_EQ(decode(NumberFormat::kFloat16, 0xfc00), -kInfinity);
  EXPECT_TRUE(std::isnan(decode(NumberFormat::kFloat16, 0x7e00)));
  EXPECT_TRUE(std::isnan(decode(NumberFormat::kBfloat16, 0xffff)));
  EXPECT_TRUE(std::signbit(decode(NumberFormat::kBfloat16, 0x8000)));
}

TEST(NumberFormats, BetweenNeighboursTheNearerWinsAndATieGoesToTheEvenOne) {
  for (const NumberFormat format : {NumberFormat::kBfloat16, NumberFormat::kFloat16}) {
    const std::uint32_t infinity = encode(format, kInfinity);
    for (std::uint32_t bits = 0; bits + 1 < infinity; ++bits) {
      const double low = decode(format, bits);
      const double high = decode(format, bits + 1);
      const double middle = 0.5 * (low + high);
      ASSERT_EQ(encode(format, middle), bits % 2 == 0 ? bits : bits + 1);
      ASSERT_EQ(encode(format, std::nextafter(middle, 0.0)), bits);
      ASSERT_EQ(encode(format, std::nextafter(middle, kInfinity)), bits + 1);
    }
  }
}

TEST(NumberFormats, OverflowBeginsWhereTheInfoSays) {
  for (const NumberFormat format : {NumberFormat::kFloat32, NumberFormat::kBfloat16, NumberFormat::kFloat16}) {
    const FormatInfo& info = format_info(format);
    EXPECT_EQ(decode(format, encode(format, info.overflow)), kInfinity) << info.name;
    EXPECT_LT(decode(format, encode(format, std::nextafter(info.overflow, 0.0))), kInfinity) << info.name;
    EXPECT_EQ(decode(format, encode(format, -info.overflow)), -kInfinity) << info.name;
    EXPECT_EQ(decode(format, encode(format, info.smallest_step)), info.smallest_step) << info.name;
    EXPECT_EQ(decode(format, encode(format, 0.5 * info.smallest_step)), 0.0) << info.name;
    EXPECT_EQ(decode(format, encode(format, 0.75 * info.smallest_step)), info.smallest_step) << info.name;
    EXPECT_EQ(info.smallest_step, std::ldexp(info.smallest_normal, -info.mantissa_bits)) << info.name;
  }
}

TEST(NumberFormats, RowsAreElementsOneAfterTheOther) {
  const std::vector<double> values{1.0, -2.5, 0.0, 65504.0, 1e-3};
  for (const NumberFormat format : {NumberFormat::kFloat32, NumberFormat::kBfloat16, NumberFormat::kFloat16}) {
    std::vector<unsigned char> storage(values.size() * format_info(format).bytes);
    encode_row(format, values, storage.data());
    std::vector<double> decoded(values.size());
    decode_row(format, storage.data(), decoded);
    for (std::size_t i = 0; i < values.size(); ++i) {
      EXPECT_EQ(decoded[i], decode(format, encode(format, values[i])));
      EXPECT_EQ(decoded[i], decode_at(format, storage.data(), static_cast<std::int64_t>(i)));
    }
  }
}

}  // namespace
}  // namespace tileloss::oracle
