// How fast this machine multiplies matrices at best: the yardstick of the losses fused with the LM head.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backends/cpu/isa/kernels.h"
#include "support/thread_team.h"

namespace tileloss::tools {

// The kernels' own inner loop on all threads at once, each over a panel of either operand that stays in its L1. The operands are
// random: the multipliers take less power on zeros, and the clock would rise.
class MatmulRoof {
 public:
  MatmulRoof(const impl::cpu::MatmulTable& matmul, impl::cpu::Compute compute);

  // 10^12 floating point operations a second, the median of `repetitions` runs of some 20 ms.
  double tflops(ThreadTeam& team, int repetitions);

 private:
  // Each on a cache line of its own.
  struct alignas(64) Line {
    float floats[16];
  };
  std::vector<Line> packed(std::int64_t rows, impl::cpu::PackFunction pack, std::span<const float> values) const;
  double run_s(ThreadTeam& team);

  const impl::cpu::MatmulTable& matmul_;
  impl::cpu::Compute compute_;
  std::int64_t depth_;
  std::int64_t repeats_ = 0;  // 0: not known yet
  std::vector<Line> a_, b_;
};

}  // namespace tileloss::tools
