// A row of which a sparse teacher knows some columns. Those are done in double, one by one; the student's sums over the others
// are a forward sweep over a copy of its logits where they are -inf, so that the mass of the others is a sum, and not what 1 has
// left. The gradient of the others is p times one number: a backward sweep, or where the label has a temperature of its own the
// gradient of a pair whose other side is 0.
#ifndef TILELOSS_BACKENDS_CPU_SWEEP_KNOWN_COLUMNS_H_
#define TILELOSS_BACKENDS_CPU_SWEEP_KNOWN_COLUMNS_H_

#include <algorithm>
#include <span>

#include "backends/cpu/sweep/pair_worker.h"
#include "backends/cpu/sweep/row_gradient.h"

namespace tileloss::impl::cpu {

class KnownColumnsWorker : public PairWorkerBase {
 public:
  KnownColumnsWorker(const PairJob& job, PairVisitor& visitor, const PairScratch& scratch)
      : PairWorkerBase(job, visitor), scratch_(scratch), copy_(reinterpret_cast<std::byte*>(scratch.teacher.stash)) {}

  void row(std::int64_t i) {
    if (is_ignored(i)) return;
    const std::byte* const x = logits(i);
    gather(i, x);
    PairStats stats;
    stats.student = student(i, x);
    stats.label = label(i, x, stats.student, scratch_.student);
    diverge(i, x, stats);
    visitor_.visit(i, stats);
    if (!wants_gradient()) return;
    if (std::isnan(stats.sums.divergence)) {
      spoil(i);
    } else {
      write(i, x, stats);
    }
    finish(i, rows_.columns);
  }

 private:
  static constexpr double kFewDigits = 1e-6;  // a difference from 1 that double leaves less than 10 of
  static constexpr double kRounding = 1e-2;   // by which a sum of q may miss 1

  bool is_capped() const { return rows_.transform.softcap > 0; }

  // The columns that are known, and a copy of the row without them. Capped, -inf would be a logit like another: then they are in
  // the order of the row, and the sweep goes over what lies between them.
  void gather(std::int64_t i, const std::byte* x) {
    const KnownColumns& known = job_.known;
    const std::int64_t row = wanted_row(i);
    if (!is_capped()) std::memcpy(copy_, x, static_cast<std::size_t>(rows_.columns * kElementBytes[rows_.storage]));
    std::int64_t count = 0;
    for (std::int64_t k = 0; k < known.count; ++k) {
      const std::int64_t at = row * known.ids_row_stride + k * known.ids_stride;
      const std::int64_t id =
          known.is_int64 ? static_cast<const std::int64_t*>(known.ids)[at] : static_cast<const std::int32_t*>(known.ids)[at];
      if (id < 0) continue;
      const float logit = load_element(rows_.storage, x, id);
      KnownColumn& c = scratch_.known[count++];
      c = {};
      c.column = id;
      c.z = rows_.transform.exact_value(logit);
      c.slope = rows_.transform.derivative(logit);
      c.log_q = load_element(known.logprobs.storage, known.logprobs.data,
                             row * known.logprobs.row_stride + k * known.logprobs.k_stride);
      if (!is_capped()) store_element(rows_.storage, copy_, id, -kInfinity);
    }
    known_ = {scratch_.known, static_cast<std::size_t>(count)};
    if (is_capped()) {
      std::sort(known_.begin(), known_.end(), [](const KnownColumn& a, const KnownColumn& b) { return a.column < b.column; });
    }
    const auto label =
        std::find_if(known_.begin(), known_.end(), [&](const KnownColumn& c) { return c.column == rows_.targets[i]; });
    label_ = label == known_.end() ? nullptr : &*label;
  }

  // The statistics of the whole row. Its maximum is wanted to all digits: the known columns' p are relative to it.
  RowStats student(std::int64_t i, const std::byte* x) {
    RowState state;
    if (is_capped()) {
      state = sweep(x, rows_.targets[i], rows_.columns, rows_.transform, scratch_.student, false, kArgmax);
    } else {
      const std::int64_t target = label_ != nullptr ? kTargetElsewhere : rows_.targets[i];
      state = others_ = sweep(copy_, target, rows_.columns, rows_.transform, scratch_.student, wants_gradient(), kArgmax);
      for (const KnownColumn& c : known_) state = merge(state, 0, state_of(c), 0);
      // The copy's has the columns that were taken out.
      if ((rows_.sums & kSmoothingSum) != 0) {
        state.smoothing_sum = sweep(x, rows_.targets[i], rows_.columns, rows_.transform, scratch_.student, false).smoothing_sum;
      }
    }
    max_ = state.argmax < 0 ? state.max : rows_.transform.exact_value(load_element(rows_.storage, x, state.argmax));
    return make_row_stats(state);
  }

