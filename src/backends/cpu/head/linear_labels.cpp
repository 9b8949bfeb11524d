// Of lm_head.h what rows with several labels need besides: which of these is the likeliest has to be known before the tiles are
// swept, so the labels' logits are made first, one product of a hidden state and a row of the head each.
#include <algorithm>

#include "backends/cpu/head/linear_walk.h"
#include "core/number_formats.h"

namespace tileloss::impl::cpu {
namespace {

constexpr std::int64_t kLanes = 16;  // partial sums

float as_seen(float x, Compute compute) { return compute == Compute::kBfloat16 ? to_float(from_float<Bfloat16>(x)) : x; }

template <class T>
float product(const float* hidden, const T* head, std::int64_t stride, std::int64_t width, Compute compute) {
  float sums[kLanes] = {};
  for (std::int64_t h = 0; h < width; h += kLanes) {
    const std::int64_t lanes = std::min(kLanes, width - h);
    for (std::int64_t l = 0; l < lanes; ++l) {
      float x = to_float(head[(h + l) * stride]);
      if constexpr (!std::is_same_v<T, Bfloat16>) x = as_seen(x, compute);
      sums[l] += hidden[h + l] * x;
    }
  }
  double sum = 0;
  for (const float part : sums) sum += part;
  return static_cast<float>(sum);
}

float product(const float* hidden, const Operand& head, std::int64_t column, std::int64_t width, Compute compute) {
  const std::int64_t at = column * head.row_stride;
  switch (head.storage) {
    case kStorageBfloat16: return product(hidden, static_cast<const Bfloat16*>(head.data) + at, head.k_stride, width, compute);
    case kStorageFloat16: return product(hidden, static_cast<const Float16*>(head.data) + at, head.k_stride, width, compute);
    case kStorageFloat32: break;
  }
  return product(hidden, static_cast<const float*>(head.data) + at, head.k_stride, width, compute);
}

}  // namespace

void LinearWalk::find_labels(const RowVisitor& visitor) {
  const std::int64_t count = shape().labels_per_row;
  parallel(used_, [&](std::int64_t slot, std::int64_t u) {
    float* const hidden = scratch(slot);
    const std::int64_t i = rows_[u];
    float* const logits = piece<float>(job_.layout.label_logits) + u * count;
    std::fill_n(logits, count, 0.0F);
    for (const Part& part : parts()) {
      const std::int64_t width = part.shape.width;
      for (std::int64_t h = 0; h < width; ++h) {
        const Operand& x = part.operands.hidden;
        hidden[h] = as_seen(load_element(x.storage, x.data, i * x.row_stride + h * x.k_stride), shape().compute);
      }
      for (std::int64_t k = 0; k < count; ++k) {
        const std::int64_t column = visitor.label_column(i, k);
        if (column >= 0) logits[k] += product(hidden, part.operands.head, column, width, shape().compute);
      }
    }
    for (std::int64_t k = 0; k < count; ++k) {
      const std::int64_t column = visitor.label_column(i, k);
      if (column < 0) continue;
      if (job_.bias.data != nullptr) logits[k] += load_element(job_.bias.storage, job_.bias.data, column * job_.bias.row_stride);
    }
    const std::int64_t likeliest = labels(u, visitor).likeliest;
    job_.label_columns[i] = likeliest < 0 ? kLabelElsewhere : visitor.label_column(i, likeliest);
  });
}

SeveralLabels LinearWalk::labels(std::int64_t u, const RowVisitor& visitor) const {
  const std::int64_t count = shape().labels_per_row;
  if (count == 0) return {};
  const float* const logits = piece<float>(job_.layout.label_logits) + u * count;
  float* const z = piece<float>(job_.layout.label_z) + u * count;
  std::int64_t slot = 0;  // of the column that is asked for
  return SeveralLabels::find(
      count, z, [&](std::int64_t k) { return visitor.label_column(rows_[u], slot = k); },
      [&](std::int64_t) { return job_.transform.value(logits[slot]); });
}

void LinearWalk::keep_label_gradients(std::int64_t u, const SeveralLabels& labels, const RowVisitor& visitor) const {
  const std::int64_t count = shape().labels_per_row, i = rows_[u];
  if (count == 0) return;
  const float* const logits = piece<float>(job_.layout.label_logits) + u * count;
  LabelGradient* const kept = label_gradients(u);
  kept->slot = several_gradients(
      gradients_[u], labels, count, [&](std::int64_t k) { return visitor.label_column(i, k); },
      [&](std::int64_t k) { return visitor.logp_grad(i, k); },
      [&](std::int64_t k) { return job_.transform.derivative(logits[k]); }, kept + 1);
}

}  // namespace tileloss::impl::cpu
