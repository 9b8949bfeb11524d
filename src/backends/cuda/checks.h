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

enum class Wrong : std::int32_t { kNothing, kLabel, kNumber, kOffset };

// In the host's memory, where the device writes it. Of several errors of one kind any may stay.
struct Report {
  Wrong what;
  std::int64_t index;  // of a row, a scalar or an offset
  std::int64_t label, classes, ignore_index;
  double number;
  char name[32];
};

// The options that lie behind pointers.
struct DeviceNumbers {
  static constexpr int kMost = 24;
  tileloss_field fields[kMost];
  tileloss_scalar scalars[kMost];
  char names[kMost][32];
  int count = 0;
};

// One thread's: all numbers, then the offsets.
struct CheckNumbers {
  DeviceNumbers numbers;
  IntegerInput offsets;
  std::int64_t offset_count;  // 0: none
  std::int64_t num_rows;
  Report* report;
  std::int32_t* is_wrong;

  TILELOSS_HOST_DEVICE void operator()(std::int64_t /*index*/) const {
    for (int k = 0; k < numbers.count; ++k) {
      const double x = scalar_value(numbers.scalars[k]);
      if (in_range(numbers.fields[k], x)) continue;
      report->number = x;
      for (int c = 0; c < 32; ++c) report->name[c] = numbers.names[k][c];
      fail(Wrong::kNumber, k);
      return;
    }
    for (std::int64_t i = 0; i < offset_count; ++i) {
      const bool is_right = i == 0 ? offsets[0] == 0 : offsets[i] >= offsets[i - 1];
      if (is_right && (i + 1 < offset_count || offsets[i] == num_rows)) continue;
      report->label = offsets[i];
      fail(Wrong::kOffset, i);
      return;
    }
  }

 private:
  TILELOSS_HOST_DEVICE void fail(Wrong what, std::int64_t index) const {
    report->index = index;
    report->what = what;
    *is_wrong = 1;
  }
};

// One thread's: the transform of the logits, whose temperature may lie behind a pointer.
struct MakeTransform {
  double logit_scale, softcap;
  tileloss_scalar temperature;
  LogitTransform* transform;
  Report* report;
  std::int32_t* is_wrong;

  TILELOSS_HOST_DEVICE void operator()(std::int64_t /*index*/) const {
    const double t = scalar_value(temperature);
    *transform = LogitTransform::make(logit_scale, softcap, t);
    const auto is_in_range = [](double quotient) { return quotient >= 0x1p-126 && quotient <= 0x1p126; };
    if (is_in_range(logit_scale / t) && (softcap == 0 || is_in_range(softcap / t))) return;
    constexpr char kName[] = "temperature";
    for (std::size_t c = 0; c < sizeof kName; ++c) report->name[c] = kName[c];
    report->number = t;
    report->what = Wrong::kNumber;
    *is_wrong = 1;
  }
};

struct CheckLabel {
  device::RowArrays rows;
  Labels labels;
  std::int64_t classes, ignore_index;
  Report* report;
  const std::int32_t* is_wrong;

  TILELOSS_HOST_DEVICE void operator()(std::int64_t i) const {
    if (*is_wrong != 0) {
      rows.label_columns[i] = kBadLabel;
    } else if (rows.label_columns[i] == kBadLabel) {
      report->index = i;
      report->label = labels[i];
      report->classes = classes;
      report->ignore_index = ignore_index;
      report->what = Wrong::kLabel;
    }
  }
};

}  // namespace tileloss::impl::cuda

#endif  // TILELOSS_BACKENDS_CUDA_CHECKS_H_
