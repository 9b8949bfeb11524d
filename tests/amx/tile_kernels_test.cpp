// What is done beside products in tile registers, kernel by kernel, on operands between pages without access: the softmax of a
// group of rows over several tiles of columns with their words, and dz from words.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "backends/cpu/amx/tile_table.h"
#include "backends/cpu/isa/isa.h"
#include "backends/cpu/threads/floating_point.h"
#include "core/number_formats.h"
#include "core/row_state.h"
#include "judge/strict/guard_buffer.h"
#include "support/synthetic.h"
#include "tests/amx/trapped_tiles.h"
#include "tests/shared/input_families.h"

namespace tileloss::test {
namespace {

using impl::Bfloat16;
using impl::kInfinity;
using impl::LogitTransform;
using impl::to_float;

using impl::cpu::Compute;
using impl::cpu::GradientTiles;
using impl::cpu::RunningRow;
using impl::cpu::SoftmaxRows;
using tools::GuardBuffer;

const impl::cpu::KernelTable& kernels() { return impl::cpu::kernels(TILELOSS_ISA_AVX512_AMX); }

// ----------------------------------------------------------------------------------------------------------------- softmax

constexpr float kStepsPerUnit = 512;

struct Group {
  std::int64_t rows, depth;
  std::vector<std::int64_t> tiles;  // columns of each
  double rise = 0;                  // of all logits from one tile to the next
  bool keeps_words = true, also = false;
};

// z as the products give it, by the same machine code.
class SoftmaxCase {
 public:
  explicit SoftmaxCase(const Group& g)
      : group_(g), running_(static_cast<std::size_t>(g.rows) * sizeof(RunningRow), Flush::kRight) {
    const tools::Random random(11, tools::Stream::kLogits, g.rows);
    std::uint64_t at = 0;
    // A last k of 1 against the tile's level.
    for (std::int64_t i = 0; i < g.rows * g.depth; ++i) {
      hidden_.push_back(i % g.depth == g.depth - 1 ? 1 : static_cast<float>(random.normal(at++)));
    }
    packed_rows_ = pack(hidden_, g.rows, kernels().matmul.a_panel, kernels().matmul.pack_a);
    for (std::int64_t i = 0; i < g.rows; ++i) {
      RunningRow& row = *new (running_.as<RunningRow>() + i) RunningRow;
      row.target_column = i % 3 == 0 ? -1 : 29 * i % 90;
    }
    std::int64_t column = 0;
    for (std::size_t t = 0; t < g.tiles.size(); ++t) {
      run_tile(static_cast<double>(t) * g.rise, column, g.tiles[t], random, at);
      column += g.tiles[t];
    }
  }

  void check() const {
    for (std::int64_t i = 0; i < group_.rows; ++i) {
      const RunningRow& r = running_.as<RunningRow>()[i];
      const std::vector<float>& z = z_[static_cast<std::size_t>(i)];
      double sum = 0;
      float max = -kInfinity, target = -kInfinity;
      for (std::size_t j = 0; j < z.size(); ++j) {
        max = std::max(max, z[j]);
        if (static_cast<std::int64_t>(j) == r.target_column) {
          target = z[j];
        } else {
          sum += std::exp2(static_cast<double>(z[j]) * LogitTransform::kExactLog2E -
                           static_cast<double>(r.reference) * reference_unit());
        }
      }
      EXPECT_EQ(r.max, max) << i;
      EXPECT_EQ(r.target, target) << i;
      EXPECT_NEAR(r.sum, sum, 1e-6 * sum) << i;
      EXPECT_EQ(r.odd_max, -kInfinity);
    }
    EXPECT_TRUE(running_.canary_intact());
  }

 private:
  static double reference_unit() { return LogitTransform::kExactLog2E / static_cast<double>(LogitTransform::kLog2E); }

  GuardBuffer pack(const std::vector<float>& x, std::int64_t rows, std::int64_t panel, impl::cpu::PackFunction function) const {
    GuardBuffer packed(
        static_cast<std::size_t>(kernels().matmul.packed_floats(rows, panel, group_.depth, Compute::kBfloat16)) * 4,
        Flush::kRight);
    function({x.data(), impl::cpu::kStorageFloat32, group_.depth, 1}, 0, rows, 0, group_.depth, Compute::kBfloat16,
             packed.as<float>());
    packed.make_read_only();
    return packed;
  }

  struct Callbacks {
    std::vector<std::uint16_t>* words;
    std::vector<float>* max;
    std::int64_t stride, columns;
    std::vector<float>* seen;

    static std::uint16_t* keep(void* data, std::int64_t row, float m) noexcept {
      const auto& c = *static_cast<Callbacks*>(data);
      (*c.max)[static_cast<std::size_t>(row)] = m;
      return c.words->data() + row * c.stride;
    }
    static void also(void* data, std::int64_t row, const float* z) noexcept {
      const auto& c = *static_cast<Callbacks*>(data);
      std::copy(z, z + c.columns, c.seen->data() + row * c.columns);
    }
    static void odd(void*, std::int64_t, const float*) noexcept { ADD_FAILURE() << "an ordinary row was handed over"; }
  };

