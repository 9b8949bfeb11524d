// What is done once a call, before its first sweep, by one kernel: the loss is brought to the device, the rows' label columns and
// the transforms are made, and all that only the device can look at is looked at, but for what a sparse teacher knows.
#pragma once

#include <cstring>
#include <type_traits>

#include "backends/cuda/checks.h"
#include "backends/label_columns.h"

namespace tileloss::impl::cuda {

// Up to kMost of them, as an argument of a kernel.
template <class T, int kMost>
struct Some {
  T all[kMost];
  int count = 0;

  void add(const T& one) { all[count++] = one; }
};

// A number that lies behind a pointer.
struct GivenNumber {
  tileloss_field field;
  tileloss_scalar scalar;
  const char* if_missing;

  __device__ void check(const Verdict& verdict) const {
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

// The transform of some logits, whose temperature may lie behind a pointer, when that is in its own range.
struct TransformToMake {
  double logit_scale, softcap;
  tileloss_scalar temperature, otherwise;  // the latter where the former is not given
  const char* name;                        // of the temperature
  LogitTransform* transform;

  __device__ void make(const Verdict& verdict) const {
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

inline constexpr int kThreadsOfBeginning = 256;

// The kernel's argument.
struct Beginning {
  using Word = unsigned long long;
  static constexpr std::size_t kMostOfLoss = 2304;

  LabelColumns labels;
  device::RowArrays rows;
  std::int64_t row_count, ignore_index;
  Verdict verdict;
  Some<GivenNumber, 12> numbers;
  Some<TransformToMake, 3> transforms;
  IntegerInput offsets;  // of no size: none
  Word loss[kMostOfLoss / sizeof(Word)];
  Word* loss_at;
  int loss_words;

  template <class Loss>
  void set_loss(Loss* at, const Loss& value) {
    static_assert(std::is_trivially_copyable_v<Loss> && sizeof(Loss) <= kMostOfLoss && sizeof(Loss) % sizeof(Word) == 0);
    std::memcpy(loss, &value, sizeof value);
    loss_at = reinterpret_cast<Word*>(at);
    loss_words = static_cast<int>(sizeof value / sizeof(Word));
  }

  // By the first block: the loss, and what no row has a part in.
  __device__ void begin_all() const {
    for (int k = static_cast<int>(threadIdx.x); k < loss_words; k += static_cast<int>(blockDim.x)) loss_at[k] = loss[k];
    if (threadIdx.x == 0) {
      for (int k = 0; k < numbers.count; ++k) numbers.all[k].check(verdict);
      for (int k = 0; k < transforms.count; ++k) transforms.all[k].make(verdict);
    }
    using Parts = std::int64_t[kWarp];
    TILELOSS_SHARED(Parts, parts);
    std::int64_t first = threadIdx.x;
    while (first < offsets.size() && !is_wrong_offset(first)) first += blockDim.x;
    first = reduce_block(first, parts, offsets.size(), [](std::int64_t a, std::int64_t b) { return a < b ? a : b; });
    if (threadIdx.x == 0 && first < offsets.size()) report_offset(first);
  }
  __device__ bool is_wrong_offset(std::int64_t i) const {
    const bool is_right = i == 0 ? offsets[0] == 0 : offsets[i] >= offsets[i - 1];
    return !is_right || (i + 1 == offsets.size() && offsets[i] != row_count);
  }
  __device__ void report_offset(std::int64_t i) const {
    Report found = {};
    found.what = Wrong::kOffset;
    found.index = i;
    found.offset = offsets[i];
    found.before = i == 0 ? 0 : offsets[i - 1];
    found.count = offsets.size();
    found.rows = row_count;
    verdict.condemn(found);
  }
  // The row's alone is wrong.
  __device__ void report_label(std::int64_t i) const {
    Report found = {};
    found.what = Wrong::kLabel;
    found.index = i;
    found.slot = labels.labels.per_row() > 1 ? labels.bad_slot(i) : -1;
    found.label = labels.labels.at(i, found.slot < 0 ? 0 : found.slot);
    found.classes = labels.classes;
    found.ignore_index = ignore_index;
    verdict.write(found);
  }
};
static_assert(sizeof(Beginning) <= 4096, "a kernel's arguments");

// A row a thread. The block that ends last has seen what all of them found.
template <class Call>
__global__ void __launch_bounds__(kThreadsOfBeginning) begin_call(const __grid_constant__ Call all) {
  begin_kernel();
  CallState& state = *all.verdict.state;
  if (blockIdx.x == 0) all.begin_all();
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < all.row_count) {
    const std::int64_t column = all.rows.label_columns[i] = all.labels[i];
    if (column == kBadLabel) atomicMax(&state.rows_to_last, static_cast<unsigned long long>(all.row_count - i));
  }
  TILELOSS_SHARED(int, is_wrong);
  __threadfence();
  __syncthreads();  // all of the block's is written
  if (threadIdx.x == 0) {
    const bool is_last = atomicAdd(&state.blocks, 1u) + 1 == gridDim.x;
    const unsigned long long rows_to_last = is_last ? atomicMax(&state.rows_to_last, 0ull) : 0;
    is_wrong = is_last ? atomicOr(&state.is_wrong, 0) : 0;
    if (rows_to_last > 0) all.report_label(all.row_count - static_cast<std::int64_t>(rows_to_last));
  }
  __syncthreads();
  if (is_wrong == 0) return;
  for (std::int64_t k = threadIdx.x; k < all.row_count; k += blockDim.x) all.rows.label_columns[k] = kBadLabel;
}

}  // namespace tileloss::impl::cuda
