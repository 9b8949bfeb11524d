// The inner loop of products.cpp, compiled once for vectors of 16 bytes and once, with FMA, for 32. Nothing but what is here may
// be compiled for the richer machine.
#pragma once

namespace tileloss::oracle {

// a: [depth][rows], b: [depth][cols], packed. c[r * c_stride + j] += sum_k a[k][r] b[k][j].
template <typename T>
struct ProductTile {
  int rows, cols;
  void (*add)(long depth, const T* a, const T* b, T* c, long c_stride);
};

constexpr int kTileRows = 4;
// 4 x 3 accumulators, 3 of b and one of a fill 16 registers, and 12 chains hide an FMA's latency of 4 at two a cycle.
constexpr int kTileVectors = 3;

// Machine: kBytes of a vector. A type of the including file's own, so that no other file shares what is compiled for it.
template <typename T, class Machine>
struct ProductTileLoop {
  typedef T Vector __attribute__((vector_size(Machine::kBytes), aligned(sizeof(T)), may_alias));
  static constexpr int kLanes = Machine::kBytes / static_cast<int>(sizeof(T));

  static void add(long depth, const T* a, const T* b, T* c, long c_stride) {
    Vector sums[kTileRows][kTileVectors] = {};
    for (long k = 0; k < depth; ++k) {
      const T* const b_row = b + k * kTileVectors * kLanes;
      for (int r = 0; r < kTileRows; ++r) {
        for (int v = 0; v < kTileVectors; ++v) {
          sums[r][v] += a[k * kTileRows + r] * *reinterpret_cast<const Vector*>(b_row + v * kLanes);
        }
      }
    }
    for (int r = 0; r < kTileRows; ++r) {
      for (int v = 0; v < kTileVectors; ++v) *reinterpret_cast<Vector*>(c + r * c_stride + v * kLanes) += sums[r][v];
    }
  }

  static constexpr ProductTile<T> kTile{kTileRows, kTileVectors* kLanes, add};
};

ProductTile<double> avx2_tile_double();
ProductTile<float> avx2_tile_float();

}  // namespace tileloss::oracle
