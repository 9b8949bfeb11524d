// What only the device can look at: labels, numbers behind pointers, sequence offsets. What is wrong there is written to a report
// that the host can read, and makes NaN of what depends on it.
#ifndef TILELOSS_BACKENDS_CUDA_CHECKS_H_
#define TILELOSS_BACKENDS_CUDA_CHECKS_H_

#include "backends/cuda/device_api.h"
#include "backends/device/row_kernels.h"
#include "core/logit_transform.h"
#include "losses/inputs.h"
#include "schema/fields.h"

namespace tileloss::impl::cuda {

enum class Wrong : std::int32_t { kNothing, kLabel, kNumber, kTransform, kOffset };

// In the host's memory, where the device writes it: the first error since somebody asked.
struct Report {
  Wrong what;
  std::int64_t index;                         // of a row or an offset
  std::int64_t label, classes, ignore_index;  // of a row
  std::int64_t offset, before, count, rows;   // of an offset
  double number;
  tileloss_field field;  // its texts are the host's
};

// Of a call: where its errors go, and that no row of it is right.
struct Verdict {
  Report* report;
  std::int32_t* is_wrong;

  TILELOSS_HOST_DEVICE void condemn(const Report& found) const {
    if (report->what == Wrong::kNothing) *report = found;
    *is_wrong = 1;
  }
};

// Of a number that lies behind a pointer.
struct CheckNumber {
  tileloss_field field;
  tileloss_scalar scalar;
  Verdict verdict;

  TILELOSS_HOST_DEVICE void operator()(std::int64_t /*index*/) const {
    const double x = scalar_value(scalar);
    if (in_range(field, x)) return;
    Report found = {};
    found.what = Wrong::kNumber;
    found.number = x;
    found.field = field;
    verdict.condemn(found);
  }
};

// Of the transform of the logits, whose temperature may lie behind a pointer, when that is in its own range.
struct MakeTransform {
  double logit_scale, softcap;
  tileloss_scalar temperature;
  LogitTransform* transform;
  Verdict verdict;

  TILELOSS_HOST_DEVICE void operator()(std::int64_t /*index*/) const {
    const double t = scalar_value(temperature);
    *transform = LogitTransform::make(logit_scale, softcap, t);
    const auto is_in_range = [](double quotient) { return quotient >= 0x1p-126 && quotient <= 0x1p126; };
    if (is_in_range(logit_scale / t) && (softcap == 0 || is_in_range(softcap / t))) return;
    Report found = {};
    found.what = Wrong::kTransform;
    found.number = t;
    verdict.condemn(found);
  }
};

struct IsWrongOffset {
  IntegerInput offsets;
  std::int64_t rows;

  TILELOSS_HOST_DEVICE bool operator()(std::int64_t i) const {
    const bool is_right = i == 0 ? offsets[0] == 0 : offsets[i] >= offsets[i - 1];
    return !is_right || (i + 1 == offsets.size() && offsets[i] != rows);
  }
};
struct ReportOffset {
  IntegerInput offsets;
  std::int64_t rows;
  Verdict verdict;

  TILELOSS_HOST_DEVICE void operator()(std::int64_t i) const {
    Report found = {};
    found.what = Wrong::kOffset;
    found.index = i;
    found.offset = offsets[i];
    found.before = i == 0 ? 0 : offsets[i - 1];
    found.count = offsets.size();
    found.rows = rows;
    verdict.condemn(found);
  }
};

struct IsBadLabel {
  device::RowArrays rows;
  TILELOSS_HOST_DEVICE bool operator()(std::int64_t i) const { return rows.label_columns[i] == kBadLabel; }
};
// The row's alone is wrong.
struct ReportLabel {
  Labels labels;
  std::int64_t classes, ignore_index;
  Verdict verdict;

  TILELOSS_HOST_DEVICE void operator()(std::int64_t i) const {
    if (verdict.report->what != Wrong::kNothing) return;
    Report& found = *verdict.report;
    found.index = i;
    found.label = labels[i];
    found.classes = classes;
    found.ignore_index = ignore_index;
    found.what = Wrong::kLabel;
  }
};

// Where the whole call is wrong.
struct CondemnRow {
  device::RowArrays rows;
  const std::int32_t* is_wrong;
  TILELOSS_HOST_DEVICE void operator()(std::int64_t i) const {
    if (*is_wrong != 0) rows.label_columns[i] = kBadLabel;
  }
};

}  // namespace tileloss::impl::cuda

#endif  // TILELOSS_BACKENDS_CUDA_CHECKS_H_
