// Rows compared with the columns that a sparse teacher knows. Those are done in double, one by one; the row's sums over the
// others are a forward sweep over a copy of its logits where they are -inf, so that the mass of the others is a sum, and not what
// 1 has left. The gradient of the others is p times one number: a backward sweep, or where the label has a temperature of its own
// the gradient of a target whose probabilities are 0.
#pragma once

#include <algorithm>

#include "backends/cpu/sweep/row_worker.h"

namespace tileloss::impl::cpu {

class ColumnRows : public RowWorker {
 public:
  ColumnRows(const SweepJob& job, RowVisitor& visitor, const SweepScratch& scratch)
      : RowWorker(job, visitor, scratch), copy_(reinterpret_cast<std::byte*>(scratch.teacher.stash)) {}

  void row(std::int64_t i) {
    if (is_done(i)) return;
    const std::byte* const x = logits(i);
    gather(i, x);
    TargetStats stats(own(i, x));
    stats.label = label(i, x, stats);
    known_.diverge(target_.options, max_, stats, [&] { return log_mass_of_others(x, job_.label_columns[i], stats); });
    const RowResult result = visitor_.visit(i, stats);
    if (!wants_gradient()) return;
    std::isnan(stats.sums.divergence) ? fill_with_nan(i) : write(i, x, stats, result);
    finish(i, job_.columns);
  }

 private:
  // The columns that are known, and a copy of the row without them. Capped, -inf would be a logit like another: then they are in
  // the order of the row, and the sweep goes over what lies between them.
  void gather(std::int64_t i, const std::byte* x) {
    const ColumnInput& known = target_.columns;
    const std::int64_t row = target_index(i);
    if (!is_capped()) std::memcpy(copy_, x, static_cast<std::size_t>(job_.columns * kElementBytes[job_.storage]));
    std::int64_t count = 0;
    for (std::int64_t k = 0; k < known.count; ++k) {
      const std::int64_t id = known.id(row, k);
      if (id < 0) continue;
      const float logit = load_element(job_.storage, x, id);
      KnownColumn& c = scratch_.known[count++];
      c = {};
      c.column = id;
      c.z = job_.transform.exact_value(logit);
      c.derivative = job_.transform.derivative(logit);
      c.log_q = known.log_q(row, k);
      if (!is_capped()) store_element(job_.storage, copy_, id, -kInfinity);
    }
    known_ = {scratch_.known, count};
    if (is_capped()) {
      std::sort(known_.begin(), known_.end(), [](const KnownColumn& a, const KnownColumn& b) { return a.column < b.column; });
    }
    const auto label =
        std::find_if(known_.begin(), known_.end(), [&](const KnownColumn& c) { return c.column == job_.label_columns[i]; });
    label_ = label == known_.end() ? nullptr : &*label;
  }

  // The statistics of the whole row. Its maximum is kept to all digits: the known columns' p are relative to it.
  RowStats own(std::int64_t i, const std::byte* x) {
    RowState state;
    if (is_capped()) {
      state = sweep(x, job_.label_columns[i], job_.columns, job_.transform, scratch_.own, false, kArgmax);
    } else {
      const std::int64_t label_column = label_ != nullptr ? kLabelElsewhere : job_.label_columns[i];
      state = others_ = sweep(copy_, label_column, job_.columns, job_.transform, scratch_.own, wants_gradient(), kArgmax);
      for (const KnownColumn& c : known_) state = merge(state, 0, state_of(c), 0);
      // The copy's has the columns that were taken out.
      if ((job_.sums & kSmoothingSum) != 0) {
        state.smoothing_sum = sweep(x, job_.label_columns[i], job_.columns, job_.transform, scratch_.own, false).smoothing_sum;
      }
    }
    max_ = state.argmax < 0 ? state.max : job_.transform.exact_value(load_element(job_.storage, x, state.argmax));
    return make_row_stats(state);
  }

