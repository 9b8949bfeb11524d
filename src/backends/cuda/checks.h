// What only the device can look at: labels, numbers behind pointers, sequence offsets. What is wrong there is written to a report
// that the host can read, and makes NaN of what depends on it.
#ifndef TILELOSS_BACKENDS_CUDA_CHECKS_H_
#define TILELOSS_BACKENDS_CUDA_CHECKS_H_

#include "backends/cuda/device_api.h"
#include "backends/device/row_kernels.h"
#include "backends/known_entries.h"
#include "core/logit_transform.h"
#include "losses/inputs.h"
#include "schema/fields.h"

namespace tileloss::impl::cuda {

enum class Wrong : std::int32_t { kNothing, kLabel, kNumber, kTransform, kOffset, kEntry, kEntryTwice };

// What kernels of several streams may want to write at once, and one does.
enum ReportState : int { kUnwritten, kBeingWritten, kWritten };

// In the host's memory, where the device writes it: the first error since somebody asked.
struct Report {
  int state;  // what else is here is the host's to read when it is kWritten
  Wrong what;
  std::int64_t index;                         // of a row or an offset
  std::int64_t label, classes, ignore_index;  // of a row
  std::int64_t offset, before, count, rows;   // of an offset
  double number;
  tileloss_field field;     // its texts are the host's
  const char* temperature;  // the name, the host's too
  const char* if_missing;   // what is said of a number that is NaN; null: its range
  KnownEntry entry;         // its columns are `classes`
};

// Of a call: where its errors go, and that no row of it is right.
struct Verdict {
  Report* report;
  std::int32_t* is_wrong;

  // The first error alone.
  __device__ void write(Report found) const {
    if (atomicCAS_system(&report->state, kUnwritten, kBeingWritten) != kUnwritten) return;
    found.state = kBeingWritten;
    *report = found;
    __threadfence_system();
    atomicExch_system(&report->state, kWritten);
  }
  __device__ void condemn(const Report& found) const {
    write(found);
    *is_wrong = 1;
  }
};

// Of a number that lies behind a pointer.
struct CheckNumber {
  tileloss_field field;
  tileloss_scalar scalar;
  const char* if_missing;
  Verdict verdict;

  __device__ void operator()(std::int64_t /*index*/) const {
    const double x = scalar_value(scalar);
    if (in_range(field, x)) return;
    Report found = {};
    found.what = Wrong::kNumber;
    found.number = x;
    found.field = field;
    found.if_missing = if_missing;
    verdict.condemn(found);
  }
};

// Of the transform of some logits, whose temperature may lie behind a pointer, when that is in its own range.
struct MakeTransform {
  double logit_scale, softcap;
  tileloss_scalar temperature, otherwise;  // the latter where the former is not given
  const char* name;                        // of the temperature
  LogitTransform* transform;
  Verdict verdict;

  __device__ void operator()(std::int64_t /*index*/) const {
    const double own = scalar_value(temperature), t = std::isnan(own) ? scalar_value(otherwise) : own;
    *transform = LogitTransform::make(logit_scale, softcap, t);
    const auto is_in_range = [](double quotient) { return quotient >= 0x1p-126 && quotient <= 0x1p126; };
    if (is_in_range(logit_scale / t) && (softcap == 0 || is_in_range(softcap / t))) return;
    Report found = {};
    found.what = Wrong::kTransform;
    found.number = t;
    found.temperature = name;
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

  __device__ void operator()(std::int64_t i) const {
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

  __device__ void operator()(std::int64_t i) const {
    Report found = {};
    found.what = Wrong::kLabel;
    found.index = i;
    found.label = labels[i];
    found.classes = classes;
    found.ignore_index = ignore_index;
    verdict.write(found);
  }
};

// What stands for the column of a row's label where an entry of its sparse teacher is wrong, until it becomes kBadLabel.
inline constexpr std::int64_t kBadEntry = -4;

// The columns that a sparse teacher knows of a row, by a block a row: a column that is no column or is there twice, and what is
// no logarithm of a probability.
template <class Matrix>
__global__ void __launch_bounds__(kMaxThreads)
    check_entries(device::RowArrays rows, Matrix ids, Matrix logprobs, std::int64_t columns) {
  using Parts = std::int32_t[kWarp];
  TILELOSS_SHARED(Parts, parts);
  const std::int64_t i = blockIdx.x;
  const std::int64_t label = rows.label_columns[i];
  if (label == kIgnoredRow || label == kBadLabel) return;
  std::int32_t is_wrong = 0;
  for (std::int64_t k = threadIdx.x; k < ids.cols; k += blockDim.x) {
    const KnownEntry entry(ids, logprobs, i, k);
    if (entry.id < 0) continue;
    if (entry.is_column_wrong(columns) || entry.is_log_wrong()) is_wrong = 1;
    for (std::int64_t j = 0; j < k; ++j) is_wrong |= integer_at(ids, i, j) == entry.id ? 1 : 0;
  }
  is_wrong = reduce_block(is_wrong, parts, 0, [](std::int32_t a, std::int32_t b) { return a | b; });
  __syncthreads();  // all have read what is written now; a block of one warp met at no barrier
  if (threadIdx.x == 0 && is_wrong != 0) rows.label_columns[i] = kBadEntry;
}
struct HasBadEntry {
  device::RowArrays rows;
  TILELOSS_HOST_DEVICE bool operator()(std::int64_t i) const { return rows.label_columns[i] == kBadEntry; }
};
// The first entry that is wrong by itself, else the least column that is there twice.
struct ReportEntry {
  tileloss_matrix ids, logprobs;
  std::int64_t columns;
  Verdict verdict;

  __device__ void operator()(std::int64_t i) const {
    Report found = {};
    found.classes = columns;
    found.what = Wrong::kEntry;
    for (std::int64_t k = 0; k < ids.cols; ++k) {
      found.entry = KnownEntry(ids, logprobs, i, k);
      if (found.entry.id >= 0 && (found.entry.is_column_wrong(columns) || found.entry.is_log_wrong()))
        return verdict.write(found);
    }
    found.what = Wrong::kEntryTwice;
    found.entry.id = columns;
    for (std::int64_t k = 1; k < ids.cols; ++k) {
      const std::int64_t id = integer_at(ids, i, k);
      for (std::int64_t j = 0; j < k && id >= 0 && id < found.entry.id; ++j) {
        if (integer_at(ids, i, j) == id) found.entry.id = id;
      }
    }
    verdict.write(found);
  }
};

// Where the whole call is wrong, or what the row is compared with.
struct CondemnRow {
  device::RowArrays rows;
  const std::int32_t* is_wrong;
  TILELOSS_HOST_DEVICE void operator()(std::int64_t i) const {
    if (*is_wrong != 0 || rows.label_columns[i] == kBadEntry) rows.label_columns[i] = kBadLabel;
  }
};

}  // namespace tileloss::impl::cuda

#endif  // TILELOSS_BACKENDS_CUDA_CHECKS_H_
