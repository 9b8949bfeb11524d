#include "tests/backends/toy/toy_sweeps.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/number_formats.h"

namespace tileloss::test {
namespace {

using impl::Bfloat16;
using impl::DivergenceTerm;
using impl::Float16;
using impl::kInfinity;
using impl::LogitTransform;
using impl::PairStats;
using impl::RowState;
using impl::RowStats;
using impl::Teacher;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

float read(const void* data, tileloss_dtype dtype, std::int64_t at) {
  switch (dtype) {
    case TILELOSS_BFLOAT16: return impl::to_float(static_cast<const Bfloat16*>(data)[at]);
    case TILELOSS_FLOAT16: return impl::to_float(static_cast<const Float16*>(data)[at]);
    default: return static_cast<const float*>(data)[at];
  }
}
float read(const tileloss_matrix& m, std::int64_t i, std::int64_t j) {
  return read(m.data, m.dtype, i * m.row_stride + j * m.col_stride);
}

void write(void* data, tileloss_dtype dtype, std::int64_t at, double value) {
  const auto x = static_cast<float>(value);
  switch (dtype) {
    case TILELOSS_BFLOAT16: static_cast<Bfloat16*>(data)[at] = impl::from_float<Bfloat16>(x); break;
    case TILELOSS_FLOAT16: static_cast<Float16*>(data)[at] = impl::from_float<Float16>(x); break;
    default: static_cast<float*>(data)[at] = x; break;
  }
}

// Row i of a matrix whose rows may lie in groups.
std::int64_t row_at(const impl::Problem& p, std::int64_t i, std::int64_t row_stride, std::int64_t group_stride) {
  const std::int64_t rows = p.args.row_groups.rows;
  return rows > 0 ? i / rows * group_stride + i % rows * row_stride : i * row_stride;
}

// As the products see it.
double operand(const impl::Problem& p, double x) {
  return p.compute == TILELOSS_BFLOAT16 ? impl::to_float(impl::from_float<Bfloat16>(static_cast<float>(x))) : x;
}

}  // namespace

// A side of a row: its z in double, relative to the very element that the float32 maximum came from.
class ToySweeps::Side {
 public:
  template <class Logit>
  Side(const RowStats& stats, const LogitTransform& transform, std::int64_t columns, Logit&& logit) : stats_(stats) {
    double max = stats.max;
    for (std::int64_t j = 0; j < columns; ++j) {
      const float x = logit(j);
      z_.push_back(transform.exact_value(x));
      if (static_cast<double>(transform.value(x)) == stats.max) max = z_.back();
    }
    for (double& z : z_) z = z == max ? 0 : z - max;
  }

  // What is to be known of a column; of the row's label from its own statistics.
  RowStats operator()(std::int64_t j, std::int64_t target) const {
    if (j == target) return stats_;
    RowStats c;
    c.logp = shifted(j) - stats_.log_sum;
    c.p = std::exp(c.logp);
    c.one_minus_p = 1 - c.p;
    return c;
  }
  double shifted(std::int64_t j) const { return z_[static_cast<std::size_t>(j)]; }

