#include "tests/backends/toy/toy_sweeps.h"

#include <cmath>

#include "core/row_offset.h"

namespace tileloss::test {

using impl::DivergenceTerm;
using impl::TargetKind;
using impl::TargetStats;

namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::size_t at(std::int64_t j) { return static_cast<std::size_t>(j); }

// A number as the products see it.
double operand(const impl::Problem& p, double x) {
  return p.compute == TILELOSS_BFLOAT16 ? impl::to_float(impl::from_float<impl::Bfloat16>(static_cast<float>(x))) : x;
}

}  // namespace

ToySweeps::Row ToySweeps::row(const tileloss_matrix& m, std::int64_t i, std::int64_t group_stride, const float* z) const {
  if (z != nullptr) return {z, TILELOSS_FLOAT32, i * p_.columns};
  return {m.data, m.dtype, impl::row_offset(i, m.row_stride, p_.args.row_groups.rows, group_stride)};
}
ToySweeps::Columns ToySweeps::own(std::int64_t i, const impl::LogitTransform& transform) const {
  return {row(p_.args.logits, i, p_.args.row_groups.logits_stride, z_), transform, p_.columns, rows_.label_columns[i]};
}
ToySweeps::Columns ToySweeps::teacher(std::int64_t i) const {
  return {row(p_.args.teacher_logits, i, p_.args.row_groups.teacher_logits_stride, teacher_z_), impl::make_teacher_transform(p_),
          p_.columns, rows_.label_columns[i]};
}

// --------------------------------------------------------------------------------------------------------------- forward

void ToySweeps::make_logits() const {
  const tileloss_args& a = p_.args;
  const auto product = [&](std::int64_t i, const tileloss_matrix& hidden, const tileloss_matrix& head,
                           const tileloss_vector& bias, float* z) {
    for (std::int64_t j = 0; z != nullptr && j < p_.columns; ++j) {
      double sum = impl::present(bias) ? impl::load_number(bias.data, bias.dtype, j * bias.stride) : 0;
      for (std::int64_t h = 0; h < hidden.cols; ++h)
        sum += operand(p_, impl::number_at(hidden, i, h)) * operand(p_, impl::number_at(head, j, h));
      z[i * p_.columns + j] = static_cast<float>(sum);
    }
  };
  for (std::int64_t i = 0; i < p_.rows; ++i) {
    if (rows_.label_columns[i] == impl::kIgnoredRow) continue;
    product(i, a.hidden, a.head, a.bias, z_);
    product(i, a.teacher_hidden, a.teacher_head, a.teacher_bias, teacher_z_);
  }
}

impl::RowState ToySweeps::gather(std::int64_t i, Columns columns) const {
  if (rows_.label_columns[i] == impl::kBadLabel) return {kNan, kNan, kNan, kNan, kNan, kNan, -1};
  return columns.gather(p_.logit.vocab_start, [&](std::int64_t j) { return weight(j); });
}

// The heaviest class, in place of the label that the row has not.
void ToySweeps::choose_column(std::int64_t i) const {
  std::int64_t& column = rows_.label_columns[i];
  if (column != impl::kLabelElsewhere) return;
  const Row probs = row(p_.args.target_probs, i, p_.args.row_groups.teacher_logits_stride);
  const auto q = [&](std::int64_t j) { return weight(j) * static_cast<double>(probs(j)); };
  column = 0;
  for (std::int64_t j = 0; j < p_.columns; ++j) column = q(j) > q(column) ? j : column;
}

void ToySweeps::forward() const {
  for (std::int64_t i = 0; i < p_.rows; ++i) {
    rows_.states[i] = {};
    if (rows_.label_columns[i] == impl::kIgnoredRow) continue;
    if (p_.loss->target() == TargetKind::kProbabilities) choose_column(i);
    rows_.states[i] = gather(i, own(i, own_));
    if (rows_.stats == nullptr) continue;
    TargetStats& stats = rows_.stats[i] = impl::make_row_stats(rows_.states[i]);
    stats.label = impl::make_row_stats(gather(i, own(i, label_)));
    if (p_.loss->target() == TargetKind::kLogits) stats.teacher = impl::make_row_stats(gather(i, teacher(i)));
    look(i, stats, false);
  }
}