  void run_tile(double level, std::int64_t column, std::int64_t columns, const tools::Random& random, std::uint64_t& at) {
    const impl::cpu::MatmulTable& t = kernels().matmul;
    std::vector<float> head;
    for (std::int64_t i = 0; i < columns * group_.depth; ++i) {
      const bool is_level = i % group_.depth == group_.depth - 1;
      head.push_back(static_cast<float>(is_level ? level : 0.3 * random.normal(at++)));
    }
    const GuardBuffer right = pack(head, columns, t.b_panel, t.pack_b);
    const std::int64_t whole = (columns + t.b_panel - 1) / t.b_panel * t.b_panel, stride = (columns + 31) / 32 * 32;
    const std::int64_t z_stride = std::max(whole, stride);
    const GuardBuffer z(static_cast<std::size_t>(2 * t.a_panel * z_stride) * sizeof(float), Flush::kRight);
    std::vector<std::uint16_t> words(static_cast<std::size_t>(group_.rows * stride), 7);
    std::vector<float> max(static_cast<std::size_t>(group_.rows)), seen(static_cast<std::size_t>(group_.rows * columns));
    Callbacks callbacks{&words, &max, stride, columns, &seen};
    SoftmaxRows job;
    job.a = packed_rows_.as<float>();
    job.b = right.as<float>();
    job.rows = group_.rows;
    job.columns = columns;
    job.depth = group_.depth;
    job.column = column;
    job.z = z.as<float>();
    job.z_stride = z_stride;
    job.running = running_.as<RunningRow>();
    job.exponent_scale = LogitTransform::kLog2E;
    job.inverse_scale = 1 / LogitTransform::kLog2E;
    job.exact_exponent_scale = LogitTransform::kExactLog2E;
    job.reference_unit = reference_unit();
    job.steps_per_unit = kStepsPerUnit;
    job.context = &callbacks;
    job.odd = &Callbacks::odd;
    if (group_.keeps_words) job.keep = &Callbacks::keep;
    if (group_.also) job.also = &Callbacks::also;
    t.tiles->multiply_softmax(job);
    EXPECT_TRUE(z.canary_intact());
    look_at(right, column, columns, stride, words, max, seen);
  }

  // Words are those of backends/cpu/head/kept_logits.h but for the label's, which counts for nothing.
  void look_at(const GuardBuffer& right, std::int64_t column, std::int64_t columns, std::int64_t stride,
               const std::vector<std::uint16_t>& words, const std::vector<float>& max, const std::vector<float>& seen) {
    std::vector<float> z(static_cast<std::size_t>(group_.rows * columns));
    kernels().matmul.multiply(packed_rows_.as<float>(), right.as<float>(), group_.rows, columns, group_.depth, Compute::kBfloat16,
                              z.data(), columns, impl::cpu::Store::kReplace);
    if (group_.also) {
      EXPECT_EQ(seen, z);
    }
    z_.resize(static_cast<std::size_t>(group_.rows));
    for (std::int64_t i = 0; i < group_.rows; ++i) {
      const float* const row = z.data() + i * columns;
      z_[static_cast<std::size_t>(i)].insert(z_[static_cast<std::size_t>(i)].end(), row, row + columns);
      if (!group_.keeps_words) continue;
      std::vector<std::uint16_t> expected(static_cast<std::size_t>(stride));
      EXPECT_EQ(max[static_cast<std::size_t>(i)], kernels().kept_logits.keep(row, columns, kStepsPerUnit, expected.data()));
      for (std::int64_t j = 0; j < stride; ++j) {
        if (column + j == running_.as<RunningRow>()[i].target_column) continue;
        ASSERT_EQ(words[static_cast<std::size_t>(i * stride + j)], expected[static_cast<std::size_t>(j)]) << i << " " << j;
      }
    }
  }