  RowState state_of(const KnownColumn& c) const {
    RowState one;
    one.max = static_cast<float>(c.z);
    one.argmax = c.column;
    const float mass = c.z == -kInfinity ? 0 : 1;
    one.collision_sum = mass;
    (&c == label_ ? one.target : one.sum) = &c == label_ ? one.max : mass;
    return one;
  }

  // The mass of the columns that are not known, against that of all.
  double log_mass_of_others(std::int64_t i, const std::byte* x, const RowStats& all) {
    const RowStats others = make_row_stats(is_capped() ? sweep_between(x, rows_.targets[i]) : others_);
    return std::isfinite(others.max) ? others.lse - all.lse : -kInfinity;
  }

  RowState sweep_between(const std::byte* x, std::int64_t target) const {
    RowState state;
    const auto add = [&](std::int64_t begin, std::int64_t end) {
      if (begin == end) return;
      const bool has_target = target >= begin && target < end;
      const std::byte* const from = x + begin * kElementBytes[rows_.storage];
      RowState part =
          sweep(from, has_target ? target - begin : kTargetElsewhere, end - begin, rows_.transform, scratch_.student, false);
      if (part.argmax >= 0) part.argmax += begin;
      state = merge(state, 0, part, 0);
    };
    std::int64_t begin = 0;
    for (const KnownColumn& c : known_) {
      add(begin, c.column);
      begin = c.column + 1;
    }
    add(begin, rows_.columns);
    return state;
  }

  void diverge(std::int64_t i, const std::byte* x, PairStats& stats) {
    bool has_p = true, has_q = true;
    for (KnownColumn& c : known_) {
      c.log_p = c.z - max_ - stats.student.log_sum;
      c.p = std::exp(c.log_p);
      c.q = std::exp(c.log_q);
      has_q = has_q && c.log_q < kInfinity;  // no NaN either
    }
    set_tail(i, x, stats);
    if (job_.known.tail == Tail::kRenormalise && !known_.empty()) {
      has_p = renormalise(&KnownColumn::p, &KnownColumn::log_p);
      has_q = renormalise(&KnownColumn::q, &KnownColumn::log_q) && has_q;
    }
    slope_sum_ = 0;
    double divergence = 0, entropy = 0, largest = -kInfinity;
    const auto add = [&](KnownColumn& c) {
      const DivergenceTerm term = class_term(job_.divergence, c.p, c.q, c.log_p, c.log_q);
      c.dz = term.form;
      divergence += term.value;
      slope_sum_ += term.form;
      if (c.q != 0) entropy -= c.q * c.log_q;
    };
    for (KnownColumn& c : known_) {
      add(c);
      if (c.log_q > largest || (c.log_q == largest && c.column < stats.teacher.argmax)) {
        largest = c.log_q;
        stats.teacher.argmax = c.column;
      }
    }
    if (has_tail_) add(tail_);
    stats.teacher.entropy = has_q ? entropy : kNan;
    stats.sums.divergence = std::isfinite(stats.student.max) && has_p && has_q ? divergence : kNan;
  }

  // All other columns as one class.
  void set_tail(std::int64_t i, const std::byte* x, const PairStats& stats) {
    has_tail_ = job_.known.tail == Tail::kLump;
    if (!has_tail_) return;
    tail_ = {};
    double sum = 0, known = 0;
    for (const KnownColumn& c : known_) {
      sum += c.q;
      known += c.p;
    }
    // What is left of 1 where little is taken off it, so that all of them add up to 1; else the sum.
    if (known < 0.5) {
      tail_.p = 1 - known;
      tail_.log_p = std::log1p(-known);
    } else {
      tail_.log_p = log_mass_of_others(i, x, stats.student);
      tail_.p = std::exp(tail_.log_p);
    }
    tail_.q = std::isnan(sum) ? sum : 1 - sum;
    if (tail_.q < kFewDigits) {
      long double left = 1;
      for (const KnownColumn& c : known_) left -= std::exp(static_cast<long double>(c.log_q));
      tail_.q = left < 0 ? 0 : static_cast<double>(left);
    }
    // Where p has nothing left, every column known say, q may not have lost the rest by rounding.
    if (tail_.p == 0 && tail_.q < kRounding && std::isfinite(stats.student.max)) tail_.q = 0;
    tail_.log_q = std::log(tail_.q);
  }

