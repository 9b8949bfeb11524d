#include "judge/gates/error_metric.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

namespace tileloss::tools {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kFloat32Ulps = 4.0;
constexpr double kFloat32HalfUlp = 0x1p-24;  // relative
constexpr double kRowFloor = 0x1p-48;        // of the row's largest |g_ref|
constexpr double kFloat32SmallestNormal = 0x1p-126;
constexpr double kSmallestExp = 0x1.6a09e667f3bcdp-126;  // 2^-125.5
constexpr double kOutputRelative = 0x1p-18;
constexpr std::int64_t kBlock = 256;  // its working arrays stay in L1

// 2^floor(log2 |x|), 0 for 0 and subnormal doubles.
double binade(double x) { return std::bit_cast<double>(std::bit_cast<std::uint64_t>(x) & 0x7ff0000000000000ULL); }

double ratio(double error, double size) {
  if (error == 0.0) return 0.0;
  return size > 0.0 ? error / size : kInfinity;
}

void keep_larger(Worst& worst, double value, Location at) {
  if (value > worst.value || worst.at.row < 0) worst = {value, at};
}

void merge_worst(Worst& into, const Worst& from) {
  if (from.at.row >= 0) keep_larger(into, from.value, from.at);
}

// Whether `output` is what a non-finite reference, or one beyond the format's range, asks for.
enum class Match { kCompare, kSame, kMismatch };
Match match_nonfinite(double output, double reference, double overflow) {
  if (std::isnan(reference)) return std::isnan(output) ? Match::kSame : Match::kMismatch;
  if (std::fabs(reference) >= overflow) {
    return std::isinf(output) && std::signbit(output) == std::signbit(reference) ? Match::kSame : Match::kMismatch;
  }
  return std::isfinite(output) ? Match::kCompare : Match::kMismatch;
}

struct ElementScales {
  double ulp = 0.0;
  double tight = 0.0;  // half an ULP for the rounding plus float32's budget
  double allowed = 0.0;
  double floor = 0.0;
};

struct FormatScales {
  double ulp_factor = 0.0;
  double smallest_step = 0.0;
  double rounding = 0.0;  // half an ULP; 0 for float32, whose budget holds it
};

FormatScales format_scales(oracle::NumberFormat format) {
  const oracle::FormatInfo& info = oracle::format_info(format);
  return {std::ldexp(1.0, -info.mantissa_bits), info.smallest_step, format == oracle::NumberFormat::kFloat32 ? 0.0 : 0.5};
}

// float32's budget in ULP for a column `distance` below the maximum. Further down than the smallest exp that is not 0, -inf say,
// counts no more than that.
inline double float32_budget(double distance, const RowReference& reference) {
  distance = std::min(distance, kExpRange);
  const double plain = kFloat32Ulps + distance;
  if (!reference.transformed) return plain;
  return plain + std::max(std::fabs(reference.max - distance), std::fabs(reference.max));
}

inline ElementScales element_scales(const FormatScales& format, double reference, double magnitude, double context,
                                    double row_floor) {
  ElementScales scales;
  const double power = binade(reference);
  scales.ulp = std::max(power * format.ulp_factor, format.smallest_step);
  const double rounding = format.rounding * scales.ulp;
  const double arithmetic = context * std::max(power * 0x1p-23, 0x1p-149);
  scales.tight = rounding + arithmetic;
  const double cancelled = std::max(magnitude - std::fabs(reference), 0.0);
  scales.floor = context * kFloat32HalfUlp * cancelled + row_floor;
  scales.allowed = rounding + std::max(rounding, arithmetic) + scales.floor;
  return scales;
}

// Of the row's finite components.
double largest_of(const RowReference& reference) {
  double largest = 0.0;
  for (const double value : reference.gradient) {
    if (std::fabs(value) > largest && std::fabs(value) < kInfinity) largest = std::fabs(value);
  }
  return largest;
}

double row_floor(const RowReference& reference) {
  return kRowFloor * largest_of(reference) + kSmallestExp * std::max(1.0, reference.scale);
}

// `others_budget`: at the target the budget of the others, elsewhere 0.
inline ElementScales scales_at(const FormatScales& format, const RowReference& reference, std::size_t j, double others_budget,
                               double floor) {
  const double context = std::max(float32_budget(reference.max - reference.z[j], reference), others_budget);
  const double blur = reference.blur.empty() ? 0.0 : reference.blur[j];
  return element_scales(format, reference.gradient[j], reference.magnitude[j], context, floor + blur);
}

}  // namespace

Gate make_gate(std::string name, double value, double limit) { return {std::move(name), limit, value, value <= limit}; }

bool all_pass(std::span<const Gate> gates) {
  return std::all_of(gates.begin(), gates.end(), [](const Gate& gate) { return gate.pass; });
}

double allowed_error(oracle::NumberFormat format, const RowReference& reference, std::int64_t column) {
  const double others_budget = column == reference.target ? float32_budget(reference.others_distance, reference) : 0.0;
  return scales_at(format_scales(format), reference, static_cast<std::size_t>(column), others_budget, row_floor(reference))
      .allowed;
}

