// Low-precision number formats, decoded and encoded by integer arithmetic on their fields: the oracle's own reading of the
// bits, independent of the kernels' conversions and of the floating-point control word.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tileloss::oracle {

enum class NumberFormat { kFloat32, kBfloat16, kFloat16 };

// What the error metric needs to know of a format.
struct FormatInfo {
  const char* name;  // "float32", "bfloat16", "float16"
  std::size_t bytes;
  int mantissa_bits;       // stored: 23, 7, 10
  double smallest_normal;  // 2^-126, 2^-126, 2^-14
  double smallest_step;    // spacing of the subnormal numbers
  double overflow;         // the least magnitude that rounds to infinity
};

const FormatInfo& format_info(NumberFormat format);

// The exact value. NaN stays NaN (payloads are not kept).
double decode(NumberFormat format, std::uint32_t bits);
// Nearest even, subnormal results included; overflow gives infinity.
std::uint32_t encode(NumberFormat format, double value);

// out.size() elements from / to contiguous storage of the format.
void decode_row(NumberFormat format, const void* row, std::span<double> out);
void encode_row(NumberFormat format, std::span<const double> values, void* row);

double decode_at(NumberFormat format, const void* row, std::int64_t index);
void encode_at(NumberFormat format, void* row, std::int64_t index, double value);

}  // namespace tileloss::oracle
