// The judgement of losses fused with the LM head: their dhidden, dhead and dbias against the double-precision oracle, and what
// float32 sums over H may get wrong in logp and the other row outputs.
//
// The yardstick is the ideal implementation: it rounds each dlogit once to the compute type, is exact otherwise, and stores the
// result in the output's type. For each gradient:
//
//   frobenius   ||g - g_ref||_F <= max(1.5 x the ideal's, float32's share). The roundings of a few terms scatter: another order
//               of the same operations rounds otherwise. Where fewer than n = 64 of equal size would make the sum, the
//               square of the ideal's error is given 4 / sqrt(n) more of what it is expected to be at most, u^2 / 3 times the
//               sum of the squared terms (u = 2^-8 or 2^-24). A rounding error is uniform, so that its square has a standard
//               deviation of 0.9 of its mean, and that of n of them one of 0.9 / sqrt(n): it takes more than 4 of those to fail.
//               The roundings on store likewise, with the type's own u.
//   cap         each row of dhidden, each row of dhead, each element of dbias:
//               c * u * ||dlogits||_2 * max ||the other operand's row||_2 + u * ||g_ref||_2 + float32's share + half an ULP of
//               the stored row, with dlogits the row's or the column's, u = 2^-8 (compute type bfloat16) or 2^-24 (float32), c =
//               kCap. The second term is for roundings that all are alike: dlogits of nearly one size, as in a column of a model
//               with random weights, are rounded by nearly one factor. dbias has no operand that turns roundings of one sign
//               against each other: u * ||dlogits||_1 there. And never less than 1.5 x the ideal's error in that row. c measured,
//               of the ideal and of the kernels: 0.95 at worst (a row of a trained model's dhead that one dlogit rules), 0.41 for
//               the trained model's dhidden.
//
// Float32's share is what arithmetic in float32 costs an implementation that is not exact:
//   a dlogit     2^-24 (8 + 2|z - m|) of the size of its terms, and the error e of its logit x: 2^-24 sqrt(H) times the size
//                sqrt(sum_h (hidden head)^2) of that sum's terms and |x|: on the way to a logit far from 0 the H partial sums
//                are up to as large as it, and each is rounded. (Summed one after the other, at random, 200 logits lose at most
//                0.75 of this for H up to 4096 and terms of any common offset; without |x| 1.3 times it around 0, and 20 times
//                where all terms have one sign.) Each element's is taken as independent of the others;
//   a row        2^-21 and the mean of e, of all its dlogits alike;
//   the sum      2^-24 sqrt(terms) times (the root of the sum of the squared terms + the size of the result).
// With compute type bfloat16 it is a hundredth of the ideal's error, and rules only where dlogits happen to be exact. With
// float32 it rules: there the ideal, one rounding, is out of reach of any float32 sum.
//
// dhidden_r and dhead_r of a low-rank part of the head are judged as dhidden and dhead are, beside operands of their own.
//
// Rows not in use must have a dhidden of exactly 0, rows of dhead and elements of dbias from the valid vocabulary on exactly 0,
// or what was there before when accumulating.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "judge/gates/error_metric.h"
#include "judge/oracles/logits_rows.h"
#include "oracle/linear.h"
#include "oracle/oracle.h"

namespace tileloss::tools {

constexpr double kIdealFactor = 1.5;
constexpr double kCap = 1.5;

class LinearOracleCase {
 public:
  // `operands` and `norms` must outlive it.
  LinearOracleCase(const oracle::LinearOperands& operands, const LinearNorms& norms,
                   const oracle::LinearGradients::NeedsGrad& needs_grad);

  // Each row in use once; then finish().
  void add_row(const LogitsRow& row, const oracle::SoftmaxRow& softmax, const oracle::GradientRow& gradient);
  void finish();

  // Of the oracle; a row is one of the output's.
  std::span<const double> gradient(LinearOutput which) const { return gradients_.gradient(which); }

  // `before`: what was in the buffer when the call was told to accumulate; data null: it was not. dbias is [V, 1].
  std::vector<Gate> judge(LinearOutput which, const oracle::StoredMatrix& output, const oracle::StoredMatrix& before = {}) const;
  // Of one row of dhidden or dhidden_r alone, the only one that was added, or none if it is not in use.
  std::vector<Gate> judge_token(LinearOutput which, const oracle::StoredMatrix& output, std::int64_t row) const;

 private:
  // Of a row of the output.
  struct Bound {
    double square = 0;          // sum dlogit^2
    double absolute = 0;        // sum |dlogit|
    double weighted = 0;        // sum dlogit^2 ||operand||^2
    double independent_sq = 0;  // sum (error of dlogit)^2 ||operand||^2
    double common = 0;          // the errors that all dlogits of a row share
  };
  struct Spread {  // sums of t and t^2 over all terms, t = (dlogit * ||operand||)^2, or the square of what is stored
    double first = 0, second = 0;

    void add(double term);
    void merge(const Spread& other);
    double scatter(double unit) const;
  };
  struct Verdict;
  struct Target;

  void flush();
  double unit() const;  // half an ULP of 1 in the compute type
  double share_of_float32(const Bound& bound, double terms, double size) const;
  Target target(LinearOutput which, const oracle::StoredMatrix& output, const oracle::StoredMatrix& before) const;
  void judge_row(const Target& target, std::int64_t row, Verdict& verdict) const;
  std::vector<Gate> judge_rows(const Target& target, std::int64_t first, std::int64_t end) const;

  const oracle::LinearOperands& operands_;
  const LinearNorms& norms_;
  oracle::LinearGradients gradients_;
  std::vector<std::int64_t> block_rows_;
  std::vector<double> block_;  // their dlogits
  // By LinearOutput.
  std::array<std::vector<Bound>, oracle::kLinearOutputs> bounds_;
  std::array<Spread, oracle::kLinearOutputs> spreads_;
  std::int64_t rows_added_ = 0;
};

}  // namespace tileloss::tools