// ------------------------------------------------------------------------------------------------------------ gradients

void GradientMetric::add_mismatch(std::int64_t row, std::int64_t column) {
  if (nonfinite_mismatches_++ == 0) first_nonfinite_ = {row, column};
}

void GradientMetric::add_range(std::int64_t row, const void* output, std::int64_t begin, std::int64_t end,
                               const RowReference& reference, const RowLimits& limits, bool on_target, RowSums& sums) {
  const oracle::FormatInfo& info = oracle::format_info(format_);
  const FormatScales format = format_scales(format_);
  const double others_budget = begin == reference.target ? float32_budget(reference.others_distance, reference) : 0.0;
  Worst& worst_ulp = on_target ? ulp_target_ : ulp_off_target_;
  Worst& worst_budget = on_target ? budget_target_ : budget_off_target_;
  std::array<double, kBlock> values, used, ulps, errors, relative;
  for (std::int64_t start = begin; start < end; start += kBlock) {
    const auto count = static_cast<std::size_t>(std::min(kBlock, end - start));
    const auto first = static_cast<std::size_t>(start);
    oracle::decode_row(format_, static_cast<const char*>(output) + first * info.bytes, std::span(values.data(), count));
    RowSums block;
    for (std::size_t k = 0; k < count; ++k) {
      const std::size_t j = first + k;
      const double expected = reference.gradient[j];
      used[k] = ulps[k] = errors[k] = relative[k] = 0.0;
      if (!reference.allowed.empty() && reference.allowed[j] == 0) continue;
      const bool plain = std::fabs(values[k]) < kInfinity && std::fabs(expected) < info.overflow;
      if (!plain) {
        const Match match = match_nonfinite(values[k], expected, info.overflow);
        if (match == Match::kMismatch) add_mismatch(row, static_cast<std::int64_t>(j));
        if (match != Match::kCompare) continue;
      }
      const ElementScales scales = scales_at(format, reference, j, others_budget, limits.floor);
      const double error = std::fabs(values[k] - expected);
      errors[k] = error;
      used[k] = error / scales.allowed;
      ulps[k] = std::max(error - scales.floor, 0.0) / scales.ulp;
      relative[k] = error / std::max(std::fabs(expected), limits.relative_floor);
      block.error_sq += error * error;
      block.reference_sq += expected * expected;
      const double budget = scales.tight + scales.floor;
      block.budget_sq += budget * budget;
      block.abs_error += error;
      block.zeros += std::fabs(expected) <= 0.5 * format.smallest_step ? 1 : 0;
    }
    sums.error_sq += block.error_sq;
    sums.reference_sq += block.reference_sq;
    sums.budget_sq += block.budget_sq;
    sums.abs_error += block.abs_error;
    sums.zeros += block.zeros;
    const auto keep = [&](const std::array<double, kBlock>& figures, Worst& worst) {
      const auto largest = std::max_element(figures.begin(), figures.begin() + static_cast<std::ptrdiff_t>(count));
      keep_larger(worst, *largest, {row, start + (largest - figures.begin())});
    };
    keep(used, worst_budget);
    keep(ulps, worst_ulp);
    keep(errors, max_abs_);
    keep(relative, max_rel_);
  }
}

void GradientMetric::add_row(std::int64_t row, const void* output, std::int64_t cols, const RowReference& reference) {
  const auto valid = static_cast<std::int64_t>(reference.gradient.size());
  const double smallest_normal = oracle::format_info(format_).smallest_normal;
  const RowLimits limits{row_floor(reference), std::max(kFloat32HalfUlp * largest_of(reference), smallest_normal)};
  RowSums target, off_target;
  std::int64_t next = 0;
  for (const std::int64_t label : reference.labels.empty() ? std::span(&reference.target, 1) : reference.labels) {
    add_range(row, output, next, label, reference, limits, false, off_target);
    add_range(row, output, label, label + 1, reference, limits, true, target);
    next = label + 1;
  }
  add_range(row, output, next, valid, reference, limits, false, off_target);
  std::int64_t columns = valid;
  for (std::int64_t j = 0; j < std::ssize(reference.allowed); ++j) {
    if (reference.allowed[static_cast<std::size_t>(j)] != 0) continue;
    --columns;
    count_nonzero(row, output, j, j + 1);
  }
  finish_row(row, columns, target, off_target);
  count_nonzero(row, output, valid, cols);
}

void GradientMetric::finish_row(std::int64_t row, std::int64_t columns, const RowSums& target, const RowSums& off_target) {
  const double error_sq = target.error_sq + off_target.error_sq;
  const double reference_sq = target.reference_sq + off_target.reference_sq;
  const double budget_sq = target.budget_sq + off_target.budget_sq;
  keep_larger(normwise_, ratio(std::sqrt(error_sq), std::sqrt(reference_sq)), {row, -1});
  keep_larger(normwise_budget_, ratio(std::sqrt(error_sq), std::sqrt(budget_sq)), {row, -1});
  keep_larger(normwise_budget_, ratio(std::sqrt(off_target.error_sq), std::sqrt(off_target.budget_sq)), {row, -1});
  abs_error_ += target.abs_error + off_target.abs_error;
  elements_ += columns;
  zeros_ += target.zeros + off_target.zeros;
}

