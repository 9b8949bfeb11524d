// Logits of a tile in 16 bits and back (backends/cpu/head/kept_logits.h), on every instruction set, on memory between guard
// pages.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "backends/cpu/isa/isa.h"
#include "judge/strict/guard_buffer.h"
#include "support/synthetic.h"

namespace tileloss::test {
namespace {

constexpr float kSteps = 0x1p9F;  // of an exponent
constexpr float kInfinite = std::numeric_limits<float>::infinity();

const impl::cpu::KeptLogitsTable& table() {
  const impl::cpu::IsaChoice choice = impl::cpu::choose_isa(TILELOSS_ISA_AUTO);
  EXPECT_EQ(choice.error, "");
  return impl::cpu::kernels(choice.isa).kept_logits;
}

struct There {
  float max = 0;
  std::vector<float> back;
};

// The words have room for a multiple of 64, the logits for no more than there are.
There there_and_back(const std::vector<float>& z, float steps_per_unit, tools::Flush flush) {
  const std::size_t bytes = z.size() * sizeof(float);
  tools::GuardBuffer in(bytes, flush), out(bytes, flush), words((z.size() + 63) / 64 * 64 * 2, flush);
  std::copy(z.begin(), z.end(), in.as<float>());
  in.make_read_only();
  const auto count = static_cast<std::int64_t>(z.size());
  There there;
  there.max = table().keep(in.as<float>(), count, steps_per_unit, words.as<std::uint16_t>());
  words.make_read_only();
  table().restore(words.as<std::uint16_t>(), count, there.max, steps_per_unit, out.as<float>());
  EXPECT_TRUE(words.canary_intact() && out.canary_intact());
  there.back.assign(out.as<float>(), out.as<float>() + count);
  return there;
}

TEST(KeptLogits, WithinHalfAStepAtEverySizeOffsetAndScale) {
  std::uint64_t seed = 0;
  for (const std::int64_t columns : {1, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 255, 256}) {
    for (const double offset : {0.0, 1e4, -1e4, 1e8}) {
      for (const float scale : {1.0F, 0.01F, 10.0F, 0x1p-60F, 0x1p60F}) {
        tools::Random random(++seed, tools::Stream::kLogits, -1);
        std::vector<float> z;
        for (std::int64_t j = 0; j < columns; ++j) z.push_back(static_cast<float>(offset + 40 * random.next_normal() / scale));
        const There there = there_and_back(z, scale * kSteps, seed % 2 == 0 ? tools::Flush::kLeft : tools::Flush::kRight);
        EXPECT_EQ(there.max, *std::max_element(z.begin(), z.end()));
        for (std::size_t j = 0; j < z.size(); ++j) {
          const double lost = (static_cast<double>(there.back[j]) - z[j]) * scale;
          const double below = (static_cast<double>(there.max) - z[j]) * scale;
          // Rounding the sum costs half a unit of the larger number; where that is more than a step, nothing is lost.
          const double unit = std::ldexp(std::fabs(static_cast<double>(z[j])) * scale, -24);
          if (below < 127.9) {
            EXPECT_LE(std::fabs(lost), unit > 0x1p-9 ? 0 : 0x1.02p-10 + unit) << columns << " " << offset << " " << scale;
          } else if (below > 128.1) {
            EXPECT_EQ(there.back[j], -kInfinite);
          }
        }
      }
    }
  }
}

TEST(KeptLogits, TheMaximumAndInfinitiesComeBackExactly) {
  std::vector<float> z(100, -kInfinite);
  EXPECT_EQ(there_and_back(z, kSteps, tools::Flush::kRight).back, z);
  z[17] = 3.25F;
  EXPECT_EQ(there_and_back(z, kSteps, tools::Flush::kRight).back, z);
  z[99] = -std::numeric_limits<float>::max();  // so far below that it counts as -inf
  z[3] = 3.25F - 129;
  z[4] = 3.25F - 127;
  const There there = there_and_back(z, kSteps, tools::Flush::kLeft);
  z[99] = z[3] = -kInfinite;
  EXPECT_EQ(there.back, z);
}

}  // namespace
}  // namespace tileloss::test
