// The 16-bit storage formats, one value at a time. Vector code converts for itself; this is for row edges and single columns.
#pragma once

#include <bit>
#include <cstdint>

namespace tileloss::impl {

struct Bfloat16 {
  std::uint16_t bits;
};

struct Float16 {
  std::uint16_t bits;
};

constexpr float to_float(float x) { return x; }

constexpr float to_float(Bfloat16 x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16); }

// The exponent is re-biased by 112. A subnormal half is taken for 2^-14 more, which a subtraction removes: there is no subnormal
// operand, which a machine that flushes (ARM's) would read as 0. Infinities and NaNs keep their payload.
constexpr float to_float(Float16 x) {
  const std::uint32_t magnitude = static_cast<std::uint32_t>(x.bits & 0x7fffu) << 13;
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
  std::uint32_t bits = magnitude + 0x38000000u;
  if (magnitude < 0x00800000u) bits = std::bit_cast<std::uint32_t>(std::bit_cast<float>(bits + 0x00800000u) - 0x1p-14f);
  if (magnitude >= 0x0f800000u) bits |= 0x7f800000u;
  return std::bit_cast<float>(bits | sign);
}

template <class T>
constexpr T from_float(float x);

template <>
constexpr float from_float<float>(float x) {
  return x;
}

// Nearest, ties to even; a NaN stays a (quiet) NaN.
template <>
constexpr Bfloat16 from_float<Bfloat16>(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  if (x != x) return {static_cast<std::uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

// Nearest, ties to even. Results below 2^-14 are rounded by an addition whose last place is the subnormal half's.
template <>
constexpr Float16 from_float<Float16>(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  std::uint32_t half = 0;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;
  } else if (magnitude >= 0x47800000u) {  // 65536 and above
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {
    half = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return {static_cast<std::uint16_t>(half | sign)};
}

}  // namespace tileloss::impl
