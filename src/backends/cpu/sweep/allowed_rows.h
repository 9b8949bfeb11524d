// Rows of which some columns alone are allowed: their allowed columns side by side are a row of their own, shorter, and the
// worker of the call's target does that, as a call on these columns would be done. Its gradient goes back to where they were, and
// zeros between them. So no kernel, no target and no transform knows of the others, and few columns cost little.
#pragma once

#include "backends/cpu/sweep/row_worker.h"

namespace tileloss::impl::cpu {

// A thread's memory for that, after the sweeps'.
struct AllowedScratch {
  std::byte *logits, *target;  // the gradient goes over the logits
  float* class_weights;
  std::int64_t* ids;  // known columns
  float* logprobs;
  std::int32_t* ranks;  // of each word's first column

  AllowedScratch(std::byte* at, const ScratchShape& s)
      : logits(at),
        target(logits + row_bytes(s, s.element_bytes)),
        class_weights(reinterpret_cast<float*>(target + row_bytes(s, s.target_bytes))),
        ids(reinterpret_cast<std::int64_t*>(class_weights + row_bytes(s, s.has_class_weights ? 4 : 0) / 4)),
        logprobs(reinterpret_cast<float*>(ids + round_up(s.known_columns, 16))),
        ranks(reinterpret_cast<std::int32_t*>(logprobs + round_up(s.known_columns, 16))) {}

  static std::int64_t bytes(const ScratchShape& s) {
    if (!s.has_allowed) return 0;
    return row_bytes(s, s.element_bytes) + row_bytes(s, s.target_bytes) + row_bytes(s, s.has_class_weights ? 4 : 0) +
           round_up(s.known_columns, 16) * 12 + (has_ranks(s) ? round_up((s.columns + 31) / 32 * 4, 64) : 0);
  }
  // Many columns of a row are looked up.
  static bool has_ranks(const ScratchShape& s) { return s.known_columns > 0 || s.labels_per_row > 0; }

 private:
  static std::int64_t row_bytes(const ScratchShape& s, std::int64_t element) { return round_up(s.columns * element, 64); }
};

template <class Worker>
class AllowedRows : public RowWorker {
 public:
  AllowedRows(const SweepJob& job, RowVisitor& visitor, std::byte* scratch)
      : RowWorker(job, visitor, SweepScratch(scratch, job.shape)),
        memory_(scratch),
        copies_(scratch + SweepScratch::bytes(job.shape), job.shape),
        whole_(job, visitor, scratch_) {}

  void row(std::int64_t i) {
    if (!job_.allowed || job_.logits == nullptr || job_.label_columns[i] == kIgnoredRow) return whole_.row(i);
    const AllowedSet set = job_.allowed(i, 0, job_.columns);
    if (set.is_full()) return whole_.row(i);
    whole_.drain();
    set.has_any() ? some(i, set) : none(i);
  }
  void drain() { whole_.drain(); }

 private:
  // A row by itself, whose columns are ranks.
  class Alone final : public RowVisitor {
   public:
    Alone(const AllowedRows& all, std::int64_t row, const AllowedSet& set)
        : all_(all), row_(row), set_(set), classes_(set.classes(all.job_.class_weights)) {}

    void ignored(std::int64_t) override {}
    std::optional<TargetStats> known(std::int64_t) const override {
      std::optional<TargetStats> stats = all_.visitor_.known(row_);
      if (stats && stats->classes.count < 0) set_classes(*stats, classes_);
      return stats;
    }
    void swept(std::int64_t, const RowState& state, const RowClasses&, const SeveralLabels& labels) override {
      RowState in_place = state;
      in_place.argmax = column(state.argmax);
      all_.visitor_.swept(row_, in_place, classes_, labels);
    }
    RowResult before_target_sweep(std::int64_t, const TargetStats& stats) const override {
      return all_.visitor_.before_target_sweep(row_, in_place(stats));
    }
    RowResult visit(std::int64_t, const TargetStats& stats) override { return all_.visitor_.visit(row_, in_place(stats)); }
    std::int64_t label_column(std::int64_t, std::int64_t k) const override {
      const std::int64_t label = all_.visitor_.label_column(row_, k);
      if (label < 0) return label;
      return all_.job_.labels_per_row > 0 ? all_.rank(row_, label) : set_.rank(label);
    }
    double logp_grad(std::int64_t, std::int64_t k) const override { return all_.visitor_.logp_grad(row_, k); }
    void finished(std::int64_t) override {
      set_.scatter(kElementBytes[all_.job_.storage], all_.copies_.logits, all_.dlogits(row_));
      all_.finish(row_, all_.job_.columns);
    }

   private:
    std::int64_t column(std::int64_t rank) const { return rank < 0 ? rank : set_.select(rank); }
    // What is known from before has its classes, and columns in place of ranks.
    TargetStats in_place(const TargetStats& stats) const {
      TargetStats s = stats;
      if (s.classes.count >= 0) return s;
      s.classes = classes_;
      s.argmax = column(s.argmax);
      s.teacher.argmax = column(s.teacher.argmax);
      return s;
    }

