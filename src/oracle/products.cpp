#include "oracle/products.h"

#include <algorithm>
#include <exception>
#include <thread>
#include <type_traits>
#include <vector>

#include "oracle/product_tile.h"

namespace tileloss::oracle {
namespace {

// A block of b, 256 x 192 doubles, is 393 KB: half of an L2. Rows of a: 256 x 256 doubles.
constexpr std::int64_t kDepthBlock = 256;
constexpr std::int64_t kColBlock = 192;
constexpr std::int64_t kRowBlock = 256;

struct AnyMachine {
  static constexpr int kBytes = 16;
};

#if defined(__x86_64__)
bool has_fma() { return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0; }

template <typename T>
ProductTile<T> best_tile() {
  if constexpr (std::is_same_v<T, double>) {
    static const ProductTile<T> kTile = has_fma() ? avx2_tile_double() : ProductTileLoop<T, AnyMachine>::kTile;
    return kTile;
  } else {
    static const ProductTile<T> kTile = has_fma() ? avx2_tile_float() : ProductTileLoop<T, AnyMachine>::kTile;
    return kTile;
  }
}
#else
template <typename T>
ProductTile<T> best_tile() {
  return ProductTileLoop<T, AnyMachine>::kTile;
}
#endif

// Panels of `width` columns of m (or rows, by swapped strides), each [depth][width]; what is beyond `count` is 0.
template <typename From, typename To>
void pack(const View<From>& m, std::int64_t depth, std::int64_t count, std::int64_t width, To* out) {
  for (std::int64_t first = 0; first < count; first += width) {
    const std::int64_t present = std::min(width, count - first);
    if (m.col_stride == 1) {
      for (std::int64_t k = 0; k < depth; ++k) {
        for (std::int64_t j = 0; j < present; ++j) out[k * width + j] = static_cast<To>(m.at(k, first + j));
        std::fill(out + k * width + present, out + (k + 1) * width, To{0});
      }
    } else {
      for (std::int64_t j = 0; j < width; ++j) {
        for (std::int64_t k = 0; k < depth; ++k) out[k * width + j] = j < present ? static_cast<To>(m.at(k, first + j)) : To{0};
      }
    }
    out += depth * width;
  }
}

template <typename T>
std::int64_t round_up(std::int64_t count, T granule) {
  return (count + granule - 1) / granule * granule;
}

// The packed blocks' product, added to c. Tiles that reach over c's edge go through a buffer.
template <typename T>
void add_block(const ProductTile<T>& tile, const ProductSizes& sizes, const T* a, const T* b, T* c, std::int64_t c_stride) {
  std::vector<T> edge(static_cast<std::size_t>(tile.rows) * static_cast<std::size_t>(tile.cols));
  for (std::int64_t j = 0; j < sizes.cols; j += tile.cols) {
    const T* const b_panel = b + j * sizes.depth;
    for (std::int64_t i = 0; i < sizes.rows; i += tile.rows) {
      const T* const a_panel = a + i * sizes.depth;
      if (i + tile.rows <= sizes.rows && j + tile.cols <= sizes.cols) {
        tile.add(sizes.depth, a_panel, b_panel, c + i * c_stride + j, c_stride);
        continue;
      }
      std::fill(edge.begin(), edge.end(), T{0});
      tile.add(sizes.depth, a_panel, b_panel, edge.data(), tile.cols);
      for (std::int64_t r = 0; r < std::min<std::int64_t>(tile.rows, sizes.rows - i); ++r) {
        for (std::int64_t s = 0; s < std::min<std::int64_t>(tile.cols, sizes.cols - j); ++s) {
          c[(i + r) * c_stride + j + s] += edge[static_cast<std::size_t>(r * tile.cols + s)];
        }
      }
    }
  }
}

template <typename A, typename T>
void add_product_in(const ProductSizes& sizes, const View<A>& a, const View<float>& b, T* c, std::int64_t c_stride) {
  const ProductTile<T> tile = best_tile<T>();
  std::vector<T> packed_a(static_cast<std::size_t>(kDepthBlock * round_up(std::min(kRowBlock, sizes.rows), tile.rows)));
  std::vector<T> packed_b(static_cast<std::size_t>(kDepthBlock * round_up(std::min(kColBlock, sizes.cols), tile.cols)));
  for (std::int64_t j = 0; j < sizes.cols; j += kColBlock) {
    const std::int64_t cols = std::min(kColBlock, sizes.cols - j);
    for (std::int64_t k = 0; k < sizes.depth; k += kDepthBlock) {
      const std::int64_t depth = std::min(kDepthBlock, sizes.depth - k);
      pack(View<float>{&b.at(k, j), b.row_stride, b.col_stride}, depth, cols, tile.cols, packed_b.data());
      for (std::int64_t i = 0; i < sizes.rows; i += kRowBlock) {
        const std::int64_t rows = std::min(kRowBlock, sizes.rows - i);
        pack(View<A>{&a.at(i, k), a.col_stride, a.row_stride}, depth, rows, tile.rows, packed_a.data());
        add_block(tile, {rows, depth, cols}, packed_a.data(), packed_b.data(), c + i * c_stride + j, c_stride);
      }
    }
  }
}

}  // namespace

void add_product(const ProductSizes& sizes, const View<float>& a, const View<float>& b, double* c, std::int64_t c_stride) {
  add_product_in(sizes, a, b, c, c_stride);
}

void add_product(const ProductSizes& sizes, const View<double>& a, const View<float>& b, double* c, std::int64_t c_stride) {
  add_product_in(sizes, a, b, c, c_stride);
}

void add_product(const ProductSizes& sizes, const View<double>& a, const View<float>& b, float* c, std::int64_t c_stride) {
  add_product_in(sizes, a, b, c, c_stride);
}

void split_work(int threads, std::int64_t count, std::int64_t granule,
                const std::function<void(std::int64_t, std::int64_t)>& work) {
  const std::int64_t granules = (count + granule - 1) / granule;
  const std::int64_t pieces = std::clamp<std::int64_t>(threads, 1, std::max<std::int64_t>(granules, 1));
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(pieces));
  const auto run = [&](std::int64_t piece) {
    try {
      work(granules * piece / pieces * granule, std::min(count, granules * (piece + 1) / pieces * granule));
    } catch (...) {
      errors[static_cast<std::size_t>(piece)] = std::current_exception();
    }
  };
  std::vector<std::thread> others;
  for (std::int64_t piece = 1; piece < pieces; ++piece) others.emplace_back(run, piece);
  run(0);
  for (std::thread& other : others) other.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace tileloss::oracle
