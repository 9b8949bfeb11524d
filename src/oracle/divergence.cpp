// Of the divergences three have a beta. JSD: m = beta q + (1 - beta) p, 0 < beta < 1 (at 0 and 1 TRL's generalised JSD is the
// forward and the reverse KL; here those have their names). Skewed forward KL: sum q log(q/m), the same m; skewed reverse KL:
// sum p log(p/m), m = beta p + (1 - beta) q; both 0 <= beta <= 1, the KL at 0 and nothing at 1.
//
// Where one side has nothing:
//   q_j = 0 < p_j   forward KL            0 in D, gradient p_j (as ever p - q)
//                   reverse KL, Jeffreys  D = +inf; gradient NaN at every such j, elsewhere -inf where p_k > 0, and where p_k = 0
//                                         0 and -q_k
//                   JSD                   (1 - beta) p_j log(1/(1 - beta)) in D; gradient finite
//                   skewed forward        0 in D; gradient finite. With beta = 0 as the forward KL
//                   skewed reverse        p_j log(1/beta) in D; gradient finite. With beta = 0 as the reverse KL
//                   total variation       p_j / 2
//   p_j = 0 < q_j   forward KL, Jeffreys  D = +inf; gradient finite: p - q, plus the reverse part, which is 0 at j
//                   reverse KL            0 in D, gradient 0 at j
//                   JSD                   beta q_j log(1/beta) in D, gradient 0 at j
//                   skewed forward        q_j log(1/beta) in D, gradient 0 at j. With beta = 0 as the forward KL
//                   skewed reverse        0 in D, gradient 0 at j
//                   total variation       q_j / 2, gradient 0 at j
#include "oracle/divergence.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

