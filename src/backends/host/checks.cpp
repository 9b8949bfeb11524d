#include "backends/host/checks.h"

#include <algorithm>
#include <string>
#include <vector>

#include "backends/label_columns.h"
#include "schema/options.h"

namespace tileloss::impl::host {
namespace {

Status check_offsets(const Problem& p) {
  const Sequences sequences(p.args.sequence_offsets, 0, p.rows);
  if (!sequences.has_offsets()) return {};
  const IntegerInput offsets(p.args.sequence_offsets);
  for (std::int64_t i = 0; i < offsets.size(); ++i) {
    if (Status s = check_offset(i, offsets.size(), offsets[i], i == 0 ? 0 : offsets[i - 1], p.rows); !s.ok()) return s;
  }
  return {};
}

}  // namespace

Status check_numbers(const Problem& p) {
  if (Status s = check_options(p.loss->fields, p.options.data(), true); !s.ok()) return s;
  if (Status s = check_transforms(p, true); !s.ok()) return s;
  if (p.loss->info.check_numbers != nullptr) {
    if (std::string message = p.loss->info.check_numbers(p.options.data()); !message.empty()) return invalid(std::move(message));
  }
  return check_offsets(p);
}

void find_label_columns(const Problem& p, std::int64_t* label_columns) {
  const LabelColumns all(p);
  for (std::int64_t i = 0; i < p.rows; ++i) label_columns[i] = all[i];
}

Status check_labels(const Problem& p, const std::int64_t* label_columns) {
  const auto* const bad = std::find(label_columns, label_columns + p.rows, kBadLabel);
  if (bad == label_columns + p.rows) return {};
  const std::int64_t i = bad - label_columns;
  return bad_label(i, LabelColumns(p).labels[i], p.classes, p.logit.ignore_index);
}

Status check_target(const Problem& p, const std::int64_t* label_columns) {
  if (p.loss->target() != TargetKind::kColumns) return {};
  constexpr float kMost = 0.001F;  // of a log q: what rounding may make of 0
  const tileloss_matrix &ids = p.args.teacher_ids, &log_q = p.args.teacher_logprobs;
  const auto entry = [](const char* name, std::int64_t i, std::int64_t k) {
    return std::string(name) + "[" + std::to_string(i) + "," + std::to_string(k) + "]";
  };
  std::vector<std::int64_t> seen;
  for (std::int64_t i = 0; i < p.rows; ++i) {
    if (label_columns[i] == kIgnoredRow) continue;
    seen.clear();
    for (std::int64_t k = 0; k < ids.cols; ++k) {
      const std::int64_t id = integer_at(ids, i, k);
      if (id < 0) continue;
      if (id >= p.columns) {
        return expected(entry("teacher_ids", i, k), "a column < " + std::to_string(p.columns) + ", or a negative number for none",
                        std::to_string(id));
      }
      const float log = number_at(log_q, i, k);
      if (log > kMost) {
        return expected(entry("teacher_logprobs", i, k), "the logarithm of a probability, <= 0 but for rounding",
                        std::to_string(log));
      }
      seen.push_back(id);
    }
    std::sort(seen.begin(), seen.end());
    const auto twice = std::adjacent_find(seen.begin(), seen.end());
    if (twice != seen.end())
      return expected("teacher_ids[" + std::to_string(i) + "]", "distinct columns", std::to_string(*twice) + " twice");
  }
  return {};
}

}  // namespace tileloss::impl::host
