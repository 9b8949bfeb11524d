// Divergences between two distributions over the same classes, p (the student's) and q (the teacher's), in double, and their
// derivatives. The classes are the vocabulary's columns, or those that a sparse teacher lists (distillation.h).
//
// No value is a difference of nearly equal sums: log(b/a) is given, or follows from it by log1p and expm1, and
//   sum a log(a/b) = sum a f(log(b/a)) + sum a - sum b,   f(x) = e^x - 1 - x >= 0,
// where the two sums over all classes are 1. So p = q gives exactly 0, and values near it keep their digits.
#pragma once

#include <cstddef>
#include <vector>

namespace tileloss::oracle {

// generated: enums divergence
enum class Divergence { kForwardKl, kReverseKl, kJsd, kJeffreys, kSkewForwardKl, kSkewReverseKl, kTotalVariation };
// end of generated

// Throws std::invalid_argument if beta is outside the divergence's range.
void check_beta(Divergence divergence, double beta);

struct Classes {
  std::vector<double> p, q;
  std::vector<double> log_p, log_q;  // -inf where there is nothing
  std::vector<double> log_ratio;     // log p - log q, to the last digit also where that is small; not looked at where both are 0
  bool complete = true;              // p sums to 1, and so does q: what is left of either sum is rounding. If not, the formulas
                                     // hold as sums over these classes

  std::size_t size() const { return p.size(); }
  void resize(std::size_t count);
  void set(std::size_t c, double log_p_value, double log_q_value);  // p, q and their logarithms; log_ratio their difference
};

// A class without q adds 0 to sum q (...), one without p adds 0 to sum p (...); one with q and without p makes sum q log(q/p)
// +inf, and the other way round.
double divergence_value(Divergence divergence, double beta, const Classes& classes);

// With p a softmax: dD/dz_c = slope[c] - p_c slope_sum. Likewise for a column outside of the classes, whose slope is 0. The sizes
// are the same sums with absolute values of terms, in which each logarithm of a ratio is two terms.
struct DivergenceSlopes {
  std::vector<double> slope;  // p_c dD/dp_c; if the classes are complete, but for a multiple of p_c, which cancels
  std::vector<double> size;
  double slope_sum = 0.0;
  double size_sum = 0.0;
  // Of complete classes: the class of the largest p, and the sums of p and of the slope over the others.
  std::size_t largest = 0;
  double others_p = 0.0;
  double others_slope = 0.0;

  // dD/dz_c. Where p is near 1 its complement is a sum. Without p there is the class's own part, -q or 0: 0 * inf is 0 here.
  double gradient(const Classes& classes, std::size_t c) const;
};
void divergence_slopes(Divergence divergence, double beta, const Classes& classes, DivergenceSlopes& out);

}  // namespace tileloss::oracle
