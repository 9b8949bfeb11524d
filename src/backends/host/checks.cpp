#include "backends/host/checks.h"

#include <algorithm>
#include <string>
#include <vector>

#include "backends/known_entries.h"
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
  const LabelColumns all(p);
  const std::int64_t k = p.has_several_labels() ? all.bad_slot(i) : 0;
  const std::string at = std::to_string(i) + (p.has_several_labels() ? "," + std::to_string(k) : "");
  return bad_label(at, all.labels.at(i, k), p.classes, p.logit.ignore_index);
}

Status check_target(const Problem& p, const std::int64_t* label_columns) {
  if (p.loss->target() != TargetKind::kColumns) return {};
  std::vector<KnownEntry> seen;
  for (std::int64_t i = 0; i < p.rows; ++i) {
    if (label_columns[i] == kIgnoredRow) continue;
    seen.clear();
    for (std::int64_t k = 0; k < p.args.teacher_ids.cols; ++k) {
      const KnownEntry entry(p.args.teacher_ids, p.args.teacher_logprobs, i, k);
      if (entry.id < 0) continue;
      if (entry.is_column_wrong(p.columns) || entry.is_log_wrong()) return bad_entry(entry, p.columns, false);
      seen.push_back(entry);
    }
    std::sort(seen.begin(), seen.end(), [](const KnownEntry& a, const KnownEntry& b) { return a.id < b.id; });
    const auto twice =
        std::adjacent_find(seen.begin(), seen.end(), [](const KnownEntry& a, const KnownEntry& b) { return a.id == b.id; });
    if (twice != seen.end()) return bad_entry(*twice, p.columns, true);
  }
  return {};
}

}  // namespace tileloss::impl::host