  // False where there is nothing to divide by.
  bool renormalise(double KnownColumn::*value, double KnownColumn::*log) {
    double largest = -kInfinity, sum = 0;
    for (const KnownColumn& c : known_) largest = std::fmax(largest, c.*log);
    if (largest == -kInfinity) return false;
    for (const KnownColumn& c : known_) sum += std::exp(c.*log - largest);
    const double log_sum = largest + std::log(sum);
    for (KnownColumn& c : known_) {
      c.*log -= log_sum;
      c.*value = std::exp(c.*log);
    }
    return true;
  }

  void write(std::int64_t i, const std::byte* x, const PairStats& stats) {
    const PairCoefficients c = visitor_.coefficients(i);
    const std::int64_t label = rows_.targets[i];
    const double slope = label >= 0 ? rows_.transform.derivative(load_element(rows_.storage, x, label)) : 0;
    // dD/dz of a column that is not known, over its p.
    double of_others = 0;
    if (c.has_divergence && job_.known.tail != Tail::kRenormalise) {
      of_others = -c.form * slope_sum_;
      if (has_tail_ && tail_.p != 0) of_others += c.form * tail_.dz / tail_.p;
    }
    write_others(i, x, stats, c.target, of_others);
    const double ratio = label_slope(), of_label = c.target * ratio;
    if (label >= 0 && label_ == nullptr) {
      const double p = stats.student.p;
      put(i, label, (of_label * stats.label.one_minus_p + (p == 0 ? 0 : p * of_others)) * slope);
    }
    for (const KnownColumn& k : known_) {
      double dz = of_label * (&k == label_ ? stats.label.one_minus_p : -std::exp((k.z - max_) * ratio - stats.label.log_sum));
      if (c.has_divergence) dz += c.form * (k.dz - k.p * slope_sum_);
      put(i, k.column, dz * k.slope);
    }
  }

  // Of all columns as if none were known, dz = p of_others - target p of the label's temperature.
  void write_others(std::int64_t i, const std::byte* x, const PairStats& stats, double target, double of_others) const {
    const RowScratch& scratch = scratch_.student;
    if (job_.label_transform && target != 0) {
      const PairSide apart = label_side(x, stats.label);
      PairRow pair;
      pair.student = side(x, rows_.transform, stats.student, scratch);
      pair.teacher.exps = scratch_.teacher.stash;
      pair.columns = rows_.columns;
      pair.vocab_block = scratch.vocab_block;
      pair.divergence.kind = DivergenceKind::kSoftLabels;
      pair.exponents = scratch_.exponents;
      pair.label = &apart;
      pair.dx = dlogits(i);
      pair.stream = rows_.dlogits != rows_.logits;
      pair.coefficients.form = 1;
      pair.coefficients.target = target;
      std::fill_n(pair.teacher.exps, round_up(rows_.columns, 64), 0.0f);
      const PairTable& kernels = rows_.kernels->pair[rows_.storage];
      if (is_capped()) kernels.diverge(pair);
      pair.sums.mean = -of_others;
      kernels.gradient(pair);
      return;
    }
    RowGradient g;
    g.stats = stats.student;
    g.coefficients.target = target;
    g.coefficients.prob_plus_target = of_others;
    BackwardRow b = make_backward(g, rows_.transform);
    b.x = x;
    b.dx = dlogits(i);
    b.columns = rows_.columns;
    b.vocab_block = scratch.vocab_block;
    if (!is_capped()) {
      b.stash = scratch.stash;
      b.references = scratch.references;
    }
    b.operands = scratch.operands;
    b.stream = rows_.dlogits != rows_.logits;
    rows_.kernels->run[rows_.storage](nullptr, &b);
  }

  void put(std::int64_t i, std::int64_t column, double dx) const {
    store_element(rows_.storage, dlogits(i), column, static_cast<float>(dx));
  }

  const PairScratch scratch_;
  std::byte* const copy_;
  std::span<KnownColumn> known_;
  const KnownColumn* label_ = nullptr;  // where the label is among them
  RowState others_;
  double max_ = 0;
  KnownColumn tail_;
  bool has_tail_ = false;
  double slope_sum_ = 0;
};

}  // namespace tileloss::impl::cpu

#endif  // TILELOSS_BACKENDS_CPU_SWEEP_KNOWN_COLUMNS_H_
