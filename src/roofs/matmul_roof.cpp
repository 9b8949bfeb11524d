#include "roofs/matmul_roof.h"

#include <algorithm>
#include <atomic>

#include "roofs/roofs.h"
#include "support/synthetic.h"
#include "support/timer.h"

namespace tileloss::tools {
namespace {

// Both panels together: half of an L1 of 32 KB, or a little more where the least depth takes that: 20 KB of float32 in the panels
// of the products in tile registers.
constexpr std::int64_t kPanelBytes = 16 << 10;
constexpr std::int64_t kLeastDepth = 64;  // depths are multiples of it, so that no kernel has a remainder
constexpr double kRunSeconds = 0.02;

}  // namespace

MatmulRoof::MatmulRoof(const impl::cpu::MatmulTable& matmul, impl::cpu::Compute compute) : matmul_(matmul), compute_(compute) {
  const std::int64_t in_word = compute == impl::cpu::Compute::kBfloat16 ? matmul.bfloat16_in_word : 1;
  const auto word_bytes = static_cast<std::int64_t>(sizeof(float));
  const std::int64_t most = kPanelBytes / ((matmul.a_panel + matmul.b_panel) * word_bytes) * in_word;
  depth_ = std::max<std::int64_t>(most / kLeastDepth, 1) * kLeastDepth;
  const Random random(0, Stream::kLogits, 0);
  std::vector<float> values(static_cast<size_t>((matmul.a_panel + matmul.b_panel) * depth_));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(random.normal(i));
  const size_t size_a = static_cast<size_t>(matmul.a_panel * depth_);
  a_ = packed(matmul.a_panel, matmul.pack_a, std::span(values).first(size_a));
  b_ = packed(matmul.b_panel, matmul.pack_b, std::span(values).subspan(size_a));
}

std::vector<MatmulRoof::Line> MatmulRoof::packed(std::int64_t rows, impl::cpu::PackFunction pack,
                                                 std::span<const float> values) const {
  std::vector<Line> lines(static_cast<size_t>(matmul_.packed_floats(rows, rows, depth_, compute_) + 15) / 16);
  const impl::cpu::Operand x{values.data(), impl::cpu::kStorageFloat32, depth_, 1};
  pack(x, 0, rows, 0, depth_, compute_, lines.front().floats);
  return lines;
}

double MatmulRoof::run_s(ThreadTeam& team) {
  std::atomic<bool> sink = false;
  const Timer timer;
  // Every thread reads the same panels: each core has its own copy of them in L1.
  team.run([&](int) { sink = matmul_.tile_loop(a_.front().floats, b_.front().floats, depth_, repeats_, compute_) == 0; });
  return timer.seconds();
}

double MatmulRoof::tflops(ThreadTeam& team, int repetitions) {
  if (repeats_ == 0) {
    repeats_ = 64;
    for (double s = run_s(team); s < kRunSeconds; s = run_s(team)) repeats_ *= 2;
  }
  const double flops =
      2.0 * static_cast<double>(matmul_.a_panel * matmul_.b_panel * depth_) * static_cast<double>(repeats_) * team.size();
  std::vector<double> rates;
  for (int i = 0; i < repetitions; ++i) rates.push_back(flops / run_s(team) / 1e12);
  return median(rates);
}

}  // namespace tileloss::tools
