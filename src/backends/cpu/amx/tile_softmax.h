// The softmax of a block of logits, a little at a time beside the tile products of the next block
// (backends/cpu/amx/matmul_tiles.h): linear logits, maximum and sum of exponentials only. Rows are done one after the other,
// two vectors a step; a row's words (backends/cpu/head/kept_logits.h), which are relative to its maximum, beside the row after
// it.
//
// Exponentials are relative to the row's reference, which follows its maximum where that is more than 6 ahead: the row's logits
// of the tile, still in L1, are then done again.
//
// The state is in the loop's registers, not in members: docs/measurements/intel-xeon-amx-2-cores.md.
#pragma once

#include <cstdint>

#include "backends/cpu/amx/tile_table.h"
#include "backends/cpu/simd/exp2.h"

namespace tileloss::impl::cpu {

template <class Simd>
class TileSoftmax {
  using F = typename Simd::F;
  static constexpr int kLanes = Simd::kLanes, kPair = Simd::kPair;
  static constexpr float kInf = __builtin_inff();
  static constexpr float kMaxGap = 6;          // a row's maximum may be so many exponents above its reference
  static constexpr float kLowest = -150;       // exponents from here on are 0 in float32
  static constexpr float kFarthest = 0x1p24f;  // beyond, neighbouring floats are more than one exponent apart
  static constexpr float kTopWord = 65535;

 public:
  explicit TileSoftmax(const SoftmaxRows& job)
      : job_(&job),
        pairs_((job.columns + kPair - 1) / kPair),
        scale_(job.exponent_scale, job.exact_exponent_scale),
        steps_per_unit_(Simd::set(job.steps_per_unit)) {}

  // Rows [first, first + rows) of the job, whose logits are at z.
  void begin(float* z, std::int64_t first, std::int64_t rows) {
    z_ = z;
    first_ = first;
    rows_ = rows;
    row_ = 0;
    words_ = nullptr;
    begin_row();
  }
  // What a loop has in registers: of the row whose sums are made (`now`, null after the last one) and of the one before, whose
  // words are (`words`, null where none are kept).
  struct Hot {
    const float *now, *before;
    std::uint16_t* words;
    std::int64_t left;
    F offset, lowest, max, words_max, sum0, sum1;
  };
  [[gnu::always_inline]] Hot hot() const {
    return {hot_now_, before_, words_, left_, offset_, lowest_, max_, words_max_, sum_[0], sum_[1]};
  }
  [[gnu::always_inline]] void put(const Hot& h) {
    hot_now_ = h.now;
    left_ = h.left;
    before_ = h.before;
    words_ = h.words;
    max_ = h.max;
    sum_[0] = h.sum0;
    sum_[1] = h.sum1;
  }
  [[gnu::always_inline]] void step(Hot& h) {
    if (h.left <= 0) return;
    if (h.now != nullptr) add_pair(h.now, h);
    if (h.words != nullptr) keep_pair(h);
    h.now += h.now != nullptr ? kPair : 0;
    if (--h.left == 0) {
      put(h);
      end_row();
      h = hot();
    }
  }
  void finish() {
    Hot h = hot();
    while (h.left > 0) step(h);
    put(h);
  }

 private:
  [[gnu::always_inline]] F exponential(F x, const Hot& h) const {
    const F z = Simd::max(h.lowest, x);  // a NaN stays
    const F t = Simd::scale_minus(z, scale_, h.offset), n = Simd::round(t);
    const F r = Simd::corrected_remainder(z, scale_, h.offset, t, n);
    return Simd::scale_by_power_of_two(exp2_polynomial<Simd, true>({r, r}).a, n);
  }
  [[gnu::always_inline]] void add_pair(const float* x, Hot& h) const {
    const F a = Simd::load(x), b = Simd::load(x + kLanes);
    h.max = Simd::max(a, Simd::max(b, h.max));
    h.sum0 = Simd::add(h.sum0, exponential(a, h));
    h.sum1 = Simd::add(h.sum1, exponential(b, h));
  }
  [[gnu::always_inline]] void keep_pair(Hot& h) const {
    Simd::stream_words(h.words, {word_of(Simd::load(h.before), h), word_of(Simd::load(h.before + kLanes), h)});
    h.words += kPair;
    h.before += kPair;
  }
  // As backends/cpu/head/kept_logits.h has it: max returns its second argument for NaN.
  [[gnu::always_inline]] F word_of(F z, const Hot& h) const {
    const F steps = Simd::max(Simd::fma(Simd::sub(z, h.words_max), steps_per_unit_, Simd::set(kTopWord)), Simd::set(0));
    return Simd::add(steps, Simd::set(0.5f));
  }

