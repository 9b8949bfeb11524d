// The products in tile registers, as the library's machine code does them with every tile instruction emulated: bit for bit what
// the manual says of each sum, and where sums are exact the bits of every other instruction set.
// tests/backends/cpu/matmul_test.cpp and the tests of the LM head run in this program too.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "backends/cpu/isa/isa.h"
#include "core/number_formats.h"
#include "judge/strict/guard_buffer.h"
#include "support/synthetic.h"
#include "tests/amx/tile_registers.h"
#include "tests/amx/trapped_tiles.h"
#include "tests/shared/input_families.h"

namespace tileloss::test {
namespace {

using impl::Bfloat16;
using impl::from_float;
using impl::to_float;

using impl::cpu::Compute;
using impl::cpu::MatmulTable;
using tools::Random;
using tools::Stream;

const MatmulTable& machine_code() { return impl::cpu::kernels(TILELOSS_ISA_AVX512_AMX).matmul; }

struct Shape {
  std::int64_t m, n, depth;
};
// On either side of a tile, of a block of tiles, and of a step along k.
std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const std::int64_t m : {1, 15, 16, 17, 32, 33, 70}) {
    for (const std::int64_t n : {1, 16, 17, 47, 48, 49, 100}) {
      for (const std::int64_t depth : {1, 31, 32, 33, 64, 77}) all.push_back({m, n, depth});
    }
  }
  return all;
}
std::string name_of(const Shape& s) { return std::to_string(s.m) + "x" + std::to_string(s.n) + "x" + std::to_string(s.depth); }

enum class Values { kNormal, kSmallIntegers, kTiny };
std::vector<float> draw(std::int64_t count, Values values, std::uint64_t seed) {
  const Random random(seed, Stream::kLogits, 0);
  std::vector<float> all(static_cast<std::size_t>(count));
  for (std::uint64_t i = 0; i < all.size(); ++i) {
    const double normal = random.normal(i);
    all[i] = values == Values::kSmallIntegers ? static_cast<float>(random.bits(i) % 17) - 8
             : values == Values::kTiny        ? static_cast<float>(normal * 0x1p-63)  // products about the least normal number
                                              : static_cast<float>(normal);
  }
  return all;
}

// c, m x n at a stride of n + 3, before and after; what lies between its rows is 7 and must stay.
std::vector<float> multiply(const MatmulTable& table, const Shape& s, const std::vector<float>& a, const std::vector<float>& b,
                            Compute compute, bool accumulate) {
  const auto packed = [&](const std::vector<float>& x, std::int64_t rows, std::int64_t panel, impl::cpu::PackFunction pack) {
    tools::GuardBuffer words(static_cast<std::size_t>(table.packed_floats(rows, panel, s.depth, compute)) * sizeof(float),
                             Flush::kRight);
    pack({x.data(), impl::cpu::kStorageFloat32, s.depth, 1}, 0, rows, 0, s.depth, compute, words.as<float>());
    return words;
  };
  const tools::GuardBuffer left = packed(a, s.m, table.a_panel, table.pack_a),
                           right = packed(b, s.n, table.b_panel, table.pack_b);
  std::vector<float> c(static_cast<std::size_t>(s.m * (s.n + 3)), 7.0F);
  table.multiply(left.as<float>(), right.as<float>(), s.m, s.n, s.depth, compute, c.data(), s.n + 3,
                 accumulate ? impl::cpu::Store::kAdd : impl::cpu::Store::kReplace);
  return c;
}

