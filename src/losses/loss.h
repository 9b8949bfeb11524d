// What a loss is made of: what it computes for a row, the fields of its options struct, and the inputs that it takes. One header
// per loss, one name in all_losses.h; sweeps, entry points, tools and front ends find it from there.
#pragma once

#include <tileloss/tileloss.h>

#include <cmath>
#include <cstddef>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "core/host_device.h"
#include "losses/inputs.h"
#include "losses/row_stage.h"
#include "schema/fields.h"
#include "schema/tensors.h"

namespace tileloss::impl {

// All that a row stage may look at. Arguments and options have been validated. While planning there is no data: a stage may then
// ask what is present, and read options by value.
struct LossContext {
  const void* options = nullptr;
  std::int64_t rows = 0;
  std::int64_t classes = 0;  // of the whole vocabulary, padding excluded
  tileloss_scalar temperature = 1;
  bool temperature_on_logprob = false;
  Labels labels;
  RowInput token_weights;
  RowInput class_weights;
  RowInput loss_grad;
  RowInput logp_grad, lse_grad, entropy_grad, mean_logit_grad;
  RowInput target_coef, prob_plus_target_coef, prob_logp_coef, uniform_coef;
  RowInput old_logp, ref_logp, sampler_logp, advantages;
  Sequences sequences;
  tileloss_vector metrics{};     // absent in a backward
  std::byte* scratch = nullptr;  // RowStage::scratch_bytes() of them, aligned to 64

  template <class Options>
  const Options& options_as() const {
    return *static_cast<const Options*>(options);
  }
  // Of a row's label; NaN where that is out of range, which only some devices find out before.
  TILELOSS_HOST_DEVICE double class_weight(std::int64_t i) const {
    const std::int64_t label = labels[i];
    return label >= 0 && label < classes ? class_weights[label] : std::numeric_limits<double>::quiet_NaN();
  }
  // What a row counts for.
  TILELOSS_HOST_DEVICE double weight(std::int64_t i) const { return labels.is_used(i) ? token_weights[i] : 0; }
  // Upstream of a label's log-probability, of rows with several; 0 of an empty slot.
  TILELOSS_HOST_DEVICE double logp_grad_at(std::int64_t i, std::int64_t k) const {
    return labels.has_label_at(i, k) ? logp_grad[i * labels.per_row() + k] / logp_divisor() : 0;
  }
  TILELOSS_HOST_DEVICE double logp_divisor() const { return temperature_on_logprob ? scalar_value(temperature) : 1.0; }
};

// What mean multiplies the rows' losses by: 1 over num_items or, where that is NaN, over the sum of their weights; 0 where that
// is 0.
TILELOSS_HOST_DEVICE inline double mean_scale(const tileloss_scalar& num_items, double weights) {
  const double items = scalar_value(num_items), denominator = std::isnan(items) ? weights : items;
  return denominator == 0 ? 0 : 1 / denominator;
}

// A LossInfo::check of functions that know no temperature_on = logprob; empty: fine.
inline std::string check_temperature_on(const LossContext& context) {
  return context.temperature_on_logprob ? "temperature_on: expected logits, got logprob" : "";
}

// What every options struct starts with.
struct CommonOptions {
  std::size_t struct_size;
  tileloss_logit_options logit;
  tileloss_linear_options linear;
};

// How the teacher's logits are transformed.
struct TeacherOptions {
  double logit_scale = 1;
  double softcap = 0;
  tileloss_scalar temperature = 1;
};

struct LossInfo {
  const char* name;
  bool is_loss;  // false: row outputs only, upstream gradients per row
  std::size_t options_size;
  std::span<const tileloss_field> fields = {};  // what follows the CommonOptions
  std::uint32_t tensors;                        // TensorGroups that it takes, besides those that every function does
  std::unique_ptr<RowStage> (*make)(const LossContext& context);
  // Checks that concern more than one option or tensor; empty: fine. May be null.
  std::string (*check)(const LossContext& context) = nullptr;
  // The same for numbers behind pointers, which only the call may read. May be null.
  std::string (*check_numbers)(const void* options) = nullptr;
  // Whether the output is one loss per row rather than the sum of what `row` returns; null: the sum.
  bool (*is_per_row)(const void* options) = nullptr;
  // "a|b|c": names that set_preset knows, and what `metrics` holds. Null: none.
  const char* presets = nullptr;
  void (*set_preset)(std::string_view name, void* options) = nullptr;
  const char* metrics = nullptr;
  TargetKind target = TargetKind::kLabels;                           // what its rows are compared with
  TeacherOptions (*teacher_options)(const void* options) = nullptr;  // of TargetKind::kLogits
  // Where the label's cross-entropy may have a temperature of its own; not given: that of the logits.
  tileloss_scalar (*label_temperature)(const void* options) = nullptr;
  bool takes_several_labels = false;  // a row: labels_per_row
  // Whether a label that is no class is one of a column elsewhere, rather than an error.
  bool may_be_elsewhere = false;
};

}  // namespace tileloss::impl
