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

// Inlined, so that each takes the instructions of where it is called.
#define TILELOSS_INLINE [[gnu::always_inline]] inline

TILELOSS_INLINE float flushed(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.0F, x) : x; }
TILELOSS_INLINE float fused(float a, float b, float sum) { return flushed(std::fma(flushed(a), flushed(b), flushed(sum))); }
TILELOSS_INLINE float added(float a, float b) { return flushed(flushed(a) + flushed(b)); }

TILELOSS_INLINE float lower(std::uint32_t pair) { return std::bit_cast<float>(pair << 16); }
TILELOSS_INLINE float upper(std::uint32_t pair) { return std::bit_cast<float>(pair & 0xffff0000U); }

constexpr int kRows = TileRegisters::kRows, kWords = TileRegisters::kWords;
using Words = std::uint32_t[kRows][kWords];

TILELOSS_INLINE void add_to(Words& sum, const Words& left, const Words& right) {
  for (int m = 0; m < kRows; ++m) {
    float even[kWords] = {}, odd[kWords] = {};
    for (int k = 0; k < kWords; ++k) {
      const std::uint32_t pair = left[m][k];
      for (int n = 0; n < kWords; ++n) {
        even[n] = fused(lower(pair), lower(right[k][n]), even[n]);
        odd[n] = fused(upper(pair), upper(right[k][n]), odd[n]);
      }
    }
    for (int n = 0; n < kWords; ++n) {
      sum[m][n] = std::bit_cast<std::uint32_t>(added(std::bit_cast<float>(sum[m][n]), added(even[n], odd[n])));
    }
  }
}

#undef TILELOSS_INLINE

void multiply(Words& sum, const Words& left, const Words& right) { add_to(sum, left, right); }
[[gnu::target("avx512f")]] void multiply_wide(Words& sum, const Words& left, const Words& right) { add_to(sum, left, right); }

}  // namespace

float fused_without_subnormals(float a, float b, float sum) { return fused(a, b, sum); }
float added_without_subnormals(float a, float b) { return added(a, b); }

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

void TileRegisters::add_products(int sum, int left, int right) {
  check();
  if (sum == left || sum == right || left == right) fail("TDPBF16PS with one register twice, which is #UD");
  // A million of them in the suite: with fused products in wide registers each takes a twentieth.
  static const bool is_wide = __builtin_cpu_supports("avx512f") != 0;
  (is_wide ? multiply_wide : multiply)(tiles_[sum].words, tiles_[left].words, tiles_[right].words);
}

}  // namespace tileloss::test
