// Which column of the logits a row's label is.
#ifndef TILELOSS_BACKENDS_LABEL_COLUMNS_H_
#define TILELOSS_BACKENDS_LABEL_COLUMNS_H_

#include "backends/problem.h"
#include "core/row_state.h"

namespace tileloss::impl {

// What stands for the column of a label out of range.
inline constexpr std::int64_t kBadLabel = -3;

struct LabelColumns {
  Labels labels;
  std::int64_t classes = 0, first = 0, columns = 0;
  bool may_be_elsewhere = false;

  explicit LabelColumns(const Problem& p)
      : labels(p.args.labels, p.logit.ignore_index, p.args.mask),
        classes(p.classes),
        first(p.logit.vocab_start),
        columns(p.columns),
        may_be_elsewhere(p.loss->info.may_be_elsewhere) {}

  // A column, kIgnoredRow, kLabelElsewhere or kBadLabel.
  TILELOSS_HOST_DEVICE std::int64_t operator[](std::int64_t i) const {
    if (!labels.is_used(i)) return kIgnoredRow;
    if (!labels.are_given() && classes != 1) return kLabelElsewhere;
    const std::int64_t label = labels.are_given() ? labels[i] : 0, column = label - first;  // one class alone is sure
    if (label < 0 || label >= classes) return may_be_elsewhere ? kLabelElsewhere : kBadLabel;
    return column >= 0 && column < columns ? column : kLabelElsewhere;
  }
};

}  // namespace tileloss::impl

#endif  // TILELOSS_BACKENDS_LABEL_COLUMNS_H_
