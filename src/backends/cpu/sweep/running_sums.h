// What a row's forward carries from block to block.
#pragma once

#include <cstdint>

#include "core/logit_transform.h"
#include "core/row_state.h"

namespace tileloss::impl::cpu {

// The sums are relative to the reference, in units of log 2. Blocks add into double: 75 blocks cost no digits. A template, so
// that instruction sets do not share its functions.
template <class Simd, bool kFine>
struct RunningSums {
  // A block's share.
  struct Block {
    double sum = 0, entropy = 0, collision = 0;
  };
  double sum = 0, entropy = 0, collision = 0, smoothing = 0, smoothing_weight = 0;
  float raw_max = -kInfinity;  // of x, the target's included
  std::int64_t max_start = 0;  // of the first block that holds raw_max
  float offset = 0;            // what the exponents are computed with
  double reference = 0;        // what that subtracts
  // What both ought to be, by the logits so far; 0 until one above -inf was seen. Of 16-bit logits they are integers, so that
  // catching up late multiplies the sums by a power of 2 and changes no bit of the result.
  float due_offset = 0;
  double due_reference = 0;
  bool is_started = false;

  // log2(e) and what an offset subtracts, as the exponents have them: exact where the loop makes up for rounding the scale.
  static double log2e(const LogitTransform& t) { return kFine ? LogitTransform::kExactLog2E : t.log2e; }
  static double effective_offset(const LogitTransform& t, float offset) {
    const double exact = Simd::effective_offset(offset, t.exponent_scale);
    return kFine ? exact * (t.exact_exponent_scale / t.exponent_scale) : exact;
  }

  void add(const Block& block) {
    sum += block.sum;
    entropy += block.entropy;
    collision += block.collision;
  }

  void move_reference(double to) {
    const double shift = reference - to;
    const double factor = sum == 0 ? 1 : __builtin_exp2(shift);
    entropy = factor == 0 ? 0 : factor * (entropy + (sum == 0 ? 0 : shift * sum));
    sum *= factor;
    collision *= factor * factor;
    smoothing += smoothing_weight == 0 ? 0 : shift * smoothing_weight;
    reference = to;
  }
  // The nearest reference that the vectors can have is due.
  void choose_reference(const LogitTransform& t, double wanted) {
    due_offset = Simd::offset_for(wanted, t.exponent_scale);
    due_reference = effective_offset(t, due_offset);
    is_started = true;
  }
  void catch_up() {
    if (reference == due_reference) return;
    move_reference(due_reference);
    offset = due_offset;
  }
};

}  // namespace tileloss::impl::cpu