void ToySweeps::find_sums() const {
  for (std::int64_t i = 0; i < p_.rows; ++i) {
    if (rows_.label_columns[i] != impl::kIgnoredRow) look(i, rows_.stats[i], false);
  }
}

ToySweeps::Numbers ToySweeps::look(std::int64_t i, TargetStats& stats, bool has_sums) const {
  const TargetKind kind = p_.loss->target();
  if (rows_.label_columns[i] == impl::kBadLabel) return Numbers(at(p_.columns), kNan);
  Numbers slopes = kind == TargetKind::kColumns ? look_at_some(i, stats) : look_at_all(i, stats, has_sums);
  const bool is_finite = std::isfinite(stats.max) && (kind != TargetKind::kLogits || std::isfinite(stats.teacher.max)) &&
                         (kind != TargetKind::kProbabilities || std::isfinite(stats.sums.mean));
  if (!is_finite) stats.sums.divergence = kNan;
  if (std::isnan(stats.sums.divergence)) slopes.assign(slopes.size(), kNan);
  return slopes;
}

// A teacher's logits, or class probabilities.
ToySweeps::Numbers ToySweeps::look_at_all(std::int64_t i, TargetStats& stats, bool has_sums) const {
  const bool has_teacher = p_.loss->target() == TargetKind::kLogits;
  const double smoothing = options_.label_smoothing, added = smoothing / static_cast<double>(p_.classes);
  impl::Divergence d = options_.divergence;
  Columns mine = own(i, own_), other = has_teacher ? teacher(i) : mine;
  mine.set_max(stats.max);
  other.set_max(stats.teacher.max);
  const Row probs = row(p_.args.target_probs, i, p_.args.row_groups.teacher_logits_stride);
  const auto term = [&](std::int64_t j) -> DivergenceTerm<double> {
    const impl::RowStats p = mine.stats(j, stats);
    if (!has_teacher)
      return impl::probability_term(weight(j) * ((1 - smoothing) * static_cast<double>(probs(j)) + added), p.logp);
    return p_.classes == 1 ? DivergenceTerm<double>{} : impl::label_term(d, p, other.stats(j, stats.teacher));
  };
  std::int64_t top = 0;
  for (std::int64_t j = 0; j < p_.columns; ++j) top = mine.stats(j, stats).p > mine.stats(top, stats).p ? j : top;
  if (has_teacher && p_.needs_forward) d.shift_for(mine.stats(top, stats).p, other.stats(top, stats.teacher).p);
  if (!has_sums) stats.sums = {};
  for (std::int64_t j = 0; !has_sums && j < p_.columns; ++j) {
    stats.sums.divergence += term(j).value;
    stats.sums.mean += term(j).form;
  }
  Numbers slopes;
  for (std::int64_t j = 0; j < p_.columns; ++j) {
    const impl::RowStats p = mine.stats(j, stats);
    if (has_teacher) {
      slopes.push_back(impl::divergence_slope(term(j), p, stats.sums.mean, impl::has_mean(d.kind)));
      continue;
    }
    // The state's numbers are float32's: good for what is left to 1, not for a transform's logits.
    const bool is_sure = p.one_minus_p < 0.5;
    const double unsure = std::exp(mine.shifted(j) - stats.log_sum);
    slopes.push_back(
        impl::probability_slope(-term(j).form, is_sure ? p.p : unsure, is_sure ? p.one_minus_p : 1 - unsure, stats.sums.mean));
  }
  return slopes;
}

