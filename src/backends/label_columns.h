// Which column of the logits a row's label is, and which ones its softmax runs over.
#pragma once

#include "backends/problem.h"
#include "core/row_state.h"

namespace tileloss::impl {

// What stands for the column of a label out of range.
inline constexpr std::int64_t kBadLabel = -3;

// The words of rows whose softmax runs over some of the columns: tileloss_args.allowed, from a row and a column on. Null: there
// are none, and all columns are allowed.
struct AllowedRows {
  const std::uint32_t* words = nullptr;
  std::int64_t row_stride = 0;

  TILELOSS_HOST_DEVICE bool has(std::int64_t i, std::int64_t column) const {
    return words == nullptr || (words[i * row_stride + column / 32] >> (column % 32) & 1) != 0;
  }
  // `column`: a multiple of 32.
  TILELOSS_HOST_DEVICE AllowedRows from(std::int64_t row, std::int64_t column) const {
    return {words == nullptr ? nullptr : words + row * row_stride + column / 32, row_stride};
  }
};

struct LabelColumns {
  Labels labels;
  AllowedRows allowed;
  std::int64_t classes = 0, first = 0, columns = 0;
  bool may_be_elsewhere = false;

  explicit LabelColumns(const Problem& p)
      : labels(p.args.labels, p.logit.ignore_index, p.args.mask, p.args.labels_per_row),
        allowed{static_cast<const std::uint32_t*>(p.args.allowed.data), p.args.allowed.row_stride},
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
  // Of rows with several labels, of which the sweep is to choose one: a slot's column, kLabelElsewhere where the row has none
  // here: the slot is empty, or its label on another shard or not allowed.
  TILELOSS_HOST_DEVICE std::int64_t at(std::int64_t i, std::int64_t k) const {
    const std::int64_t column = labels.has_label_at(i, k) ? labels.at(i, k) - first : kLabelElsewhere;
    return column >= 0 && column < columns && allowed.has(i, column) ? column : kLabelElsewhere;
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