void GradientMetric::count_nonzero(std::int64_t row, const void* output, std::int64_t begin, std::int64_t end) {
  for (std::int64_t j = begin; j < end; ++j) {
    if (oracle::decode_at(format_, output, j) == 0.0) continue;
    if (nonzero_ignored_++ == 0) first_nonzero_ = {row, j};
  }
}

void GradientMetric::add_ignored_row(std::int64_t row, const void* output, std::int64_t cols) {
  count_nonzero(row, output, 0, cols);
}

void GradientMetric::merge(const GradientMetric& other) {
  merge_worst(ulp_target_, other.ulp_target_);
  merge_worst(ulp_off_target_, other.ulp_off_target_);
  merge_worst(budget_target_, other.budget_target_);
  merge_worst(budget_off_target_, other.budget_off_target_);
  merge_worst(normwise_, other.normwise_);
  merge_worst(normwise_budget_, other.normwise_budget_);
  merge_worst(max_abs_, other.max_abs_);
  merge_worst(max_rel_, other.max_rel_);
  abs_error_ += other.abs_error_;
  elements_ += other.elements_;
  zeros_ += other.zeros_;
  if (nonfinite_mismatches_ == 0) first_nonfinite_ = other.first_nonfinite_;
  if (nonzero_ignored_ == 0) first_nonzero_ = other.first_nonzero_;
  nonfinite_mismatches_ += other.nonfinite_mismatches_;
  nonzero_ignored_ += other.nonzero_ignored_;
}

double GradientMetric::mean_abs() const { return elements_ == 0 ? 0.0 : abs_error_ / static_cast<double>(elements_); }

double GradientMetric::zero_fraction() const {
  return elements_ == 0 ? 1.0 : static_cast<double>(zeros_) / static_cast<double>(elements_);
}

bool GradientMetric::mistrusted() const { return zero_fraction() > 0.5; }

std::vector<Gate> GradientMetric::gates(const GradientTolerances& tolerances) const {
  std::vector<Gate> gates;
  gates.push_back(make_gate("dlogits/ulp_target", budget_target_.value, tolerances.ulp));
  gates.push_back(make_gate("dlogits/ulp_off_target", budget_off_target_.value, tolerances.ulp));
  gates.push_back(make_gate("dlogits/normwise", normwise_budget_.value, tolerances.normwise));
  gates.push_back(make_gate("dlogits/nonfinite", static_cast<double>(nonfinite_mismatches_), 0.0));
  gates.push_back(make_gate("dlogits/nonzero_where_ignored", static_cast<double>(nonzero_ignored_), 0.0));
  if (std::isfinite(tolerances.max_abs)) gates.push_back(make_gate("dlogits_max_abs", max_abs_.value, tolerances.max_abs));
  if (std::isfinite(tolerances.max_rel)) gates.push_back(make_gate("dlogits_max_rel", max_rel_.value, tolerances.max_rel));
  return gates;
}

// -------------------------------------------------------------------------------------------------------------- outputs

double allowed_output_error(double reference, double magnitude) {
  return kOutputRelative * std::fabs(reference) + magnitude / kMagnitudeOfError + kFloat32SmallestNormal;
}

void OutputMetric::add(std::int64_t row, double output, double reference, double magnitude) {
  ++count_;
  const Match match =
      is_exact_ ? (output == reference ? Match::kSame : Match::kMismatch) : match_nonfinite(output, reference, kInfinity);
  if (match == Match::kMismatch) ++mismatches_;
  if (match != Match::kCompare) return;
  const double error = std::fabs(output - reference);
  keep_larger(budget_, error / allowed_output_error(reference, magnitude), {row, -1});
  keep_larger(max_abs_, error, {row, -1});
}

void OutputMetric::merge(const OutputMetric& other) {
  merge_worst(budget_, other.budget_);
  merge_worst(max_abs_, other.max_abs_);
  mismatches_ += other.mismatches_;
  count_ += other.count_;
}

std::vector<Gate> OutputMetric::gates(double max_abs_limit) const {
  const auto mismatches = static_cast<double>(mismatches_);
  if (is_exact_) return {make_gate(name_, mismatches, 0.0)};
  std::vector<Gate> gates;
  gates.push_back(make_gate(name_, budget_.value, 1.0));
  if (std::isfinite(max_abs_limit)) gates.push_back(make_gate(name_ + "/max_abs", max_abs_.value, max_abs_limit));
  gates.push_back(make_gate(name_ + "/nonfinite", mismatches, 0.0));
  return gates;
}

double bits_of(double value) { return std::bit_cast<std::int32_t>(static_cast<float>(value)); }

}  // namespace tileloss::tools