 private:
  const RowStats& stats_;
  std::vector<double> z_;
};

struct ToySweeps::Terms {
  double value = 0;
  std::vector<double> slope;  // dD/dz of every column
};

float ToySweeps::logit(std::int64_t i, std::int64_t j) const {
  if (z_ != nullptr) return z_[i * p_.columns + j];
  const tileloss_matrix& m = p_.args.logits;
  return read(m.data, m.dtype, row_at(p_, i, m.row_stride, p_.args.row_groups.logits_stride) + j);
}
float ToySweeps::teacher_logit(std::int64_t i, std::int64_t j) const {
  if (teacher_z_ != nullptr) return teacher_z_[i * p_.columns + j];
  const tileloss_matrix& m = p_.args.teacher_logits;
  return read(m.data, m.dtype, row_at(p_, i, m.row_stride, p_.args.row_groups.teacher_logits_stride) + j);
}

ToySweeps::Side ToySweeps::student(std::int64_t i, const RowStats& stats) const {
  return {stats, impl::make_transform(p_), p_.columns, [&](std::int64_t j) { return logit(i, j); }};
}
ToySweeps::Side ToySweeps::teacher(std::int64_t i, const RowStats& stats) const {
  return {stats, impl::make_teacher_transform(p_), p_.columns, [&](std::int64_t j) { return teacher_logit(i, j); }};
}

// --------------------------------------------------------------------------------------------------------------- forward

void ToySweeps::make_logits() const {
  const auto product = [&](std::int64_t i, const tileloss_matrix& hidden, const tileloss_matrix& head,
                           const tileloss_vector& bias, float* z) {
    for (std::int64_t j = 0; j < p_.columns; ++j) {
      double sum = impl::present(bias) ? read(bias.data, bias.dtype, j * bias.stride) : 0.0;
      for (std::int64_t h = 0; h < hidden.cols; ++h) sum += operand(p_, read(hidden, i, h)) * operand(p_, read(head, j, h));
      z[i * p_.columns + j] = static_cast<float>(sum);
    }
  };
  for (std::int64_t i = 0; i < p_.rows; ++i) {
    if (rows_.targets[i] == impl::kIgnoredRow) continue;
    product(i, p_.args.hidden, p_.args.head, p_.args.bias, z_);
    if (teacher_z_ != nullptr) product(i, p_.args.teacher_hidden, p_.args.teacher_head, p_.args.teacher_bias, teacher_z_);
  }
}

template <class Logit>
RowState ToySweeps::gather(std::int64_t i, const LogitTransform& transform, Logit&& logit) const {
  const float* const weights = impl::class_weights(p_);
  const std::int64_t target = rows_.targets[i];
  RowState s;
  for (std::int64_t j = 0; j < p_.columns; ++j) {
    const float z = transform.value(logit(i, j));
    if (std::isnan(z) || target == impl::kBadTarget) {
      const auto nan = std::numeric_limits<float>::quiet_NaN();
      return {nan, nan, nan, nan, nan, nan, -1};
    }
    if (z > s.max || s.argmax < 0) {
      s.max = z;
      s.argmax = p_.logit.vocab_start + j;
    }
    if (j == target) s.target = z;
  }
  double sum = 0, entropy = 0, collision = 0, smoothing = 0;
  RowStats of_max;
  of_max.max = s.max;
  const Side side(of_max, transform, p_.columns, [&](std::int64_t j) { return logit(i, j); });
  for (std::int64_t j = 0; j < p_.columns; ++j) {
    const double z = transform.exact_value(logit(i, j)), shifted = side.shifted(j), e = std::exp(shifted);
    if (j != target) sum += e;
    if (e != 0) entropy += shifted * e;
    collision += e * e;
    smoothing += (std::isinf(s.max) ? z : shifted) * (weights == nullptr ? 1.0 : static_cast<double>(weights[j]));
  }
  s.sum = static_cast<float>(sum);
  s.entropy_sum = static_cast<float>(entropy);
  s.collision_sum = static_cast<float>(collision);
  s.smoothing_sum = static_cast<float>(smoothing);
  return s;
}

void ToySweeps::forward() const {
  const LogitTransform transform = impl::make_transform(p_);
  for (std::int64_t i = 0; i < p_.rows; ++i) {
    rows_.states[i] = {};
    if (rows_.targets[i] == impl::kIgnoredRow) continue;
    rows_.states[i] = gather(i, transform, [&](std::int64_t r, std::int64_t j) { return logit(r, j); });
    if (rows_.pairs != nullptr) rows_.pairs[i] = look(i);
  }
}

// ------------------------------------------------------------------------------------- a target that is more than a label

PairStats ToySweeps::look(std::int64_t i) const {
  const auto student = [&](std::int64_t r, std::int64_t j) { return logit(r, j); };
  PairStats s;
  s.student = s.label = impl::make_row_stats(rows_.states[i]);
  if (const auto transform = impl::make_label_transform(p_)) s.label = impl::make_row_stats(gather(i, *transform, student));
  if (p_.loss->has_teacher_logits()) {
    const auto teacher = [&](std::int64_t r, std::int64_t j) { return teacher_logit(r, j); };
    s.teacher = impl::make_row_stats(gather(i, impl::make_teacher_transform(p_), teacher));
  }
  s.sums.divergence = terms(i, s).value;
  return s;
}

ToySweeps::Terms ToySweeps::terms(std::int64_t i, PairStats& s) const {
  bool is_finite = std::isfinite(s.student.max);
  Terms t;
  switch (p_.loss->info.teacher) {
    case Teacher::kProbabilities: t = terms_of_probabilities(i, s); break;
    case Teacher::kColumns: t = terms_of_columns(i, s); break;
    default:
      is_finite = is_finite && std::isfinite(s.teacher.max);
      t = terms_of_logits(i, s);
      break;
  }
  if (!is_finite || std::isnan(t.value)) {
    t.value = kNan;
    t.slope.assign(static_cast<std::size_t>(p_.columns), kNan);
  }
  return t;
}

ToySweeps::Terms ToySweeps::terms_of_logits(std::int64_t i, const PairStats& s) const {
  impl::Divergence d = p_.loss->info.make(impl::make_context(p_))->divergence();
  const Side own = student(i, s.student), other = teacher(i, s.teacher);
  const std::int64_t target = rows_.targets[i];
  std::vector<RowStats> of_p, of_q;
  std::size_t top = 0;
  for (std::int64_t j = 0; j < p_.columns; ++j) {
    of_p.push_back(own(j, target));
    of_q.push_back(other(j, target));
    if (of_p.back().p > of_p[top].p) top = of_p.size() - 1;
  }
  d.shift_for(of_p[top].p, of_q[top].p);
  Terms t;
  double mean = 0;
  for (std::size_t j = 0; j < of_p.size(); ++j) {
    const DivergenceTerm term = p_.columns == 1 ? DivergenceTerm{} : impl::label_term(d, of_p[j], of_q[j]);
    t.value += term.value;
    mean += term.form;
    t.slope.push_back(term.form);
  }
  // g - mean, the mean's own part taken together with g: of a certain column they all but cancel.
  for (std::size_t j = 0; impl::has_mean(d.kind) && j < of_p.size(); ++j) {
    t.slope[j] = t.slope[j] * of_p[j].one_minus_p - of_p[j].p * (mean - t.slope[j]);
  }
  return t;
}

ToySweeps::Terms ToySweeps::terms_of_probabilities(std::int64_t i, const PairStats& s) const {
  const Side own = student(i, s.student);
  const float* const weights = impl::class_weights(p_);
  const tileloss_matrix& m = p_.args.target_probs;
  const double smoothing = p_.loss->info.make(impl::make_context(p_))->label_smoothing();
  Terms t;
  double sum = 0;
  for (std::int64_t j = 0; j < p_.columns; ++j) {
    const double q = read(m.data, m.dtype, row_at(p_, i, m.row_stride, p_.args.row_groups.teacher_logits_stride) + j);
    const double w = (weights == nullptr ? 1.0 : static_cast<double>(weights[j])) *
                     ((1 - smoothing) * q + smoothing / static_cast<double>(p_.columns));
    if (w != 0) t.value -= w * own(j, rows_.targets[i]).logp;
    sum += w;
    t.slope.push_back(-w);
  }
  for (std::int64_t j = 0; j < p_.columns; ++j) t.slope[static_cast<std::size_t>(j)] += sum * own(j, impl::kTargetElsewhere).p;
  if (!std::isfinite(sum)) t.value = kNan;
  return t;
}

ToySweeps::Terms ToySweeps::terms_of_columns(std::int64_t i, PairStats& s) const {
  struct Known {
    std::int64_t column;
    double p, q, log_p, log_q, slope;
  };
  const auto stage = p_.loss->info.make(impl::make_context(p_));
  const Side own = student(i, s.student);
  const auto at = [](std::int64_t j) { return static_cast<std::size_t>(j); };
  const auto log_p = [&](std::int64_t j) { return own.shifted(j) - s.student.log_sum; };
  std::vector<double> p;
  for (std::int64_t j = 0; j < p_.columns; ++j) p.push_back(std::exp(log_p(j)));
  std::vector<Known> known;
  std::vector<bool> is_known(p.size());
  long double left = 1;
  double largest = -kInfinity, in_tail = 0, slope_sum = 0;
  s.teacher.argmax = -1;
  for (std::int64_t k = 0; k < p_.args.teacher_ids.cols; ++k) {
    const std::int64_t j = impl::integer_at(p_.args.teacher_ids, i, k);
    if (j < 0) continue;
    const double log_q = impl::number_at(p_.args.teacher_logprobs, i, k);
    known.push_back({j, p[at(j)], std::exp(log_q), log_p(j), log_q, 0});
    is_known[at(j)] = true;
    left -= std::exp(static_cast<long double>(log_q));
    if (log_q > largest || (log_q == largest && j < s.teacher.argmax)) s.teacher.argmax = j;
    largest = std::max(largest, log_q);
  }
  const auto normalise = [&](double Known::*value, double Known::*log) {
    double most = -kInfinity, sum = 0;
    for (const Known& k : known) most = std::fmax(most, k.*log);
    for (const Known& k : known) sum += std::exp(k.*log - most);
    for (Known& k : known) k.*value = std::exp(k.*log -= most + std::log(sum));
  };
  if (stage->tail() == impl::Tail::kRenormalise) {
    normalise(&Known::p, &Known::log_p);
    normalise(&Known::q, &Known::log_q);
  } else if (stage->tail() == impl::Tail::kLump) {
    for (std::size_t j = 0; j < p.size(); ++j) in_tail += is_known[j] ? 0 : p[j];
    const double q = left < 0 || (in_tail == 0 && left < 1e-2L) ? 0 : static_cast<double>(left);
    known.push_back({-1, in_tail, q, std::log(in_tail), std::log(q), 0});
  }
  Terms t;
  s.teacher.entropy = 0;
  for (Known& k : known) {
    const DivergenceTerm term = impl::class_term(stage->divergence(), k.p, k.q, k.log_p, k.log_q);
    t.value += term.value;
    slope_sum += k.slope = term.form;
    if (k.q != 0) s.teacher.entropy -= k.q * k.log_q;
  }
  const bool is_whole = stage->tail() == impl::Tail::kRenormalise;  // p of all others has no share
  const double of_tail = !known.empty() && known.back().column < 0 && in_tail != 0 ? known.back().slope / in_tail : 0;
  for (const double each : p) t.slope.push_back(is_whole ? 0 : each * (of_tail - slope_sum));
  for (const Known& k : known) {
    if (k.column >= 0) t.slope[at(k.column)] = k.slope - k.p * slope_sum;
  }
  return t;
}

// -------------------------------------------------------------------------------------------------------------- backward

void ToySweeps::row_gradient(std::int64_t i, const impl::RowStates& states, std::vector<double>& dz) const {
  const float* const weights = impl::class_weights(p_);
  const RowStats stats = states.stats(i);
  const Side own = student(i, stats);
  const impl::RowCoefficients& c = rows_.coefficients[i];
  for (std::int64_t j = 0; j < p_.columns; ++j) {
    const RowStats of = own(j, rows_.targets[i]);
    const double with_log = c.prob_logp == 0 || of.p == 0 ? 0 : c.prob_logp * of.logp;
    const double prob = j == rows_.targets[i] ? c.prob_plus_target : c.prob();
    double& d = dz[static_cast<std::size_t>(j)];
    if (j == rows_.targets[i]) d += c.target * of.one_minus_p;
    if (of.p != 0) d += of.p * (prob + with_log);
    if (c.uniform != 0) d += c.uniform * (weights == nullptr ? 1.0 : static_cast<double>(weights[j]));
  }
}

void ToySweeps::pair_gradient(std::int64_t i, std::vector<double>& dz) const {
  PairStats s = rows_.pairs[i];
  const impl::PairCoefficients& c = rows_.pair_coefficients[i];
  const Terms t = terms(i, s);
  const LogitTransform own = impl::make_transform(p_), label = impl::make_label_transform(p_).value_or(own);
  const double ratio = label.exact_exponent_scale / own.exact_exponent_scale;
  const Side of_label(s.label, label, p_.columns, [&](std::int64_t j) { return logit(i, j); });
  for (std::int64_t j = 0; j < p_.columns; ++j) {
    const auto at = static_cast<std::size_t>(j);
    const bool is_target = j == rows_.targets[i];
    const RowStats of = of_label(j, rows_.targets[i]);
    dz[at] = c.target * ratio * (is_target ? of.one_minus_p : -of.p) +
             (c.has_divergence || std::isnan(t.value) ? c.form * t.slope[at] : 0);
  }
}

void ToySweeps::head_gradients(std::int64_t i, const std::vector<double>& dx, std::vector<double>& dhead,
                               std::vector<double>& dbias) const {
  const tileloss_args& a = p_.args;
  for (std::int64_t h = 0; h < a.hidden.cols; ++h) {
    double sum = 0;
    for (std::int64_t j = 0; j < p_.columns; ++j) {
      const double d = operand(p_, dx[static_cast<std::size_t>(j)]);
      if (impl::present(a.dhidden)) sum += d * operand(p_, read(a.head, j, h));
      if (impl::present(a.dhead)) dhead[static_cast<std::size_t>(j * a.hidden.cols + h)] += d * operand(p_, read(a.hidden, i, h));
    }
    if (impl::present(a.dhidden))
      write(a.dhidden.data, a.dhidden.dtype, i * a.dhidden.row_stride + h * a.dhidden.col_stride, sum);
  }
  for (std::size_t j = 0; j < dbias.size(); ++j) dbias[j] += dx[j];
}

void ToySweeps::backward(const impl::RowStates& states) const {
  const tileloss_args& a = p_.args;
  const LogitTransform transform = impl::make_transform(p_);
  const auto columns = static_cast<std::size_t>(p_.columns);
  std::vector<double> dx(columns), dbias(columns),
      dhead(impl::present(a.dhead) ? columns * static_cast<std::size_t>(a.hidden.cols) : 0);
  for (std::int64_t i = 0; i < p_.rows; ++i) {
    const bool is_used = rows_.targets[i] != impl::kIgnoredRow;
    std::fill(dx.begin(), dx.end(), 0.0);
    if (is_used) rows_.pairs == nullptr ? row_gradient(i, states, dx) : pair_gradient(i, dx);
    for (std::int64_t j = 0; is_used && j < p_.columns; ++j) dx[static_cast<std::size_t>(j)] *= transform.derivative(logit(i, j));
    if (p_.loss->is_linear) {
      if (is_used) head_gradients(i, dx, dhead, dbias);
      for (std::int64_t h = 0; !is_used && h < a.dhidden.cols; ++h) {
        write(a.dhidden.data, a.dhidden.dtype, i * a.dhidden.row_stride + h * a.dhidden.col_stride, 0);
      }
      continue;
    }
    const std::int64_t row = row_at(p_, i, a.dlogits.row_stride, a.row_groups.dlogits_stride);
    for (std::int64_t j = 0; j < p_.total_columns; ++j) {
      write(a.dlogits.data, a.dlogits.dtype, row + j, j < p_.columns ? dx[static_cast<std::size_t>(j)] : 0);
    }
  }
  const bool adds = p_.linear.accumulate != 0;
  for (std::int64_t j = 0; p_.loss->is_linear && j < p_.total_columns; ++j) {
    for (std::int64_t h = 0; impl::present(a.dhead) && h < a.dhead.cols; ++h) {
      const double sum = j < p_.columns ? dhead[static_cast<std::size_t>(j * a.hidden.cols + h)] : 0;
      write(a.dhead.data, a.dhead.dtype, j * a.dhead.row_stride + h * a.dhead.col_stride, sum + (adds ? read(a.dhead, j, h) : 0));
    }
    if (!impl::present(a.dbias)) continue;
    const double before = adds ? read(a.dbias.data, a.dbias.dtype, j * a.dbias.stride) : 0;
    write(a.dbias.data, a.dbias.dtype, j * a.dbias.stride, before + (j < p_.columns ? dbias[static_cast<std::size_t>(j)] : 0));
  }
}

}  // namespace tileloss::test