  // The label's logit is put aside: -inf is nothing to sum and maximum.
  void begin_row() {
    before_ = row_start_;
    if (row_ >= rows_) {
      left_ = words_ != nullptr ? pairs_ : 0;
      hot_now_ = nullptr;
      return;
    }
    left_ = pairs_;
    row_start_ = z_ + row_ * job_->z_stride;
    hot_now_ = row_start_;
    if (job_->leave_out != nullptr) job_->leave_out(job_->context, first_ + row_, row_start_);
    for (std::int64_t j = job_->columns; j < pairs_ * kPair; ++j) row_start_[j] = -kInf;
    RunningRow& running = job_->running[first_ + row_];
    target_ = running.target_column - job_->column;
    has_target_ = target_ >= 0 && target_ < job_->columns;
    if (has_target_) {
      running.target = row_start_[target_];
      row_start_[target_] = -kInf;
    }
    begin_sums(running.reference);
  }
  void begin_sums(float reference) {
    sum_[0] = sum_[1] = Simd::set(0);
    max_ = Simd::set(-kInf);
    offset_ = Simd::set(reference);
    lowest_ = Simd::set((reference + kLowest) * job_->inverse_scale);
  }

  // What the row that is done adds to its RunningRow, and its words, if there are any, begin.
  [[gnu::noinline]] void end_row() {
    words_ = nullptr;
    if (row_ < rows_) {
      RunningRow& running = job_->running[first_ + row_];
      const float others = Simd::reduce_max(max_);
      const float max = has_target_ && running.target > others ? running.target : others;
      const bool is_in_reach = others * job_->exponent_scale <= running.reference + kMaxGap;
      if (!(is_in_reach && add_sums(running)) && is_odd(running, others)) {
        hand_over(running);
      } else {
        if (!is_in_reach && others > -kInf) add_again(running, others);
        running.max = max > running.max ? max : running.max;
        if (job_->also != nullptr) also(running.target);
      }
      if (job_->keep != nullptr) {
        words_ = job_->keep(job_->context, first_ + row_, max);
        words_max_ = Simd::set(max);
      }
    }
    ++row_;
    begin_row();
  }

  // False, and nothing done, if the row's sum or its label's logit is no number.
  bool add_sums(RunningRow& running) const {
    const float sum = Simd::reduce_add(Simd::add(sum_[0], sum_[1]));
    if (!(sum < kInf) || (has_target_ && !(running.target < kInf))) return false;
    running.sum += static_cast<double>(sum);
    return true;
  }

  [[gnu::noinline]] bool is_odd(const RunningRow& running, float max) const {
    if (has_target_ && !(running.target < kInf)) return true;
    for (std::int64_t j = 0; j < job_->columns; ++j) {
      if (row_start_[j] != row_start_[j]) return true;
    }
    const float exponent = max * job_->exponent_scale;
    return max > -kInf && !(exponent > -kFarthest && exponent < kFarthest);
  }

  // Sums relative to this tile's maximum: the first tile, or one that is far above those before.
  void add_again(RunningRow& running, float max) {
    const float reference = __builtin_rintf(max * job_->exponent_scale);
    if (running.sum != 0) {
      running.sum *= __builtin_exp2((static_cast<double>(running.reference) - reference) * job_->reference_unit);
    }
    running.reference = reference;
    begin_sums(reference);
    Hot h = hot();
    for (std::int64_t j = 0; j < pairs_; ++j) add_pair(row_start_ + j * kPair, h);
    running.sum += static_cast<double>(Simd::reduce_add(Simd::add(h.sum0, h.sum1)));
  }

  void hand_over(RunningRow& running) {
    if (has_target_) row_start_[target_] = running.target;
    job_->odd(job_->context, first_ + row_, row_start_);
    if (has_target_) running.target = -kInf;
  }

  void also(float target) {
    if (has_target_) row_start_[target_] = target;
    job_->also(job_->context, first_ + row_, row_start_);
    if (has_target_) row_start_[target_] = -kInf;
  }

  const SoftmaxRows* job_;
  std::int64_t pairs_;
  typename Simd::Scale scale_;
  F steps_per_unit_;
  float* z_ = nullptr;
  float* row_start_ = nullptr;
  const float* hot_now_ = nullptr;
  const float* before_ = nullptr;
  std::uint16_t* words_ = nullptr;
  std::int64_t first_ = 0, rows_ = 0, row_ = 0, left_ = 0, target_ = -1;
  bool has_target_ = false;
  F offset_ = Simd::set(0), lowest_ = offset_, max_ = offset_, words_max_ = offset_;
  F sum_[2] = {offset_, offset_};
};

}  // namespace tileloss::impl::cpu
