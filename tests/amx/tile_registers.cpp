#include "tests/amx/tile_registers.h"

#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace tileloss::test {
namespace {

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "tile registers: %s\n", what);
  std::abort();
}

float flushed(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.0F, x) : x; }

float lower(std::uint32_t pair) { return std::bit_cast<float>(pair << 16); }
float upper(std::uint32_t pair) { return std::bit_cast<float>(pair & 0xffff0000U); }

}  // namespace

float fused_without_subnormals(float a, float b, float sum) { return flushed(std::fma(flushed(a), flushed(b), flushed(sum))); }
float added_without_subnormals(float a, float b) { return flushed(flushed(a) + flushed(b)); }

void TileRegisters::configure(const void* operand) {
  unsigned char wanted[64] = {1};
  for (int tile = 0; tile < kTiles; ++tile) {
    wanted[16 + 2 * tile] = 64;
    wanted[48 + tile] = kRows;
  }
  if (std::memcmp(operand, wanted, sizeof wanted) != 0) fail("a configuration other than eight tiles of 16 rows of 64 bytes");
  std::memset(tiles_, 0, sizeof tiles_);
  configured_ = true;
}

void TileRegisters::release() { configured_ = false; }

void TileRegisters::check() const {
  if (!configured_) fail("used without a configuration");
}

void TileRegisters::zero(int tile) {
  check();
  std::memset(&tiles_[tile], 0, sizeof(Tile));
}

void TileRegisters::load(int tile, const void* p, std::int64_t stride) {
  check();
  for (int row = 0; row < kRows; ++row) {
    std::memcpy(tiles_[tile].words[row], static_cast<const char*>(p) + row * stride, sizeof tiles_[tile].words[row]);
  }
}

void TileRegisters::store(int tile, void* p, std::int64_t stride) const {
  check();
  for (int row = 0; row < kRows; ++row) {
    std::memcpy(static_cast<char*>(p) + row * stride, tiles_[tile].words[row], sizeof tiles_[tile].words[row]);
  }
}

// A million of them in the suite: with the fused instruction and wide registers, where they are, each takes a twentieth.
__attribute__((target_clones("avx512f", "default"))) void TileRegisters::add_products(int sum, int left, int right) {
  check();
  if (sum == left || sum == right || left == right) fail("TDPBF16PS with one register twice, which is #UD");
  for (int m = 0; m < kRows; ++m) {
    float even[kWords] = {}, odd[kWords] = {};
    for (int k = 0; k < kWords; ++k) {
      const std::uint32_t pair = tiles_[left].words[m][k];
      for (int n = 0; n < kWords; ++n) {
        const std::uint32_t other = tiles_[right].words[k][n];
        even[n] = fused_without_subnormals(lower(pair), lower(other), even[n]);
        odd[n] = fused_without_subnormals(upper(pair), upper(other), odd[n]);
      }
    }
    for (int n = 0; n < kWords; ++n) {
      std::uint32_t& word = tiles_[sum].words[m][n];
      const float both = added_without_subnormals(even[n], odd[n]);
      word = std::bit_cast<std::uint32_t>(added_without_subnormals(std::bit_cast<float>(word), both));
    }
  }
}

}  // namespace tileloss::test
