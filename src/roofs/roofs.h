// What this machine can do at best, measured: the yardstick of every benchmark.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "roofs/roof_loops.h"
#include "support/thread_team.h"

namespace tileloss::tools {

// Times in milliseconds for a buffer of `bytes` bytes that holds `elements` elements. Medians of the fastest variant.
struct Roofs {
  double in_place_ms = 0;  // read and write back every byte
  double copy_ms = 0;      // read every byte and write as many with non-temporal stores
  double read_ms = 0;
  double exp_ms = 0;  // one float32 exp an element, operands in L1: the kernels' own, the fastest one that we know
  double tflops = 0;  // of products of matrices (roofs/matmul_roof.h), where there are any; otherwise 0
};

// The best of both, field by field, and by how much they differ at most (0.15: 15 %).
Roofs faster_of(const Roofs& a, const Roofs& b);
double largest_difference(const Roofs& a, const Roofs& b);

// Measures with the widest instruction set of the machine, whatever the kernel uses: a roof belongs to the machine.
class RoofMeter {
 public:
  explicit RoofMeter(int threads);

  // `from` keeps its contents. `to`: another buffer of that size; null: the second half of `from` is overwritten with the first,
  // twice, in place of a copy of the whole. The first call tries every variant, later ones only the fastest.
  Roofs measure(char* from, char* to, int64_t bytes, int64_t elements, int repetitions);
  // Which variant won, for each roof: "in place: 4 streams, prefetch 1024; ...".
  std::string description() const;

 private:
  struct Choice {
    int variant = 0;
    int64_t distance = 0;
    bool known = false;
  };
  double time_pass(RoofPass pass, char* from, char* to, int64_t bytes, int64_t distance);
  double best_pass(RoofPass RoofVariant::*pass, Choice& choice, char* from, char* to, int64_t bytes, int repetitions);
  double best_exp(int64_t elements, int repetitions);

  ThreadTeam team_;
  RoofLoops loops_;
  Choice in_place_;
  Choice copy_;
  Choice read_;
  uint64_t sink_ = 0;  // keeps the reads alive
};

double median(std::vector<double> values);

}  // namespace tileloss::tools
