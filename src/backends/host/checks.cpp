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
  const auto entry = [](std::int64_t i) { return "sequence_offsets[" + std::to_string(i) + "]"; };
  const IntegerInput offsets(p.args.sequence_offsets);
  if (offsets[0] != 0) return expected(entry(0), "0", std::to_string(offsets[0]));
  for (std::int64_t i = 1; i < offsets.size(); ++i) {
    if (offsets[i] < offsets[i - 1])
      return expected(entry(i), ">= the one before it, " + std::to_string(offsets[i - 1]), std::to_string(offsets[i]));
  }
  const std::int64_t last = offsets.size() - 1;
  if (offsets[last] != p.rows)
    return expected(entry(last), "the number of rows, " + std::to_string(p.rows), std::to_string(offsets[last]));
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
  return {TILELOSS_LABEL_OUT_OF_RANGE, "labels[" + std::to_string(i) + "]: expected 0 <= label < " + std::to_string(p.classes) +
                                           " or ignore_index " + std::to_string(p.logit.ignore_index) + ", got " +
                                           std::to_string(LabelColumns(p).labels[i])};
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
