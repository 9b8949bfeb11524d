// Float32 sums into the tensor they are for, in its type: rounded once, to nearest even, a row of vectors at a time where the
// tensor's columns lie side by side. A NaN becomes the quiet NaN.
//
// Whole vectors of a row that begins on a line's boundary go around the caches.
#pragma once

#include <cstdint>

#include "backends/cpu/matmul/matmul.h"
#include "backends/cpu/matmul/pack_blocks.h"
#include "core/number_formats.h"

namespace tileloss::impl::cpu {

template <class Simd>
struct MatmulWriting {
  using Pair = typename Simd::Pair;
  static constexpr int kPair = Simd::kPair;

  static void write(const float* sums, std::int64_t sums_stride, std::int64_t rows, std::int64_t columns, const OutputMatrix& to,
                    std::int64_t row, bool adds) {
    switch (to.storage) {
      case kStorageBfloat16: return write_rows<Bfloat16>(sums, sums_stride, rows, columns, to, row, adds);
      case kStorageFloat16: return write_rows<Float16>(sums, sums_stride, rows, columns, to, row, adds);
      case kStorageFloat32: return write_rows<float>(sums, sums_stride, rows, columns, to, row, adds);
    }
  }

 private:
  template <class T>
  static void write_rows(const float* sums, std::int64_t sums_stride, std::int64_t rows, std::int64_t columns,
                         const OutputMatrix& to, std::int64_t row, bool adds) {
    T* const first = static_cast<T*>(to.data) + row * to.row_stride;
    for (std::int64_t i = 0; i < rows; ++i) {
      if (to.col_stride == 1) {
        write_row(sums + i * sums_stride, columns, first + i * to.row_stride, adds);
      } else {
        scatter_row(sums + i * sums_stride, columns, first + i * to.row_stride, to.col_stride, adds);
      }
    }
    Simd::fence();
  }

  template <class T>
  static void write_row(const float* sums, std::int64_t columns, T* out, bool adds) {
    const bool streams = !adds && reinterpret_cast<std::uintptr_t>(out) % 64 == 0;
    std::int64_t j = 0;
    for (; j + kPair <= columns; j += kPair) {
      const Pair v = with_old(sums + j, out + j, kPair, adds);
      if (streams) {
        Simd::stream_pair(out + j, v);
      } else {
        Simd::store_pair(out + j, v);
      }
    }
    if (const int left = static_cast<int>(columns - j); left > 0) {
      Simd::store_pair_partial(out + j, with_old(sums + j, out + j, left, adds), left);
    }
  }

  template <class T>
  [[gnu::always_inline]] static Pair with_old(const float* sums, const T* out, int n, bool adds) {
    Pair v = Simd::load_weights(sums, n, out);
    if (adds) {
      const Pair old = Simd::unpack(n == kPair ? Simd::load_raw(out) : Simd::load_raw_partial(out, n, 0), out);
      v = {Simd::add(old.a, v.a), Simd::add(old.b, v.b)};
    }
    return {PackBlocks<Simd>::quiet(v.a), PackBlocks<Simd>::quiet(v.b)};
  }

  template <class T>
  static void scatter_row(const float* sums, std::int64_t columns, T* out, std::int64_t col_stride, bool adds) {
    for (std::int64_t j = 0; j < columns; ++j) {
      T& x = out[j * col_stride];
      x = from_float<T>(adds ? to_float(x) + sums[j] : sums[j]);
    }
  }
};

}  // namespace tileloss::impl::cpu