// From the definition: what is added to first, then 32 k at a time, even and odd ones apart, in their order.
std::vector<float> expected(const Shape& s, const std::vector<float>& a, const std::vector<float>& b, bool accumulate) {
  const auto at = [&](const std::vector<float>& x, std::int64_t row, std::int64_t k) {
    return k < s.depth ? to_float(from_float<Bfloat16>(x[static_cast<std::size_t>(row * s.depth + k)])) : 0.0F;
  };
  std::vector<float> c(static_cast<std::size_t>(s.m * (s.n + 3)), 7.0F);
  for (std::int64_t i = 0; i < s.m; ++i) {
    for (std::int64_t j = 0; j < s.n; ++j) {
      float& out = c[static_cast<std::size_t>(i * (s.n + 3) + j)];
      float sum = accumulate ? out : 0;
      for (std::int64_t block = 0; block < s.depth; block += 32) {
        float even = 0, odd = 0;
        for (std::int64_t k = block; k < block + 32; k += 2) {
          even = fused_without_subnormals(at(a, i, k), at(b, j, k), even);
          odd = fused_without_subnormals(at(a, i, k + 1), at(b, j, k + 1), odd);
        }
        sum = added_without_subnormals(sum, added_without_subnormals(even, odd));
      }
      out = sum;
    }
  }
  return c;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST(TileProducts, AreWhatTheManualSaysBitForBit) {
  std::uint64_t seed = 0;
  for (const Shape& shape : shapes()) {
    const Values values = ++seed % 3 == 0 ? Values::kTiny : Values::kNormal;
    const std::vector<float> a = draw(shape.m * shape.depth, values, 2 * seed),
                             b = draw(shape.n * shape.depth, values, 2 * seed + 1);
    const bool accumulate = seed % 2 == 0;
    const std::vector<float> wanted = expected(shape, a, b, accumulate);
    ASSERT_TRUE(same_bits(multiply(machine_code(), shape, a, b, Compute::kBfloat16, accumulate), wanted)) << name_of(shape);
  }
}

// Sums of small integers are exact in any order.
TEST(TileProducts, HaveTheBitsOfEveryOtherInstructionSetWhereSumsAreExact) {
  std::uint64_t seed = 100;
  for (const Shape& shape : shapes()) {
    ++seed;
    const std::vector<float> a = draw(shape.m * shape.depth, Values::kSmallIntegers, 2 * seed);
    const std::vector<float> b = draw(shape.n * shape.depth, Values::kSmallIntegers, 2 * seed + 1);
    for (const bool accumulate : {false, true}) {
      const std::vector<float> c = multiply(machine_code(), shape, a, b, Compute::kBfloat16, accumulate);
      for (tileloss_isa isa = TILELOSS_ISA_BASELINE; isa < TILELOSS_ISA_AVX512_AMX; ++isa) {
        if (!impl::cpu::isa_supported(isa)) continue;
        const auto other = multiply(impl::cpu::kernels(isa).matmul, shape, a, b, Compute::kBfloat16, accumulate);
        // 0 may have either sign.
        for (std::size_t i = 0; i < c.size(); ++i) ASSERT_EQ(c[i], other[i]) << name_of(shape) << " " << impl::cpu::isa_name(isa);
      }
    }
  }
}

// float32 is not for tiles: the FMA kernels' sums, and so their bits.
TEST(TileProducts, InFloat32AreThoseOfAvx512) {
  std::uint64_t seed = 200;
  for (const Shape& shape : shapes()) {
    ++seed;
    const std::vector<float> a = draw(shape.m * shape.depth, Values::kNormal, 2 * seed);
    const std::vector<float> b = draw(shape.n * shape.depth, Values::kNormal, 2 * seed + 1);
    const std::int64_t before = products_so_far();
    const std::vector<float> c = multiply(machine_code(), shape, a, b, Compute::kFloat32, false);
    EXPECT_EQ(products_so_far(), before);
    const MatmulTable& avx512 = impl::cpu::kernels(TILELOSS_ISA_AVX512_BF16).matmul;
    ASSERT_TRUE(same_bits(c, multiply(avx512, shape, a, b, Compute::kFloat32, false))) << name_of(shape);
  }
}

// float32 too, whose panels are lower: what no row fills is 0, not what was there.
TEST(TileProducts, EveryWordOfAPanelIsPacked) {
  const MatmulTable& t = machine_code();
  const std::vector<float> x(std::size_t{40 * 40}, 1.0F);
  for (const Compute compute : {Compute::kFloat32, Compute::kBfloat16}) {
    for (const auto& [panel, pack] : {std::pair{t.a_panel, t.pack_a}, std::pair{t.b_panel, t.pack_b}}) {
      for (const std::int64_t rows : {1, 8, 9, 33}) {
        for (const std::int64_t depth : {1, 33}) {
          const std::int64_t words = (rows + panel - 1) / panel * panel * t.words(depth, compute);
          std::vector<std::uint32_t> packed(static_cast<std::size_t>(words) + 16, 0xffffffffU);
          auto* const aligned = reinterpret_cast<float*>((reinterpret_cast<std::uintptr_t>(packed.data()) + 63) / 64 * 64);
          pack({x.data(), impl::cpu::kStorageFloat32, 40, 1}, 0, rows, 0, depth, compute, aligned);
          std::int64_t ones = 0;
          for (std::int64_t i = 0; i < words; ++i) {
            const auto word = std::bit_cast<std::uint32_t>(aligned[i]);
            ASSERT_NE(word, 0xffffffffU) << i << " of " << words;
            ones += compute == Compute::kFloat32 ? (word == 0x3f800000U) : (word & 0xffffU) / 0x3f80U + (word >> 16) / 0x3f80U;
          }
          EXPECT_EQ(ones, rows * depth);
        }
      }
    }
  }
}

// 33 x 49: two panels either way, the second with one row and one column of tiles. 77 deep: three steps.
TEST(TileProducts, TakeAsFewTilesAsHoldWhatThereIs) {
  const Shape shape{33, 49, 77};
  const std::vector<float> a = draw(shape.m * shape.depth, Values::kNormal, 1),
                           b = draw(shape.n * shape.depth, Values::kNormal, 2);
  const std::int64_t before = products_so_far();
  multiply(machine_code(), shape, a, b, Compute::kBfloat16, false);
  EXPECT_EQ(products_so_far() - before, 3 * (2 * 3 + 1 * 3 + 2 * 1 + 1 * 1));
}

TEST(TileProducts, GiveTheTilesBack) {
  const std::vector<float> a = draw(40 * 64, Values::kNormal, 1), b = draw(60 * 64, Values::kNormal, 2);
  const std::int64_t before = products_so_far();
  multiply(machine_code(), {40, 60, 64}, a, b, Compute::kBfloat16, true);
  EXPECT_GT(products_so_far(), before);
  EXPECT_FALSE(tiles_are_held());
  alignas(64) static float panels[2][64 * 64];
  EXPECT_EQ(machine_code().tile_loop(panels[0], panels[1], 64, 3, Compute::kBfloat16), 0);
  EXPECT_FALSE(tiles_are_held());
}

TEST(TileRegisters, AnInstructionWithoutAConfigurationFails) {
  TileRegisters registers;
  std::memset(static_cast<void*>(&registers), 0, sizeof registers);
  EXPECT_DEATH(registers.zero(0), "used without a configuration");
  const std::array<unsigned char, 64> palette_0{};
  EXPECT_DEATH(registers.configure(palette_0.data()), "a configuration other than");
}

}  // namespace
}  // namespace tileloss::test