    const AllowedRows& all_;
    const std::int64_t row_;
    const AllowedSet& set_;
    const RowClasses classes_;
  };

  void some(std::int64_t i, const AllowedSet& set) {
    SweepJob job = job_;
    job.allowed = {.has_labels = job_.allowed.has_labels};
    job.rows = 1;
    job.columns = job.total_columns = job.shape.columns = set.gather(kElementBytes[job_.storage], logits(i), copies_.logits);
    job.logits = copies_.logits;
    job.dlogits = wants_gradient() ? copies_.logits : nullptr;
    job.groups = {};
    if (job_.class_weights != nullptr) {
      set.gather(sizeof(float), job_.class_weights, copies_.class_weights);
      job.class_weights = copies_.class_weights;
    }
    std::int64_t label_column = job_.label_columns[i];
    if (label_column >= 0) label_column = set.rank(label_column);
    // Without labels one class alone is sure, as it is where there is no other.
    const bool is_sure = job.columns == 1 && !job_.allowed.has_labels && needs_target_sweep(target_.kind) && !visitor_.known(i);
    if (is_sure) label_column = 0;
    job.label_columns = &label_column;
    job.target.rows = nullptr;
    if (target_.data != nullptr) {
      set.gather(kElementBytes[target_.storage], target_row(i), copies_.target);
      job.target.data = copies_.target;
      if (target_.kind == TargetKind::kProbabilities) job.target.outside = outside(i, set);
    }
    job.target.classes = job.columns;
    if (AllowedScratch::has_ranks(job_.shape)) rank_words(i);
    if (target_.kind == TargetKind::kColumns) gather_known(i, set, job.target.columns);
    Alone alone(*this, i, set);
    Worker worker(job, alone, SweepScratch(memory_, job.shape));
    worker.row(0);
    worker.drain();
  }

  void rank_words(std::int64_t i) const {
    std::int32_t before = 0;
    for (std::int64_t w = 0; w * 32 < job_.columns; ++w) {
      copies_.ranks[w] = before;
      before += static_cast<std::int32_t>(job_.allowed(i, w * 32, std::min<std::int64_t>(32, job_.columns - w * 32)).count());
    }
  }
  std::int64_t rank(std::int64_t i, std::int64_t column) const {
    return copies_.ranks[column / 32] + job_.allowed(i, column / 32 * 32, 32).rank(column % 32);
  }

  // What a sparse teacher knows, by rank; of a column that is not allowed it knows nothing.
  void gather_known(std::int64_t i, const AllowedSet& set, ColumnInput& known) const {
    for (std::int64_t k = 0; k < known.count; ++k) {
      const std::int64_t id = target_.columns.id(target_index(i), k);
      const bool is_known = id >= 0 && set.has(id);
      copies_.ids[k] = is_known ? rank(i, id) : -1;
      if (is_known) copies_.logprobs[k] = target_.columns.log_q(target_index(i), k);
    }
    known = {copies_.ids, true, 0, 1, {copies_.logprobs, kStorageFloat32, 0, 1}, known.count};
  }

  // The weight of the probabilities outside the set.
  double outside(std::int64_t i, const AllowedSet& set) const {
    const std::byte* const probs = target_row(i);
    double weight = 0;
    set.for_each(false, [&](std::int64_t j) {
      const double q = load_element(target_.storage, probs, j);
      if (q != 0) weight += (job_.class_weights == nullptr ? q : q * static_cast<double>(job_.class_weights[j]));
    });
    return (1 - target_.options.label_smoothing) * weight;
  }

  // No column here: nothing, where other shards have some, else as a row of -inf.
  void none(std::int64_t i) {
    const std::optional<TargetStats> known = visitor_.known(i);
    TargetStats stats = known ? *known : TargetStats(make_row_stats(RowState()));
    if (!known) visitor_.swept(i, RowState(), {0, 0}, {});
    if (stats.classes.count < 0) set_classes(stats, {0, 0});
    if (!known) stats.label = stats;
    if (!known && target_.kind == TargetKind::kLogits) stats.teacher = stats;
    TargetSums sums;
    if (target_.kind == TargetKind::kProbabilities) sums = sums_outside(outside(i, job_.allowed(i, 0, job_.columns)));
    if (target_.kind == TargetKind::kColumns)
      KnownColumns().diverge(target_.options, stats.max, stats, [] { return -kInfinity; });
    const bool is_empty = stats.classes.count == 0;
    if (is_empty) sums.divergence = kNan;
    stats.sums = sums;
    visitor_.visit(i, stats);
    if (!wants_gradient()) return;
    if (is_empty) fill_with_nan(i);
    finish(i, is_empty ? job_.columns : 0);
  }

  std::byte* const memory_;
  const AllowedScratch copies_;
  Worker whole_;
};

}  // namespace tileloss::impl::cpu
