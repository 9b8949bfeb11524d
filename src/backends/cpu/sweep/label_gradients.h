// The gradients of the columns that are a row's labels: the sweep over all columns leaves them wrong.
#pragma once

#include <algorithm>
#include <cmath>

#include "backends/cpu/sweep/row_gradient.h"
#include "core/target.h"

namespace tileloss::impl::cpu {

struct LabelGradient {
  std::int64_t column = 0;
  std::int64_t slot = 0;  // the first that has the column
  float dx = 0;
};

// Of several labels, each column once, in their order: column(k), kLabelElsewhere for none; grad(k), upstream of its
// logp; slope(k), dz/dx. Returns how many there are; `out` has room for `count`.
template <class Column, class Grad, class Slope>
std::int64_t several_gradients(const RowGradient& g, const SeveralLabels& labels, std::int64_t count, const Column& column,
                               const Grad& grad, const Slope& slope, LabelGradient* out) {
  std::int64_t filled = 0, columns = 0;
  for (std::int64_t k = 0; k < count; ++k) {
    if (column(k) >= 0) out[filled++] = {column(k), k, 0};
  }
  std::sort(out, out + filled, [](const LabelGradient& a, const LabelGradient& b) {
    return a.column != b.column ? a.column < b.column : a.slot < b.slot;
  });
  const std::int64_t likeliest = filled > 0 ? column(labels.likeliest) : kLabelElsewhere;
  for (std::int64_t n = 0; n < filled;) {
    LabelGradient label = out[n];
    double target = 0;  // a column that is there twice counts twice
    for (; n < filled && out[n].column == label.column; ++n) target += grad(out[n].slot);
    double dz = 0;
    if (label.column == likeliest) {
      dz = label_gradient(g, 1);
    } else {
      RowStats other;
      other.logp = labels.logp(label.slot, g.stats);
      other.p = std::exp(other.logp);
      dz = target + column_gradient(g.coefficients, other, false, 1);
    }
    label.dx = static_cast<float>(dz * slope(label.slot));
    out[columns++] = label;
  }
  return columns;
}

}  // namespace tileloss::impl::cpu
