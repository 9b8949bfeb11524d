#include "oracle/number_formats.h"

#include <bit>
#include <cstring>

namespace tileloss::oracle {
namespace {

constexpr int kDoubleMantissaBits = 52;
constexpr int kDoubleBias = 1023;
constexpr std::uint64_t kDoubleHiddenBit = 1ULL << kDoubleMantissaBits;

// An IEEE 754 style binary format: a sign bit, kExponentBits, kMantissaBits.
template <typename Storage, int kExponentBits, int kMantissaBits>
struct Codec {
  using Bits = Storage;
  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  static constexpr int kMinExponent = 1 - kBias;
  static constexpr int kSignShift = kExponentBits + kMantissaBits;
  static constexpr std::uint32_t kExponentMask = (1U << kExponentBits) - 1;
  static constexpr std::uint32_t kMantissaMask = (1U << kMantissaBits) - 1;
  static constexpr std::uint32_t kInfinity = kExponentMask << kMantissaBits;

  static double decode(std::uint32_t bits) {
    const std::uint64_t sign = static_cast<std::uint64_t>((bits >> kSignShift) & 1U) << 63;
    const std::uint32_t exponent = (bits >> kMantissaBits) & kExponentMask;
    const std::uint64_t mantissa = bits & kMantissaMask;
    if (exponent == 0) {  // zero or subnormal: a multiple of the smallest step, itself a normal double
      const std::uint64_t step = static_cast<std::uint64_t>(kMinExponent - kMantissaBits + kDoubleBias) << kDoubleMantissaBits;
      const double magnitude = static_cast<double>(mantissa) * std::bit_cast<double>(step);
      return sign != 0 ? -magnitude : magnitude;
    }
    const std::uint64_t widened = mantissa << (kDoubleMantissaBits - kMantissaBits);
    const std::uint64_t biased =
        exponent == kExponentMask ? 2ULL * kDoubleBias + 1 : static_cast<std::uint64_t>(exponent) + kDoubleBias - kBias;
    return std::bit_cast<double>(sign | (biased << kDoubleMantissaBits) | widened);
  }

  static std::uint32_t encode(double value) {
    const auto bits = std::bit_cast<std::uint64_t>(value);
    const std::uint32_t sign = static_cast<std::uint32_t>(bits >> 63) << kSignShift;
    const auto biased = static_cast<int>((bits >> kDoubleMantissaBits) & 0x7ff);
    const std::uint64_t fraction = bits & (kDoubleHiddenBit - 1);
    if (biased == 0x7ff) return sign | (fraction != 0 ? kInfinity | (1U << (kMantissaBits - 1)) : kInfinity);
    if (biased == 0) return sign;  // a subnormal double is far below half the smallest step of every format here
    const int exponent = biased - kDoubleBias;
    const int below = exponent < kMinExponent ? kMinExponent - exponent : 0;
    const int shift = kDoubleMantissaBits - kMantissaBits + below;
    if (shift > kDoubleMantissaBits + 1) return sign;  // less than half the smallest step
    const std::uint64_t significand = kDoubleHiddenBit | fraction;
    const std::uint64_t rest = significand & ((1ULL << shift) - 1);
    const std::uint64_t half = 1ULL << (shift - 1);
    std::uint64_t quotient = significand >> shift;
    if (rest > half || (rest == half && (quotient & 1) != 0)) ++quotient;
    // A carry out of the mantissa moves the exponent up by itself, from subnormal to normal too.
    const std::uint64_t base = below > 0 ? 0 : static_cast<std::uint64_t>(exponent + kBias - 1) << kMantissaBits;
    const std::uint64_t result = base + quotient;
    return sign | (result >= kInfinity ? kInfinity : static_cast<std::uint32_t>(result));
  }

  static double load(const void* row, std::size_t index) {
    Bits bits;
    std::memcpy(&bits, static_cast<const char*>(row) + index * sizeof(Bits), sizeof(Bits));
    return decode(bits);
  }

  static void store(void* row, std::size_t index, double value) {
    const auto bits = static_cast<Bits>(encode(value));
    std::memcpy(static_cast<char*>(row) + index * sizeof(Bits), &bits, sizeof(Bits));
  }
};

using Float32 = Codec<std::uint32_t, 8, 23>;
using Bfloat16 = Codec<std::uint16_t, 8, 7>;
using Float16 = Codec<std::uint16_t, 5, 10>;

template <typename Function>
auto with_codec(NumberFormat format, Function&& function) {
  if (format == NumberFormat::kBfloat16) return function(Bfloat16{});
  if (format == NumberFormat::kFloat16) return function(Float16{});
  return function(Float32{});
}

}  // namespace

const FormatInfo& format_info(NumberFormat format) {
  static constexpr FormatInfo kFloat32{"float32", 4, 23, 0x1p-126, 0x1p-149, 0x1.ffffffp+127};
  static constexpr FormatInfo kBfloat16{"bfloat16", 2, 7, 0x1p-126, 0x1p-133, 0x1.ffp+127};
  static constexpr FormatInfo kFloat16{"float16", 2, 10, 0x1p-14, 0x1p-24, 65520.0};
  if (format == NumberFormat::kBfloat16) return kBfloat16;
  if (format == NumberFormat::kFloat16) return kFloat16;
  return kFloat32;
}

double decode(NumberFormat format, std::uint32_t bits) {
  return with_codec(format, [&](auto codec) { return decltype(codec)::decode(bits); });
}

std::uint32_t encode(NumberFormat format, double value) {
  return with_codec(format, [&](auto codec) { return decltype(codec)::encode(value); });
}

void decode_row(NumberFormat format, const void* row, std::span<double> out) {
  with_codec(format, [&](auto codec) {
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = decltype(codec)::load(row, i);
  });
}

void encode_row(NumberFormat format, std::span<const double> values, void* row) {
  with_codec(format, [&](auto codec) {
    for (std::size_t i = 0; i < values.size(); ++i) decltype(codec)::store(row, i, values[i]);
  });
}

double decode_at(NumberFormat format, const void* row, std::int64_t index) {
  return with_codec(format, [&](auto codec) { return decltype(codec)::load(row, static_cast<std::size_t>(index)); });
}

void encode_at(NumberFormat format, void* row, std::int64_t index, double value) {
  with_codec(format, [&](auto codec) { decltype(codec)::store(row, static_cast<std::size_t>(index), value); });
}

}  // namespace tileloss::oracle
