// What only the device can look at. What is wrong there is written to a report that the host can read, and makes NaN of what
// depends on it.
#pragma once

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
  std::int64_t slot;                          // of a row with several labels; else -1
  std::int64_t label, classes, ignore_index;  // of a row
  std::int64_t offset, before, count, rows;   // of an offset
  double number;
  tileloss_field field;     // its texts are the host's
  const char* temperature;  // the name, the host's too
  const char* if_missing;   // what is said of a number that is NaN; null: its range
  KnownEntry entry;         // its columns are `classes`
};

// Of a call, 0 at first.
struct CallState {
  std::int32_t is_wrong;            // 1: no row of it is right
  std::uint32_t blocks;             // of begin_call that have ended
  std::uint32_t blocks_of_sum;      // of each_then_sum
  unsigned long long rows_to_last;  // from the first row whose label is wrong to the end
};

// Of a call: where its errors go, and that no row of it is right.
struct Verdict {
  Report* report;
  CallState* state;

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
    state->is_wrong = 1;
  }
};

// What stands for the column of a row's label where an entry of its sparse teacher is wrong, until it becomes kBadLabel.
inline constexpr std::int64_t kBadEntry = -4;

// The columns that a sparse teacher knows of a row, by a block a row: a column that is no column or is there twice, and what is
// no logarithm of a probability.
template <class Matrix>
__global__ void __launch_bounds__(kMaxThreads)
    check_entries(device::RowArrays rows, Matrix ids, Matrix logprobs, std::int64_t columns) {
  begin_kernel();
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

struct CondemnRow {
  device::RowArrays rows;
  TILELOSS_HOST_DEVICE void operator()(std::int64_t i) const {
    if (rows.label_columns[i] == kBadEntry) rows.label_columns[i] = kBadLabel;
  }
};

}  // namespace tileloss::impl::cuda
