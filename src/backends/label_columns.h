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
      : labels(p.args.labels, p.logit.ignore_index, p.args.mask, p.args.labels_per_row),
        classes(p.classes),
        first(p.logit.vocab_start),
        columns(p.columns),
        may_be_elsewhere(p.loss->info.may_be_elsewhere) {}

  // A column, kIgnoredRow, kLabelElsewhere or kBadLabel.
  TILELOSS_HOST_DEVICE std::int64_t operator[](std::int64_t i) const {
    if (!labels.is_used(i)) return kIgnoredRow;
    if (!labels.are_given() && classes != 1) return kLabelElsewhere;
    if (labels.per_row() > 1) return bad_slot(i) < 0 ? kLabelElsewhere : kBadLabel;
    const std::int64_t label = labels.are_given() ? labels[i] : 0, column = label - first;  // one class alone is sure
    if (label < 0 || label >= classes) return may_be_elsewhere ? kLabelElsewhere : kBadLabel;
    return column >= 0 && column < columns ? column : kLabelElsewhere;
  }
  // Of rows with several labels, of which the sweep is to choose one: a slot's column, kLabelElsewhere where there is none here.
  TILELOSS_HOST_DEVICE std::int64_t at(std::int64_t i, std::int64_t k) const {
    const std::int64_t column = labels.has_label_at(i, k) ? labels.at(i, k) - first : kLabelElsewhere;
    return column >= 0 && column < columns ? column : kLabelElsewhere;
  }
  // The first slot whose label is no class; -1: there is none.
  TILELOSS_HOST_DEVICE std::int64_t bad_slot(std::int64_t i) const {
    for (std::int64_t k = 0; k < labels.per_row(); ++k) {
      if (labels.has_label_at(i, k) && (labels.at(i, k) < 0 || labels.at(i, k) >= classes)) return k;
    }
    return -1;
  }
};

}  // namespace tileloss::impl

#endif  // TILELOSS_BACKENDS_LABEL_COLUMNS_H_