// The columns that a teacher knows.
ToySweeps::Numbers ToySweeps::look_at_some(std::int64_t i, TargetStats& stats) const {
  Columns mine = own(i, own_);
  mine.set_max(stats.max);
  const auto p = [&](std::int64_t j) { return std::exp(mine.shifted(j) - stats.log_sum); };
  std::vector<impl::KnownColumn> listed;
  std::vector<bool> is_listed(at(p_.columns));
  for (std::int64_t k = 0; k < p_.args.teacher_ids.cols; ++k) {
    const std::int64_t j = impl::integer_at(p_.args.teacher_ids, i, k);
    if (j < 0) continue;
    listed.push_back({.column = j, .z = mine.shifted(j), .log_q = impl::number_at(p_.args.teacher_logprobs, i, k)});
    is_listed[at(j)] = true;
  }
  impl::KnownColumns known(listed.data(), static_cast<std::int64_t>(listed.size()));
  known.diverge(options_, 0, stats, [&] {
    double others = 0;
    for (std::int64_t j = 0; j < p_.columns; ++j) others += is_listed[at(j)] ? 0 : p(j);
    return std::log(others);
  });
  Numbers slopes;
  for (std::int64_t j = 0; j < p_.columns; ++j) slopes.push_back(p(j) * known.slope_of_others(1));
  for (const impl::KnownColumn& k : known) slopes[at(k.column)] = known.slope(k);
  return slopes;
}

// -------------------------------------------------------------------------------------------------------------- backward

ToySweeps::Numbers ToySweeps::gradient(std::int64_t i, const impl::RowStates& states) const {
  TargetStats stats = rows_.stats != nullptr ? rows_.stats[i] : TargetStats(states.stats(i));
  const Numbers slopes = rows_.stats != nullptr ? look(i, stats, true) : Numbers(at(p_.columns));
  const impl::RowResult& result = rows_.results[i];
  Columns columns = own(i, label_);
  columns.set_max(stats.label.max);
  const double ratio = label_.exact_exponent_scale / own_.exact_exponent_scale;
  Numbers dx;
  for (std::int64_t j = 0; j < p_.columns; ++j) {
    const double uniform = result.coefficients.uniform == 0 ? 0 : weight(j);
    double dz =
        ratio * impl::column_gradient(result.coefficients, columns.stats(j, stats.label), j == rows_.label_columns[i], uniform);
    if (result.has_divergence || std::isnan(stats.sums.divergence)) dz += result.form * slopes[at(j)];
    dx.push_back(dz * own(i, own_).derivative(j));
  }
  return dx;
}

void ToySweeps::backward(const impl::RowStates& states) const {
  const tileloss_args& a = p_.args;
  const std::int64_t width = a.hidden.cols;
  Numbers dbias(at(p_.total_columns)), dhead(at(p_.loss->is_linear ? p_.total_columns * width : 0));
  for (std::int64_t i = 0; i < p_.rows; ++i) {
    const bool is_used = rows_.label_columns[i] != impl::kIgnoredRow;
    Numbers dx = is_used ? gradient(i, states) : Numbers();
    dx.resize(at(p_.total_columns));
    const Row to = row(a.dlogits, i, a.row_groups.dlogits_stride);
    for (std::int64_t j = 0; j < a.dlogits.cols; ++j)
      impl::store_number(a.dlogits.data, to.dtype, to.offset + j, static_cast<float>(dx[at(j)]));
    for (std::int64_t h = 0; h < width; ++h) {
      double sum = 0;
      for (std::int64_t j = 0; is_used && j < p_.columns; ++j) {
        const double d = operand(p_, dx[at(j)]);
        sum += d * operand(p_, impl::number_at(a.head, j, h));
        dhead[at(j * width + h)] += d * operand(p_, impl::number_at(a.hidden, i, h));
      }
      if (impl::present(a.dhidden)) impl::set_number(a.dhidden, i, h, sum);
    }
    for (std::size_t j = 0; j < dx.size(); ++j) dbias[j] += dx[j];
  }
  const auto add = [&](const tileloss_matrix& m, const Numbers& sums) {
    for (std::int64_t k = 0; impl::present(m) && k < m.rows * m.cols; ++k) {
      const std::int64_t j = k / m.cols, h = k % m.cols;
      impl::set_number(m, j, h, sums[at(k)] + (p_.linear.accumulate != 0 ? impl::number_at(m, j, h) : 0));
    }
  };
  add(a.dhead, dhead);
  add(tileloss_make_matrix(a.dbias.data, a.dbias.dtype, a.dbias.size, 1, a.dbias.stride), dbias);
}

}  // namespace tileloss::test
