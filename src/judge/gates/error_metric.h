// The error metric: the one judgement of a kernel's gradients and row outputs against the double-precision oracle.
//
// A gradient component g with reference g_ref is allowed this error, in the row's own terms (nothing here is a global constant):
//
//   allowed = budget * ulp(g_ref) + floor
//   budget     float32: 4 + |z - m|: float32's subtraction z - m costs that much. With a transform max(|z|, |m|) more: z and m
//              are then rounded themselves, and where the maximum holds the mass its error is in every other column. At the
//              target, whose 1 - p is made of the others, their mean |z - m| (weighted by p) counts, if larger than its own.
//              bfloat16, float16: 1 = half for the one rounding and half for float32 arithmetic; where float32's own budget
//              exceeds that half (common offsets of 1e4 under a transform), 0.5 + float32's budget.
//   ulp(g_ref) a unit in the last place of the output type at the reference value; below the smallest normal number of the
//              type its fixed step: an absolute comparison.
//   floor      float32's budget * 2^-24 (sum of |terms| - |g_ref|): what cancellation between a component's terms costs in
//              float32 (label smoothing, entropy, z-loss; 0 for plain cross-entropy)
//              + what the error of a row's coefficients brings, where they depend on float32 results (policy losses: rho)
//              + 2^-48 max_row |g_ref|: components this far below the row's largest move nothing
//              + 2^-125.5 max(1, scale): results below float32's smallest normal number may be flushed to zero, and so may exps,
//              which are relative to the whole number of bits next to the row's maximum.
//
// The labels of a row with several are on target, each column once, by gate and by norm; the target, whose 1 - p is made of the
// others, is the likeliest.
//
// Columns outside a row's set are held to exactly 0, as ignored rows and padding are, and count nowhere else.
//
// A row's normwise error, of all columns and of those off target (the target's weighs more than all others together), is held
// against the norm of the same budgets with the slack taken out (half an ULP for the rounding plus float32 arithmetic): a store
// that truncates keeps every component under one ULP, and fails here.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "judge/oracles/row_outputs.h"
#include "judge/oracles/row_reference.h"
#include "oracle/number_formats.h"

namespace tileloss::tools {

// A verdict: passes iff value <= limit (a NaN value fails).
struct Gate {
  std::string name;
  double limit = 0.0;
  double value = 0.0;
  bool pass = false;
};

Gate make_gate(std::string name, double value, double limit);
bool all_pass(std::span<const Gate> gates);

struct Location {
  std::int64_t row = -1;
  std::int64_t column = -1;
};

struct Worst {
  double value = 0.0;
  Location at;
};

// What the error of `gradient[column]` may be, in an output of the format.
double allowed_error(oracle::NumberFormat format, const RowReference& reference, std::int64_t column);

// Limits of GradientMetric::gates(). Infinity: the figure is reported but not judged.
struct GradientTolerances {
  double ulp = 1.0;       // multiples of the budgets above (one ULP for bfloat16 and float16)
  double normwise = 1.0;  // multiples of the row's budget norm
  double max_abs = std::numeric_limits<double>::infinity();
  double max_rel = std::numeric_limits<double>::infinity();
};

// Accumulates over rows, in any order. To use several threads give each its own and merge.
class GradientMetric {
 public:
  explicit GradientMetric(oracle::NumberFormat format) : format_(format) {}

  // `output`: the kernel's row, `cols` elements of the format as they lie in memory. Columns from reference.gradient.size() on
  // are padding and must be exactly 0.
  void add_row(std::int64_t row, const void* output, std::int64_t cols, const RowReference& reference);
  // A row whose label is ignore_index: every element must be exactly 0.
  void add_ignored_row(std::int64_t row, const void* output, std::int64_t cols);
  void merge(const GradientMetric& other);

  oracle::NumberFormat format() const { return format_; }

