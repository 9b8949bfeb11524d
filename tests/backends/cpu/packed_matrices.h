// What the suites of the products share: matrices between guard pages, packed and multiplied.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "backends/cpu/isa/isa.h"
#include "judge/strict/guard_buffer.h"
#include "oracle/number_formats.h"
#include "support/synthetic.h"
#include "tests/shared/input_families.h"

namespace tileloss::test {

using impl::cpu::Compute;
using impl::cpu::MatmulTable;
using impl::cpu::Operand;
using impl::cpu::Store;
using oracle::NumberFormat;
using tools::Random;
using tools::Stream;

inline constexpr std::array<Compute, 2> kComputes{Compute::kFloat32, Compute::kBfloat16};
enum class Layout { kAlongK, kAlongRows, kStrided, kBackwards };
inline constexpr std::array<Layout, 4> kLayouts{Layout::kAlongK, Layout::kAlongRows, Layout::kStrided, Layout::kBackwards};
enum class Values { kSmallIntegers, kNormal };

inline const MatmulTable& table() {
  const impl::cpu::IsaChoice choice = impl::cpu::choose_isa(TILELOSS_ISA_AUTO);
  EXPECT_EQ(choice.error, "");
  return impl::cpu::kernels(choice.isa).matmul;
}

inline impl::cpu::StorageType storage_of(NumberFormat format) {
  switch (format) {
    case NumberFormat::kBfloat16: return impl::cpu::kStorageBfloat16;
    case NumberFormat::kFloat16: return impl::cpu::kStorageFloat16;
    default: return impl::cpu::kStorageFloat32;
  }
}

struct MatrixSpec {
  NumberFormat format = NumberFormat::kFloat32;
  Layout layout = Layout::kAlongK;
  Values values = Values::kNormal;
  Flush flush = Flush::kRight;
  std::uint64_t seed = 1;
};

// rows x depth elements between guard pages; what lies between them is NaN.
class Matrix {
 public:
  Matrix(const MatrixSpec& spec, std::int64_t rows, std::int64_t depth) : spec_(spec), rows_(rows), depth_(depth) {
    switch (spec.layout) {
      case Layout::kAlongK: row_stride_ = depth + 3, k_stride_ = 1; break;
      case Layout::kAlongRows: row_stride_ = 1, k_stride_ = rows + 5; break;
      case Layout::kStrided: row_stride_ = 2 * depth + 1, k_stride_ = 2; break;
      case Layout::kBackwards: row_stride_ = -depth, k_stride_ = 1; break;
    }
    const std::int64_t elements = (rows - 1) * std::abs(row_stride_) + (depth - 1) * k_stride_ + 1;
    first_ = row_stride_ < 0 ? (rows - 1) * -row_stride_ : 0;
    memory_ = tools::GuardBuffer(static_cast<std::size_t>(elements) * info().bytes, spec.flush);
    for (std::int64_t i = 0; i < rows; ++i) {
      const Random random(spec.seed, Stream::kLogits, i);
      for (std::int64_t k = 0; k < depth; ++k) {
        const auto counter = static_cast<std::uint64_t>(k);
        set(i, k, spec.values == Values::kNormal ? random.normal(counter) : static_cast<double>(random.bits(counter) % 17) - 8);
      }
    }
  }

  void set(std::int64_t i, std::int64_t k, double value) {
    oracle::encode_at(spec_.format, memory_.data(), first_ + i * row_stride_ + k * k_stride_, value);
  }
  void make_read_only() { memory_.make_read_only(); }
  // As the products see it.
  double at(std::int64_t i, std::int64_t k, Compute compute) const {
    const double x = oracle::decode_at(spec_.format, memory_.data(), first_ + i * row_stride_ + k * k_stride_);
    if (compute == Compute::kFloat32) return x;
    return oracle::decode(NumberFormat::kBfloat16, oracle::encode(NumberFormat::kBfloat16, x));
  }
  Operand operand() const {
    return {memory_.as<unsigned char>() + first_ * static_cast<std::int64_t>(info().bytes), storage_of(spec_.format), row_stride_,
            k_stride_};
  }
  std::int64_t rows() const { return rows_; }
  std::int64_t depth() const { return depth_; }

 private:
  const oracle::FormatInfo& info() const { return oracle::format_info(spec_.format); }

  MatrixSpec spec_;
  std::int64_t rows_, depth_, row_stride_ = 0, k_stride_ = 0, first_ = 0;
  tools::GuardBuffer memory_;
};

enum class Side { kLeft, kRight };

// Exactly what packed_floats() asks for, NaN beforehand, between guard pages.
inline tools::GuardBuffer pack(Side side, const Operand& x, std::int64_t row, std::int64_t rows, std::int64_t k,
                               std::int64_t depth, Compute compute) {
  const MatmulTable& t = table();
  const std::int64_t panel = side == Side::kLeft ? t.a_panel : t.b_panel;
  tools::GuardBuffer packed(static_cast<std::size_t>(t.packed_floats(rows, panel, depth, compute)) * sizeof(float),
                            Flush::kRight);
  (side == Side::kLeft ? t.pack_a : t.pack_b)(x, row, rows, k, depth, compute, packed.as<float>());
  packed.make_read_only();
  return packed;
}
inline tools::GuardBuffer pack(Side side, const Matrix& x, Compute compute) {
  return pack(side, x.operand(), 0, x.rows(), 0, x.depth(), compute);
}

// The product of two whole matrices as a contiguous m x n.
inline std::vector<float> product(const Matrix& a, const Matrix& b, Compute compute) {
  const tools::GuardBuffer left = pack(Side::kLeft, a, compute), right = pack(Side::kRight, b, compute);
  std::vector<float> c(static_cast<std::size_t>(a.rows() * b.rows()));
  table().multiply(left.as<float>(), right.as<float>(), a.rows(), b.rows(), a.depth(), compute, c.data(), b.rows(),
                   Store::kReplace);
  return c;
}

}  // namespace tileloss::test