  RowState state_of(const KnownColumn& c) const {
    RowState one;
    one.max = static_cast<float>(c.z);
    one.argmax = c.column;
    const float mass = c.z == -kInfinity ? 0 : 1;
    one.collision_sum = mass;
    (&c == label_ ? one.label_logit : one.sum) = &c == label_ ? one.max : mass;
    return one;
  }

  // The mass of the columns that are not known, against that of all.
  double log_mass_of_others(const std::byte* x, std::int64_t label_column, const RowStats& all) const {
    const RowStats others = make_row_stats(is_capped() ? sweep_between(x, label_column) : others_);
    return std::isfinite(others.max) ? others.lse - all.lse : -kInfinity;
  }

  RowState sweep_between(const std::byte* x, std::int64_t label_column) const {
    RowState state;
    const auto add = [&](std::int64_t begin, std::int64_t end) {
      if (begin == end) return;
      const bool has_label = label_column >= begin && label_column < end;
      const std::byte* const from = x + begin * kElementBytes[job_.storage];
      RowState part =
          sweep(from, has_label ? label_column - begin : kLabelElsewhere, end - begin, job_.transform, scratch_.own, false);
      if (part.argmax >= 0) part.argmax += begin;
      state = merge(state, 0, part, 0);
    };
    std::int64_t begin = 0;
    for (const KnownColumn& c : known_) {
      add(begin, c.column);
      begin = c.column + 1;
    }
    add(begin, job_.columns);
    return state;
  }

  void write(std::int64_t i, const std::byte* x, const TargetStats& stats, const RowResult& result) const {
    const std::int64_t label = job_.label_columns[i];
    const double slope = label >= 0 ? job_.transform.derivative(load_element(job_.storage, x, label)) : 0;
    const double target = result.coefficients.target, form = result.form;
    const double others = result.has_divergence ? known_.slope_of_others(form) : 0;
    write_others(i, x, stats, target, others);
    const double ratio = label_slope(), target_slope = target * ratio;
    if (label >= 0 && label_ == nullptr) {
      put(i, label, (target_slope * stats.label.one_minus_p + (stats.p == 0 ? 0 : stats.p * others)) * slope);
    }
    for (const KnownColumn& k : known_) {
      double dz = target_slope * (&k == label_ ? stats.label.one_minus_p : -std::exp((k.z - max_) * ratio - stats.label.log_sum));
      if (result.has_divergence) dz += form * known_.slope(k);
      put(i, k.column, dz * k.derivative);
    }
  }

  // Of all columns as if none were known, dz = p others - target p of the label's temperature.
  void write_others(std::int64_t i, const std::byte* x, const TargetStats& stats, double target, double others) const {
    if (target_.label_transform && target != 0) {
      const RowSide apart = label_side(x, stats.label);
      TargetRow row = make_target_row(i, x, stats);
      row.label_column = kLabelElsewhere;
      row.label = &apart;
      row.form = 1;
      row.target = target;
      std::fill_n(row.teacher.exps, round_up(job_.columns, 64), 0.0f);
      if (is_capped()) kernels().add_probabilities(row);
      row.sums.mean = -others;
      kernels().gradient(row);
      return;
    }
    RowGradient g;
    g.stats = stats;
    g.coefficients.target = target;
    g.coefficients.prob_plus_target = others;
    BackwardRow b = backward_row(i, x, g, job_.transform);
    if (!is_capped()) {
      b.stash = scratch_.own.stash;
      b.references = scratch_.own.references;
    }
    job_.kernels->run[job_.storage](nullptr, &b);
  }

  void put(std::int64_t i, std::int64_t column, double dx) const {
    store_element(job_.storage, dlogits(i), column, static_cast<float>(dx));
  }

  std::byte* const copy_;
  KnownColumns known_;
  const KnownColumn* label_ = nullptr;  // where the label is among them
  RowState others_;
  double max_ = 0;
};

}  // namespace tileloss::impl::cpu
