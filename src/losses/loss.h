// What a loss is made of: a RowStage, the fields of its options struct, and the inputs that it takes. One header per loss, one
// line in registry.cpp; sweeps, entry points, tools and front ends find it from there.
#ifndef TILELOSS_LOSSES_LOSS_H_
#define TILELOSS_LOSSES_LOSS_H_

#include <tileloss/tileloss.h>

#include <cmath>
#include <cstddef>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "core/row_stage.h"
#include "losses/inputs.h"

namespace tileloss {

// Optional tensors of tileloss_args that a loss reads. Giving one that the loss does not read is an error.
enum LossInputs : std::uint32_t {
  kTokenWeights = 1,
  kClassWeights = 2,
  kLossGrad = 4,
  kRowGrads = 8,       // logp_grad, lse_grad, entropy_grad
  kMask = 16,          // mask
  kSequences = 32,     // sequence_offsets, sequence_length
  kPolicyLogps = 64,   // old_logp, ref_logp, sampler_logp
  kAdvantages = 128,   // advantages
  kStepMetrics = 256,  // metrics
};

// All that a row stage may look at. Arguments and options have been validated. While planning there is no data: a stage may then
// ask what is present, and read options by value.
struct LossContext {
  const void* options = nullptr;
  std::int64_t rows = 0;
  std::int64_t classes = 0;  // of the whole vocabulary, padding excluded
  double temperature = 1;    // read from its pointer, if it has one
  bool temperature_on_logprob = false;
  Labels labels;
  RowInput token_weights;
  RowInput class_weights;
  RowInput loss_grad;
  RowInput logp_grad, lse_grad, entropy_grad;
  RowInput old_logp, ref_logp, sampler_logp, advantages;
  Sequences sequences;
  tileloss_vector metrics{};     // absent in a backward
  std::byte* scratch = nullptr;  // RowStage::scratch_bytes() of them, aligned to 64

  template <class Options>
  const Options& options_as() const {
    return *static_cast<const Options*>(options);
  }
};

// What every options struct starts with.
struct CommonOptions {
  std::size_t struct_size;
  tileloss_logit_options logit;
};

struct LossInfo {
  const char* name;
  bool is_loss;  // false: row outputs only, upstream gradients per row
  std::size_t options_size;
  std::span<const tileloss_field> fields;  // what follows the CommonOptions
  std::uint32_t inputs;                    // LossInputs
  std::unique_ptr<RowStage> (*make)(const LossContext& context);
  // Checks that concern more than one option or tensor; empty: fine. May be null.
  std::string (*check)(const LossContext& context);
  // The same for numbers behind pointers, which only the call may read. May be null.
  std::string (*check_numbers)(const void* options) = nullptr;
  // Whether the output is one loss per row rather than the sum of what `row` returns; null: the sum.
  bool (*is_per_row)(const void* options);
  // "a|b|c": names that set_preset knows, and what `metrics` holds. Null: none.
  const char* presets = nullptr;
  void (*set_preset)(std::string_view name, void* options) = nullptr;
  const char* metrics = nullptr;
};

// A number read where the caller keeps it.
inline double scalar_value(const tileloss_scalar& s) { return s.pointer != nullptr ? static_cast<double>(*s.pointer) : s.value; }

// Whether it can be other than `off`: only the call knows what a pointer points to.
inline bool may_differ(const tileloss_scalar& s, double off) { return s.pointer != nullptr || s.value != off; }

// For numbers whose NaN means "not given".
inline bool is_given(const tileloss_scalar& s) { return s.pointer != nullptr || !std::isnan(s.value); }

inline constexpr double kNotGiven = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kUnbounded = std::numeric_limits<double>::max();

// ------------------------------------------------------------------------------------------------------------- fields

constexpr tileloss_field double_field(const char* name, std::size_t offset, double value, double minimum, double maximum) {
  return {name, TILELOSS_FIELD_DOUBLE, 0, offset, value, minimum, maximum, 0, 0, nullptr};
}
constexpr tileloss_field optional_field(const char* name, std::size_t offset, double minimum, bool exclusive) {
  return {name, TILELOSS_FIELD_DOUBLE, 0, offset, kNotGiven, minimum, kUnbounded, exclusive ? 1 : 0, 1, nullptr};
}
constexpr tileloss_field int64_field(const char* name, std::size_t offset, double value, double minimum, bool has_absent) {
  return {name, TILELOSS_FIELD_INT64, 0, offset, value, minimum, 0x1p62, 0, has_absent ? 1 : 0, nullptr};
}
constexpr tileloss_field scalar_field(const char* name, std::size_t offset, double value, double minimum, bool exclusive) {
  return {name, TILELOSS_FIELD_SCALAR, 0, offset, value, minimum, kUnbounded, exclusive ? 1 : 0, value != value ? 1 : 0, nullptr};
}
constexpr tileloss_field choice_field(const char* name, std::size_t offset, int value, int count, const char* choices) {
  return {name, TILELOSS_FIELD_CHOICE, 0, offset, static_cast<double>(value), 0, count - 1.0, 0, 0, choices};
}

}  // namespace tileloss

#endif  // TILELOSS_LOSSES_LOSS_H_