namespace tileloss::oracle {
namespace {

// e^x - 1 - x for |x| < 1, by its series: 1/22! is 1e-21.
double exp_remainder(double x) {
  double sum = 0.0;
  for (int k = 21; k >= 2; --k) sum = (sum * x + 1.0) / k;
  return sum * x * x;
}

// a log(a/b) - a + b >= 0, from log(b/a).
double kl_term(double a, double b, double log_b_over_a) {
  if (a == 0.0) return b;
  return std::fabs(log_b_over_a) < 1.0 ? a * exp_remainder(log_b_over_a) : (b - a) - a * log_b_over_a;
}

// log(1 - weight + weight e^x), 0 <= weight <= 1.
double log_mix(double weight, double x) {
  if (weight == 0.0 || weight == 1.0) return weight == 0.0 ? 0.0 : x;
  return x <= 1.0 ? std::log1p(weight * std::expm1(x)) : x + std::log1p((1.0 - weight) * std::expm1(-x));
}

// p - q
double difference(const Classes& classes, std::size_t c) {
  const double p = classes.p[c], q = classes.q[c], log_ratio = classes.log_ratio[c];
  return p != 0.0 && q != 0.0 && std::fabs(log_ratio) < 1.0 ? q * std::expm1(log_ratio) : p - q;
}

double term(Divergence divergence, double beta, const Classes& classes, std::size_t c) {
  const double p = classes.p[c], q = classes.q[c], log_ratio = classes.log_ratio[c];
  const double rest = 1.0 - beta;
  switch (divergence) {
    case Divergence::kForwardKl: return kl_term(q, p, log_ratio);
    case Divergence::kReverseKl: return kl_term(p, q, -log_ratio);
    case Divergence::kJeffreys: return kl_term(q, p, log_ratio) + kl_term(p, q, -log_ratio);
    case Divergence::kJsd: {
      const double m = beta * q + rest * p;
      return beta * kl_term(q, m, log_mix(rest, log_ratio)) + rest * kl_term(p, m, log_mix(beta, -log_ratio));
    }
    case Divergence::kSkewForwardKl: return kl_term(q, beta * q + rest * p, log_mix(rest, log_ratio));
    case Divergence::kSkewReverseKl: return kl_term(p, beta * p + rest * q, log_mix(rest, -log_ratio));
    case Divergence::kTotalVariation: return std::fabs(difference(classes, c)) / 2.0;
  }
  throw std::invalid_argument("divergence: not one of the enumerators");
}

// What term() adds to the formula's own term, summed: D = sum term + excess * (sum q - sum p).
double excess(Divergence divergence, double beta) {
  switch (divergence) {
    case Divergence::kForwardKl: return 1.0;                // sum a - sum b with a = q, b = p
    case Divergence::kReverseKl: return -1.0;               // a = p, b = q
    case Divergence::kSkewForwardKl: return 1.0 - beta;     // a = q, b = m
    case Divergence::kSkewReverseKl: return -(1.0 - beta);  // a = p, b = m
    case Divergence::kJsd:                                  // beta (1 - beta) - (1 - beta) beta
    case Divergence::kJeffreys:
    case Divergence::kTotalVariation: return 0.0;
  }
  throw std::invalid_argument("divergence: not one of the enumerators");
}

struct Slope {
  double value, size;
};

// p dD/dp + excess * p. (dD/dp of the formula's own sum has the constants -1, 1, -(1 - beta), 1 - beta, which excess takes away:
// p dD/dp of the forward KL is -q, and here p - q.)
Slope class_slope(Divergence divergence, double beta, const Classes& classes, std::size_t c) {
  const double p = classes.p[c], q = classes.q[c], log_ratio = classes.log_ratio[c];
  const double rest = 1.0 - beta;
  const double p_minus_q = difference(classes, c);
  const double size_p = std::fabs(classes.log_p[c]), size_q = std::fabs(classes.log_q[c]);
  const Slope none{0.0, 0.0};
  switch (divergence) {
    case Divergence::kForwardKl: return {p_minus_q, p + q};
    case Divergence::kReverseKl: return p == 0.0 ? none : Slope{p * log_ratio, p * (size_p + size_q)};
    case Divergence::kJeffreys: {
      const Slope reverse = class_slope(Divergence::kReverseKl, beta, classes, c);
      return {p_minus_q + reverse.value, p + q + reverse.size};
    }
    case Divergence::kJsd: {
      if (p == 0.0) return none;
      const double log_m_over_p = log_mix(beta, -log_ratio);
      return {-rest * p * log_m_over_p, rest * p * (size_p + std::fabs(classes.log_p[c] + log_m_over_p))};
    }
    case Divergence::kSkewForwardKl: {
      // -(1 - beta) p (q/m - 1), where q - m = (1 - beta) (q - p)
      if (rest == 0.0 || (p == 0.0 && (q == 0.0 || beta != 0.0))) return none;
      const double p_over_m = beta == 0.0 ? 1.0 : p / (beta * q + rest * p);
      return {rest * rest * p_minus_q * p_over_m, rest * p_over_m * (p + q)};
    }
    case Divergence::kSkewReverseKl: {
      // p (log p - log m) + p (1 - beta) (q/m - 1), where q - m = beta (q - p)
      if (p == 0.0) return none;
      const double m = beta * p + rest * q;
      const double log_m_over_p = log_mix(rest, -log_ratio);
      const double mixed = beta == 0.0 ? 0.0 : rest * beta * p_minus_q * (p / m);
      return {-p * log_m_over_p - mixed,
              p * (size_p + std::fabs(classes.log_p[c] + log_m_over_p)) + (beta == 0.0 ? 0.0 : rest * p * (q / m))};
    }
    case Divergence::kTotalVariation: return {p_minus_q == 0.0 ? 0.0 : std::copysign(p / 2.0, p_minus_q), p / 2.0};
  }
  throw std::invalid_argument("divergence: not one of the enumerators");
}

}  // namespace

void check_beta(Divergence divergence, double beta) {
  const bool inside = beta > 0.0 && beta < 1.0, on_it = beta == 0.0 || beta == 1.0;
  if (divergence == Divergence::kJsd && !inside)
    throw std::invalid_argument("beta: expected 0 < beta < 1 for jsd, given " + std::to_string(beta));
  const bool skewed = divergence == Divergence::kSkewForwardKl || divergence == Divergence::kSkewReverseKl;
  if (skewed && !inside && !on_it)
    throw std::invalid_argument("beta: expected 0 <= beta <= 1 for a skewed divergence, given " + std::to_string(beta));
}

void Classes::resize(std::size_t count) {
  for (std::vector<double>* values : {&p, &q, &log_p, &log_q, &log_ratio}) values->resize(count);
}

void Classes::set(std::size_t c, double log_p_value, double log_q_value) {
  log_p[c] = log_p_value;
  log_q[c] = log_q_value;
  p[c] = std::exp(log_p_value);
  q[c] = std::exp(log_q_value);
  log_ratio[c] = log_p_value - log_q_value;
}

double divergence_value(Divergence divergence, double beta, const Classes& classes) {
  long double sum = 0.0L, q_minus_p = 0.0L;
  for (std::size_t c = 0; c < classes.size(); ++c) {
    sum += term(divergence, beta, classes, c);
    q_minus_p += static_cast<long double>(classes.q[c]) - classes.p[c];
  }
  if (!classes.complete) sum += excess(divergence, beta) * q_minus_p;
  return static_cast<double>(sum);
}

void divergence_slopes(Divergence divergence, double beta, const Classes& classes, DivergenceSlopes& out) {
  out.slope.resize(classes.size());
  out.size.resize(classes.size());
  out.largest = static_cast<std::size_t>(std::max_element(classes.p.begin(), classes.p.end()) - classes.p.begin());
  long double others_p = 0.0L, others_slope = 0.0L, size_sum = 0.0L;
  for (std::size_t c = 0; c < classes.size(); ++c) {
    const Slope slope = class_slope(divergence, beta, classes, c);
    out.slope[c] = slope.value;
    out.size[c] = slope.size;
    if (!classes.complete) {
      const double constant = excess(divergence, beta) * classes.p[c];
      out.slope[c] -= constant;
      out.size[c] += std::fabs(constant);
    }
    size_sum += out.size[c];
    if (c == out.largest) continue;
    others_p += classes.p[c];
    others_slope += out.slope[c];
  }
  out.others_p = static_cast<double>(others_p);
  out.others_slope = static_cast<double>(others_slope);
  out.slope_sum = classes.size() == 0 ? 0.0 : static_cast<double>(others_slope + out.slope[out.largest]);
  out.size_sum = static_cast<double>(size_sum);
}

double DivergenceSlopes::gradient(const Classes& classes, std::size_t c) const {
  const double p = classes.p[c];
  if (p == 0.0) return slope[c];
  if (classes.complete && c == largest && std::isfinite(slope_sum)) return slope[c] * others_p - p * others_slope;
  return slope[c] - p * slope_sum;
}

}  // namespace tileloss::oracle
