// c += a b in double, or in float where two digits will do, for the oracle of losses fused with the LM head. Its sizes are tall
// (a vocabulary by a hidden size), and double at the speed of a naive loop would take an hour where this takes a minute.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace tileloss::oracle {

// Element (i, j) is data[i * row_stride + j * col_stride].
template <typename T>
struct View {
  const T* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 1;

  const T& at(std::int64_t i, std::int64_t j) const { return data[i * row_stride + j * col_stride]; }
};

struct ProductSizes {
  std::int64_t rows = 0, depth = 0, cols = 0;
};

// c[i, j] += sum_k a(i, k) b(k, j), c row-major with `c_stride` between rows. Operands are converted to c's type; sums run in it,
// 256 terms at a time. On one thread.
void add_product(const ProductSizes& sizes, const View<float>& a, const View<float>& b, double* c, std::int64_t c_stride);
void add_product(const ProductSizes& sizes, const View<double>& a, const View<float>& b, double* c, std::int64_t c_stride);
void add_product(const ProductSizes& sizes, const View<double>& a, const View<float>& b, float* c, std::int64_t c_stride);

// work(begin, end) on pieces of [0, count), each a multiple of `granule` but the last, on that many threads.
void split_work(int threads, std::int64_t count, std::int64_t granule,
                const std::function<void(std::int64_t, std::int64_t)>& work);

}  // namespace tileloss::oracle
