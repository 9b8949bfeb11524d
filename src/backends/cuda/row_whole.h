// A row in one go, forward, coefficients and backward, by a cluster whose blocks keep it in shared memory: read once, written
// once. Nothing outside the row is waited for.
#pragma once

#include "backends/cuda/row_backward.h"

namespace tileloss::impl::cuda {

// `coefficients` is a device::CoefficientsOf. kIsPlain: both sweeps are; else the backward may be, so that a gradient has the
// same bits whatever outputs are asked for.
template <class T, bool kIsPlain, bool kMayBeMasked, class Coefficients>
__global__ void __launch_bounds__(kMaxRowThreads, kIsPlain && sizeof(T) == 2 ? 2 : 1)
    whole_rows(SweepJob job, Coefficients coefficients, bool is_plain_backward) {
  begin_kernel();
  TILELOSS_DYNAMIC_SHARED(uint4, held);
  TILELOSS_SHARED(WarpSums, parts);
  TILELOSS_SHARED(GradientRow, gradient);
  const unsigned rank = cluster_rank(), ranks = cluster_size();
  const bool is_first = rank == 0 && threadIdx.x == 0;
  const std::int64_t i = blockIdx.x / ranks;
  const std::int64_t label = job.rows.label_columns[i];
  if (label == kIgnoredRow) {
    write_zeros(job.dlogits.row<T>(i), 0, job, rank, ranks);
    if (is_first) job.rows.states[i] = RowState();
    return;
  }
  const RowInMemory<T, kMayBeMasked> row(job, i);
  const Span span = slice_of<T>(job, static_cast<int>(rank));
  row.prefetch_allowed(span);
  using Arriving = RowHeld<T, true, kMayBeMasked>;
  Arriving::bring(row, span, held);
  const RowHeld<T, false, kMayBeMasked> here = {held, span.begin, row.allowed};
  // What can be, while the copies are on their way: the others wait for what comes after the row has been read.
  RowCoefficients c;
  if constexpr (Coefficients::kMayNeedNoStats) {
    if (is_first && !coefficients.need_stats) {
      RowStats none;
      if constexpr (kMayBeMasked) job.rows.set_classes(none, i);
      c = coefficients(i, label == kBadLabel, none);
    }
  }
  const float label_logit = is_first && label >= 0 ? to_float(load(row.data + label)) : 0;
  const LogitTransform transform = transform_of<kIsPlain>(job);
  const Exponents<T, kIsPlain> exponents(transform);
  Seen<T, kIsPlain> seen = see_slice(Arriving{held, span.begin, row.allowed}, here, span, label, exponents, job);
  seen.add_lanes(exponents);
  float largest;
  const RowState state = state_of_cluster(seen, parts, here, span, i, label, label_logit, job, transform, largest);
  if (is_first) {
    // A policy loss needs all registers for itself: what lasts longer lies in memory.
    constexpr bool kIsTight = !Coefficients::kMayNeedNoStats;
    using Bytes = double[sizeof(RowStats) / sizeof(double)];
    TILELOSS_SHARED(Bytes, bytes);
    RowStats own;
    RowStats& stats = kIsTight ? reinterpret_cast<RowStats&>(bytes) : own;
    stats = make_row_stats(state, coefficients.need_stats);
    if constexpr (kMayBeMasked) job.rows.set_classes(stats, i);
    if (coefficients.need_stats) c = coefficients(i, label == kBadLabel, stats);
    const GradientRow made = make_gradient<kIsPlain>(c, kIsTight ? job.rows.label_columns[i] : label, label_logit, job,
                                                     kIsTight ? transform_of<kIsPlain>(job) : transform, stats, largest);
    for (unsigned other = 0; other < ranks; ++other) *cluster_peer(&gradient, other) = made;
  }
  // All of the row has been read, and nobody looks into another block any more.
  cluster_arrive();
  if (is_first) job.rows.states[i] = state;
  cluster_wait();
  T* const to = job.dlogits.row<T>(i);
  const RowHeld<T, false, kMayBeMasked> read = {held, span.begin, {job, i, true}};
  if (kIsPlain || is_plain_backward) {
    write_gradient<T, true>(read, span, to, gradient, job.rows.label_columns[i], transform, job);
  } else {
    write_gradient<T, kIsPlain>(read, span, to, gradient, job.rows.label_columns[i], transform, job);
  }
  write_zeros(to, job.columns, job, rank, ranks);
}

}  // namespace tileloss::impl::cuda
