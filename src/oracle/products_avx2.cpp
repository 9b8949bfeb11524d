#include "oracle/product_tile.h"

namespace tileloss::oracle {
namespace {

struct Avx2 {
  static constexpr int kBytes = 32;
};

}  // namespace

ProductTile<double> avx2_tile_double() { return ProductTileLoop<double, Avx2>::kTile; }
ProductTile<float> avx2_tile_float() { return ProductTileLoop<float, Avx2>::kTile; }

}  // namespace tileloss::oracle