  Group group_;
  std::vector<float> hidden_;
  GuardBuffer packed_rows_, running_;
  std::vector<std::vector<float>> z_;
};

TEST(TileSoftmax, MaximumSumAndWordsAreThoseOfTheLogits) {
  for (const std::int64_t rows : {1, 31, 33, 70}) {
    for (const std::int64_t depth : {2, 33, 200}) {
      for (const std::int64_t columns : {1, 47, 49, 192, 200}) SoftmaxCase({rows, depth, {columns}}).check();
    }
  }
}

// Beside so few steps that most of a row's softmax is left for the end, and with nothing kept.
TEST(TileSoftmax, GoesOnFromTileToTile) {
  for (const double rise : {0.0, 3.0, 30.0, -30.0, 200.0}) {
    for (const bool keeps_words : {false, true}) {
      for (const bool also : {false, true}) SoftmaxCase({40, 5, {64, 48, 1, 33}, rise, keeps_words, also}).check();
    }
  }
}

TEST(TileSoftmax, GivesTheTilesBack) {
  const std::int64_t before = products_so_far();
  SoftmaxCase({40, 5, {64}}).check();
  EXPECT_GT(products_so_far(), before);
  EXPECT_FALSE(tiles_are_held());
}

// -------------------------------------------------------------------------------------------------------------- dz of words

struct WordsCase {
  std::int64_t rows, columns;
  bool along = true, down = true;
};

void check_gradient(const WordsCase& c, Flush flush) {
  constexpr std::int64_t kTileFloats = 2 * impl::cpu::kTileWords;  // two tiles of each operand for 32 columns
  const std::int64_t blocks = c.columns / impl::cpu::kTileDepth, down_stride = kTileFloats + 48;
  const tools::Random random(3, tools::Stream::kLogits, c.rows);
  const GuardBuffer words(static_cast<std::size_t>(c.rows * c.columns) * sizeof(std::uint16_t), flush, 2);
  const GuardBuffer along(static_cast<std::size_t>(blocks * kTileFloats) * sizeof(float), Flush::kRight),
      down(static_cast<std::size_t>((blocks - 1) * down_stride + kTileFloats) * sizeof(float), Flush::kRight);
  GradientTiles g;
  g.rows = c.rows;
  g.columns = c.columns;
  g.exponent_of_word = static_cast<float>(LogitTransform::kExactLog2E / static_cast<double>(kStepsPerUnit));
  if (c.along) g.along = along.as<float>();
  if (c.down) g.down = down.as<float>();
  g.down_stride = down_stride;
  for (std::int64_t r = 0; r < c.rows; ++r) {
    g.words[r] = words.as<std::uint16_t>() + r * c.columns;
    g.factor[r] = static_cast<float>(random.normal(static_cast<std::uint64_t>(r)) * (r % 5 == 4 ? 1e20 : 1e-3));
    g.exponent[r] = static_cast<float>(-65535.0 * LogitTransform::kExactLog2E / 512 - static_cast<double>(r % 7));
    for (std::int64_t j = 0; j < c.columns; ++j) {
      const auto drawn = static_cast<std::uint16_t>(random.bits(static_cast<std::uint64_t>(1000 + r * c.columns + j)));
      words.as<std::uint16_t>()[r * c.columns + j] = j % 11 == 0 ? 0 : j % 11 == 1 ? 65535 : drawn;
    }
  }
  {
    const impl::cpu::FloatingPointScope scope;  // as every task of the library has it
    kernels().matmul.tiles->gradient(g);
  }
  for (std::int64_t r = 0; r < impl::cpu::kGradientRows; ++r) {
    for (std::int64_t j = 0; j < c.columns; ++j) {
      const bool is_there = r < c.rows && g.words[r][j] != 0;
      const double exponent =
          is_there ? g.words[r][j] * static_cast<double>(g.exponent_of_word) + static_cast<double>(g.exponent[r]) : 0;
      const double exact = is_there ? static_cast<double>(g.factor[r]) * std::exp2(exponent) : 0;
      const auto* const row_tiles = along.as<Bfloat16>() + j / 32 * 2 * kTileFloats + r * 32 + j % 32;
      const auto* const column_tiles = down.as<Bfloat16>() + j / 32 * 2 * down_stride + j % 32 * 32 + r;
      for (const Bfloat16* at : {c.along ? row_tiles : nullptr, c.down ? column_tiles : nullptr}) {
        if (at == nullptr) continue;
        // Half a unit of bfloat16 and what exponent and polynomial are off by; powers of two and products that are not normal
        // are 0.
        const double error = std::abs(to_float(*at) - exact), limit = std::abs(exact) * (0x1p-8 + 5e-5);
        const double flushed =
            1.0001 * 0x1p-126 * std::max(1.0, std::abs(static_cast<double>(g.factor[std::min(r, c.rows - 1)])));
        ASSERT_TRUE(error <= limit || (std::abs(exact) < flushed && to_float(*at) == 0))
            << r << " " << j << ": " << to_float(*at) << " " << exact;
      }
    }
  }
  EXPECT_TRUE(words.canary_intact() && along.canary_intact() && down.canary_intact());
}

TEST(TileGradient, IsTheWordsExponentialInBothOperands) {
  for (const Flush flush : kFlushes) {
    for (const std::int64_t rows : {1, 15, 16, 17, 31, 32}) {
      for (const std::int64_t columns : {32, 64, 192}) check_gradient({rows, columns}, flush);
    }
  }
  check_gradient({32, 64, true, false}, Flush::kRight);
  check_gradient({31, 64, false, true}, Flush::kRight);
}

}  // namespace
}  // namespace tileloss::test
