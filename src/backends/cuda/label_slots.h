// Rows with several labels. The sweeps know the likeliest, which has to be found before them; the gradients of the others'
// columns are written over what a sweep left there. A step is of a slot, or of a row.
#pragma once

#include "backends/cuda/sweep_job.h"
#include "core/columns.h"

namespace tileloss::impl::cuda {

// Whether a row is neither ignored nor wrong: until its likeliest label is known.
__device__ __forceinline__ bool has_slots(const device::RowArrays& rows, std::int64_t i) {
  return rows.label_columns[i] == kLabelElsewhere;
}

// A slot's logit, from logits in memory.
struct ReadLabelLogit {
  LabelColumns labels;
  device::RowArrays rows;
  RowMatrix logits;
  tileloss_dtype storage;

  __device__ void operator()(std::int64_t n) const {
    const std::int64_t i = n / rows.slots.count, k = n % rows.slots.count;
    if (!has_slots(rows, i)) return;
    const std::int64_t column = labels.at(i, k);
    if (column >= 0) rows.slots.logits[n] = load_number(logits.data, storage, logits.offset(i) + column);
  }
};

// The label of a row that its sweeps know, if it is a column here.
struct FindLikeliest {
  LabelColumns labels;
  device::RowArrays rows;
  const LogitTransform* transform;
  tileloss_row_state known;  // without label_logits: they are to be found

  __device__ void operator()(std::int64_t i) const {
    const device::LabelSlots& slots = rows.slots;
    std::int64_t slot = 0;  // of the column that is asked for
    const bool is_one = has_slots(rows, i);
    const auto column = [&](std::int64_t k) { return is_one ? labels.at(i, slot = k) : kLabelElsewhere; };
    const auto found = known.label_logits != nullptr
                           ? load_labels(known, i, labels.labels)
                           : SeveralLabels::find(slots.count, slots.z + i * slots.count, column, [&](std::int64_t /*column*/) {
                               return transform->value(slots.logits[i * slots.count + slot]);
                             });
    slots.likeliest[i] = found.likeliest;
    if (is_one && found.likeliest >= 0) rows.label_columns[i] = labels.at(i, found.likeliest);
  }
};

// The gradient of a slot's column, if it is one of these columns and not the likeliest's, which the sweep has written. Of slots
// that have the same column the first writes for all of them, added up in their order.
struct WriteLabelGradient {
  LossContext context;
  LabelColumns labels;
  device::RowArrays rows;
  RowStates states;
  const LogitTransform* transform;
  std::int64_t begin, first, columns;  // the row and the column that `to` begins at
  RowMatrix to;
  tileloss_dtype storage;

  __device__ void operator()(std::int64_t n) const {
    const std::int64_t count = rows.slots.count, of_part = n / count, i = begin + of_part, slot = n % count;
    const std::int64_t likeliest = rows.label_columns[i];
    if (likeliest < kLabelElsewhere) return;
    const std::int64_t column = labels.at(i, slot);
    if (column < 0 || column == likeliest || column < first || column >= first + columns) return;
    const std::int64_t label = labels.labels.at(i, slot);  // what is true of it is true of those like it
    for (std::int64_t k = 0; k < slot; ++k) {
      if (labels.labels.at(i, k) == label) return;
    }
    double dz = 0;
    for (std::int64_t k = slot; k < count; ++k) {
      if (labels.labels.at(i, k) == label) dz += context.logp_grad_at(i, k);
    }
    RowStats other;
    other.logp = rows.slots.of(i).logp(slot, make_row_stats(states[i]));
    other.p = std::exp(other.logp);
    dz += column_gradient(rows.results[i].coefficients, other, false, 1);
    const double slope = transform->derivative(rows.slots.logits[i * count + slot]);
    store_number(to.data, storage, to.offset(of_part) + column - first, static_cast<float>(dz * slope));
  }
};

}  // namespace tileloss::impl::cuda
