// Every 16-bit pattern, and every place where a conversion from float32 can go wrong, against the oracle's integer arithmetic.
#include "core/number_formats.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "oracle/number_formats.h"
#include "support/synthetic.h"

namespace tileloss::test {
namespace {

using impl::Bfloat16;
using impl::Float16;
using impl::from_float;
using impl::to_float;

using oracle::NumberFormat;

template <class T>
constexpr NumberFormat kFormatOf = NumberFormat::kFloat32;
template <>
constexpr NumberFormat kFormatOf<Bfloat16> = NumberFormat::kBfloat16;
template <>
constexpr NumberFormat kFormatOf<Float16> = NumberFormat::kFloat16;

template <class T>
class HalfFormat : public testing::Test {};
using HalfFormats = testing::Types<Bfloat16, Float16>;
TYPED_TEST_SUITE(HalfFormat, HalfFormats);

// NaN payloads are not kept by the oracle: only that both are NaN.
template <class T>
testing::AssertionResult rounds_as_oracle(float x) {
  const std::uint32_t expected = oracle::encode(kFormatOf<T>, static_cast<double>(x));
  const T stored = from_float<T>(x);
  if (std::isnan(x) ? std::isnan(to_float(stored)) : stored.bits == expected) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "from " << std::hexfloat << x << ": " << std::hex << stored.bits << ", not " << expected;
}

TYPED_TEST(HalfFormat, ReadsEveryPatternAsTheOracleDoesAndStoresItAgain) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = to_float(TypeParam{static_cast<std::uint16_t>(bits)});
    const double expected = oracle::decode(kFormatOf<TypeParam>, bits);
    const TypeParam after = from_float<TypeParam>(value);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(value) && std::isnan(to_float(after))) << std::hex << bits;
    } else {
      EXPECT_EQ(static_cast<double>(value), expected) << std::hex << bits;
      EXPECT_EQ(after.bits, bits);
      EXPECT_EQ(std::signbit(value), (bits & 0x8000U) != 0) << std::hex << bits;
    }
  }
}

// The value between a pattern and the next one, and its two float32 neighbours: halfway cases go to the even pattern.
TYPED_TEST(HalfFormat, RoundsToNearestAndTiesToEven) {
  const auto infinity = from_float<TypeParam>(std::numeric_limits<float>::infinity()).bits;
  for (std::uint32_t bits = 0; bits < infinity; ++bits) {
    const double low = oracle::decode(kFormatOf<TypeParam>, bits);
    const double step = bits + 1U < infinity ? oracle::decode(kFormatOf<TypeParam>, bits + 1U) - low
                                             : low - oracle::decode(kFormatOf<TypeParam>, bits - 1U);
    const auto halfway = static_cast<float>(low + step / 2);
    ASSERT_EQ(static_cast<double>(halfway), low + step / 2);
    const std::uint32_t even = bits + (bits & 1U);
    for (const float sign : {1.0F, -1.0F}) {
      const std::uint32_t sign_bit = sign < 0 ? 0x8000U : 0U;
      ASSERT_EQ(from_float<TypeParam>(sign * halfway).bits, even | sign_bit) << std::hex << bits;
      const float below = std::nextafter(halfway, 0.0F), above = std::nextafter(halfway, std::numeric_limits<float>::infinity());
      ASSERT_EQ(from_float<TypeParam>(sign * below).bits, bits | sign_bit) << std::hex << bits;
      ASSERT_EQ(from_float<TypeParam>(sign * above).bits, (bits + 1U) | sign_bit) << std::hex << bits;
    }
  }
}

TYPED_TEST(HalfFormat, RoundsRandomPatternsAsTheOracleDoes) {
  tools::Random random(7, tools::Stream::kShapes, 0);
  for (int i = 0; i < 1000000; ++i) {
    ASSERT_TRUE(rounds_as_oracle<TypeParam>(std::bit_cast<float>(static_cast<std::uint32_t>(random.next_bits()))));
  }
}

TYPED_TEST(HalfFormat, KeepsNansInfinitiesAndSignedZeros) {
  // A NaN whose payload sits in the bits that are cut off must not become an infinity.
  for (const std::uint32_t bits : {0x7f800001U, 0xff800001U, 0x7f80ffffU, 0x7fc00000U, 0x7fffffffU, 0xffffffffU}) {
    EXPECT_TRUE(std::isnan(to_float(from_float<TypeParam>(std::bit_cast<float>(bits))))) << std::hex << bits;
  }
  constexpr float kInf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(to_float(from_float<TypeParam>(kInf)), kInf);
  EXPECT_EQ(to_float(from_float<TypeParam>(-kInf)), -kInf);
  EXPECT_EQ(from_float<TypeParam>(0.0F).bits, 0);
  EXPECT_EQ(from_float<TypeParam>(-0.0F).bits, 0x8000);
  EXPECT_EQ(to_float(from_float<TypeParam>(std::numeric_limits<float>::max())), kInf);
}

TEST(Float32, IsStoredAsItIs) {
  for (const std::uint32_t bits : {0U, 1U, 0x80000000U, 0x3f800001U, 0x7f7fffffU, 0x7f800000U}) {
    const auto x = std::bit_cast<float>(bits);
    EXPECT_EQ(std::bit_cast<std::uint32_t>(to_float(from_float<float>(x))), bits);
  }
}

}  // namespace
}  // namespace tileloss::test