  // In ULP of the output type, beyond the floor.
  Worst worst_ulp_target() const { return ulp_target_; }
  Worst worst_ulp_off_target() const { return ulp_off_target_; }
  // In multiples of what is allowed: the gated figures.
  Worst worst_budget_off_target() const { return budget_off_target_; }
  // ||g - g_ref|| / ||g_ref|| of the worst row.
  Worst worst_normwise() const { return normwise_; }
  Worst max_abs() const { return max_abs_; }  // dlogits_max_abs
  // |g - g_ref| / |g_ref|, with |g_ref| taken as no less than 2^-24 of the row's largest and the smallest normal number.
  Worst max_rel() const { return max_rel_; }
  double mean_abs() const;  // over all valid elements of used rows
  // Not finite where the oracle is finite, or the other way round, or another infinity; and the first place it happened.
  std::int64_t nonfinite_mismatches() const { return nonfinite_mismatches_; }
  Location first_nonfinite_mismatch() const { return first_nonfinite_; }
  // Elements of ignored rows, of padding and of columns outside a row's set that are not 0.
  std::int64_t nonzero_where_ignored() const { return nonzero_ignored_; }
  Location first_nonzero_where_ignored() const { return first_nonzero_; }
  std::int64_t elements() const { return elements_; }
  // Not a gate, for the caller to report: more than half of the reference gradient rounds to zero in the output type (or there
  // was none): a pass says little.
  bool mistrusted() const;
  double zero_fraction() const;

  std::vector<Gate> gates(const GradientTolerances& tolerances = {}) const;

 private:
  struct RowSums {
    double error_sq = 0.0, reference_sq = 0.0, budget_sq = 0.0, abs_error = 0.0;
    std::int64_t zeros = 0;
  };
  struct RowLimits {
    double floor = 0.0, relative_floor = 0.0;
  };
  void add_range(std::int64_t row, const void* output, std::int64_t begin, std::int64_t end, const RowReference& reference,
                 const RowLimits& limits, bool on_target, RowSums& sums);
  void add_mismatch(std::int64_t row, std::int64_t column);
  void finish_row(std::int64_t row, std::int64_t columns, const RowSums& target, const RowSums& off_target);
  void count_nonzero(std::int64_t row, const void* output, std::int64_t begin, std::int64_t end);

  oracle::NumberFormat format_;
  Worst ulp_target_, ulp_off_target_, budget_target_, budget_off_target_, normwise_, normwise_budget_, max_abs_, max_rel_;
  double abs_error_ = 0.0;
  std::int64_t elements_ = 0, zeros_ = 0, nonfinite_mismatches_ = 0, nonzero_ignored_ = 0;
  Location first_nonfinite_, first_nonzero_;
};

// What the error of a row output or loss may be, as OutputMetric has it.
double allowed_output_error(double reference, double magnitude);

// Row outputs and losses. Float32 ones are judged relative to the reference, with an absolute floor near zero:
//   allowed = 2^-18 |ref| + 2^-22 magnitude
// `magnitude` is the size of the terms that cancel in `ref` (0: none do). Exact ones, as argmax, must be equal.
class OutputMetric {
 public:
  explicit OutputMetric(std::string name, bool is_exact = false) : name_(std::move(name)), is_exact_(is_exact) {}
  explicit OutputMetric(const RowOutput& output) : OutputMetric(output.name, output.is_exact()) {}

  void add(std::int64_t row, double output, double reference, double magnitude = 0.0);
  void merge(const OutputMetric& other);

  const std::string& name() const { return name_; }
  bool is_exact() const { return is_exact_; }
  Worst max_abs() const { return max_abs_; }  // unless it is exact
  // Not finite where the reference is finite, or the other way round, or another infinity; of an exact one all that differ.
  std::int64_t mismatches() const { return mismatches_; }
  std::int64_t count() const { return count_; }

  // "<name>", value in multiples of what is allowed, limit 1; "<name>/max_abs" too if `max_abs_limit` is finite;
  // "<name>/nonfinite", limit 0. Of an exact one "<name>" alone, the mismatches, limit 0.
  std::vector<Gate> gates(double max_abs_limit = std::numeric_limits<double>::infinity()) const;

 private:
  std::string name_;
  bool is_exact_;
  Worst budget_, max_abs_;
  std::int64_t mismatches_ = 0, count_ = 0;
};

// Of a float32 value, for an exact metric: NaN is NaN, and -0 is not 0.
double bits_of(double value);

}  // namespace tileloss::tools
