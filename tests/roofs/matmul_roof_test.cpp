// The roof of products for tables of any shape, none of which this machine need have.
#include "roofs/matmul_roof.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace tileloss::test {
namespace {

using impl::cpu::Compute;

// What a table is asked for; a pass takes long enough to be timed.
struct Asked {
  std::int64_t packed_depth = 0, depth = 0;
};
Asked asked;

impl::cpu::MatmulTable table_of(std::int64_t a_panel, std::int64_t b_panel, std::int64_t bfloat16_in_word,
                                std::int64_t whole_words) {
  impl::cpu::MatmulTable table{};
  table.a_panel = a_panel;
  table.b_panel = b_panel;
  table.bfloat16_in_word = bfloat16_in_word;
  table.whole_words = whole_words;
  table.pack_a = table.pack_b = [](const impl::cpu::Operand&, std::int64_t, std::int64_t, std::int64_t, std::int64_t depth,
                                   Compute, float*) { asked.packed_depth = depth; };
  table.tile_loop = [](const float*, const float*, std::int64_t depth, std::int64_t, Compute) {
    asked.depth = depth;
    std::this_thread::sleep_for(std::chrono::milliseconds(25));
    return 1.0F;
  };
  return table;
}

// Panels of the vector kernels, of AMX's, and of ones as tall again: always a depth, and no operand beyond an L1 of 32 KB where
// 64 along k fit.
TEST(MatmulRoof, IsAboveZeroForPanelsOfAnyHeight) {
  const impl::cpu::MatmulTable tables[] = {table_of(4, 8, 1, 1), table_of(8, 48, 2, 1), table_of(32, 48, 2, 16),
                                           table_of(64, 96, 2, 16)};
  for (const impl::cpu::MatmulTable& table : tables) {
    for (const Compute compute : {Compute::kFloat32, Compute::kBfloat16}) {
      asked = {};
      tools::ThreadTeam team(1);
      EXPECT_GT(tools::MatmulRoof(table, compute).tflops(team, 1), 0) << table.a_panel;
      EXPECT_GT(asked.depth, 0);
      EXPECT_EQ(asked.depth % 64, 0);
      EXPECT_EQ(asked.depth, asked.packed_depth);
      const std::int64_t in_word = compute == Compute::kBfloat16 ? table.bfloat16_in_word : 1;
      const std::int64_t bytes = (table.a_panel + table.b_panel) * asked.depth / in_word * 4;
      EXPECT_TRUE(bytes <= 32 << 10 || asked.depth == 64) << bytes;
    }
  }
}

}  // namespace
}  // namespace tileloss::test
