#include "judge/gates/linear_metric.h"

#include <algorithm>
#include <cmath>
#include <mutex>

namespace tileloss::tools {
namespace {

using oracle::GradientRow;
using oracle::LinearOperands;
using oracle::NumberFormat;
using oracle::SoftmaxRow;
using oracle::StoredMatrix;

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

std::size_t index(LinearOutput output) { return static_cast<std::size_t>(output); }

double square(double x) { return x * x; }

// A softcap's slope moves with x as well: its relative change is at most twice that of z.
double sensitivity(const SoftmaxRow& softmax, std::int64_t column) {
  const double slope = std::fabs(softmax.dz_dx(column));
  return softmax.slopes().empty() ? slope : slope + 2 * std::fabs(softmax.transform().logit_scale) / softmax.transform().softcap;
}

double round_to(NumberFormat format, double value) {
  // The same, at a tenth of the time: a head's gradient has 233 million elements.
  if (format == NumberFormat::kFloat32) return static_cast<double>(static_cast<float>(value));
  return decode(format, encode(format, value));
}

}  // namespace

// -------------------------------------------------------------------------------------------------- the oracle over a case

LinearOracleCase::LinearOracleCase(const LinearOperands& operands, const LinearNorms& norms,
                                   const oracle::LinearGradients::NeedsGrad& needs_grad)
    : operands_(operands), norms_(norms), gradients_(operands, needs_grad) {
  for (std::size_t which = 0; which < bounds_.size(); ++which) {
    const bool is_token = is_by_token(static_cast<LinearOutput>(which));
    if (needs_grad[which]) bounds_[which].resize(index(is_token ? operands.rows : operands.vocab));
  }
}

void LinearOracleCase::add_row(const LogitsRow& row, const SoftmaxRow& softmax, const GradientRow& gradient) {
  ++rows_added_;
  block_rows_.push_back(row.row);
  block_.insert(block_.end(), gradient.gradient.begin(), gradient.gradient.end());
  const double of_row = 0x1p-21 + 2 * mean_error(softmax, row);
  const double length = norms_.hidden[index(row.row)];
  const LinearNorms* low_rank = norms_.low_rank.get();
  const bool transformed = !softmax.transform().is_identity();
  const auto add = [&](LinearOutput which, std::int64_t at, double dlogit, double error, double common, double size) {
    if (bounds_[index(which)].empty()) return;
    Bound& bound = bounds_[index(which)][index(at)];
    const double term = square(dlogit * size);
    bound.square += square(dlogit);
    bound.absolute += std::fabs(dlogit);
    bound.weighted += term;
    bound.independent_sq += square(error * size);
    bound.common += common * size;
    spreads_[index(which)].add(term);
  };
  for (std::int64_t j = 0; j < softmax.vocab(); ++j) {
    if (!softmax.is_allowed(j)) continue;  // exactly 0
    const double dlogit = gradient.gradient[index(j)], magnitude = gradient.magnitude[index(j)];
    const double z = softmax.logits_z()[index(j)];
    const double distance = magnitude > 0 ? softmax.max() - z : 0;
    const double more = transformed && magnitude > 0 ? 2 * std::max(std::fabs(z), std::fabs(softmax.max())) : 0;
    const double error = magnitude * (0x1p-24 * (8 + 2 * distance + more) + sensitivity(softmax, j) * row.errors[index(j)]) +
                         0x1p-126 * std::max(1.0, gradient.scale);
    const double common = of_row * magnitude + (gradient.blur.empty() ? 0.0 : gradient.blur[index(j)]);
    add(LinearOutput::kDhidden, row.row, dlogit, error, common, norms_.head[index(j)]);
    add(LinearOutput::kDhead, j, dlogit, error, common, length);
    add(LinearOutput::kDbias, j, dlogit, error, common, 1);
    if (low_rank == nullptr) continue;
    add(LinearOutput::kDhiddenR, row.row, dlogit, error, common, low_rank->head[index(j)]);
    add(LinearOutput::kDheadR, j, dlogit, error, common, low_rank->hidden[index(row.row)]);
  }
  if (block_rows_.size() == kBlockRows) flush();
}

void LinearOracleCase::finish() { flush(); }

void LinearOracleCase::flush() {
  if (!block_rows_.empty()) gradients_.add(block_rows_, block_);
  block_rows_.clear();
  block_.clear();
}

// ----------------------------------------------------------------------------------------------------------- judgement

// What is judged, and by what.
struct LinearOracleCase::Target {
  const char* name;
  std::span<const double> reference;
  std::span<const float> ideal_error;
  std::span<const Bound> bounds;
  Spread spread;
  double terms;         // of each sum
  double operand_size;  // the longest row of the operand; 0: there is none, and errors of one sign add up
  const StoredMatrix& output;
  const StoredMatrix& before;
};

struct LinearOracleCase::Verdict {
  double error_sq = 0, ideal_sq = 0, float32_sq = 0;
  Spread stored;
  double cap = 0;
  std::int64_t nonfinite = 0, nonzero = 0;

  void merge(const Verdict& other) {
    error_sq += other.error_sq;
    ideal_sq += other.ideal_sq;
    float32_sq += other.float32_sq;
    stored.merge(other.stored);
    cap = std::max(cap, other.cap);
    nonfinite += other.nonfinite;
    nonzero += other.nonzero;
  }
};

void LinearOracleCase::Spread::add(double term) {
  first += term;
  second += square(term);
}

void LinearOracleCase::Spread::merge(const Spread& other) {
  first += other.first;
  second += other.second;
}

// n = first^2 / second terms of equal size have this spread; 4 / sqrt(n) * first is 4 * sqrt(second).
double LinearOracleCase::Spread::scatter(double unit) const {
  const bool is_few = square(first) < 64 * second;
  return is_few ? 4 * std::sqrt(second) * square(unit) / 3 : 0;
}

double LinearOracleCase::unit() const { return operands_.compute == NumberFormat::kFloat32 ? 0x1p-24 : 0x1p-8; }

double LinearOracleCase::share_of_float32(const Bound& bound, double terms, double size) const {
  return std::sqrt(bound.independent_sq) + bound.common + 0x1p-24 * std::sqrt(terms) * (std::sqrt(bound.weighted) + size);
}

void LinearOracleCase::judge_row(const Target& target, std::int64_t row, Verdict& verdict) const {
  const StoredMatrix& output = target.output;
  const bool is_padding = row >= static_cast<std::int64_t>(target.bounds.size());
  const auto& info = format_info(output.format);
  double error_sq = 0, ideal_sq = 0, reference_sq = 0, stored_sq = 0;
  for (std::int64_t h = 0; h < output.cols; ++h) {
    const double before = target.before.data != nullptr ? target.before.at(row, h) : 0;
    const double value = output.at(row, h);
    const double reference = is_padding ? 0 : target.reference[index(row * output.cols + h)];
    // Rows without a dlogit: exactly what was there.
    if (is_padding || target.bounds[index(row)].independent_sq == 0) {
      if (!(value == before)) ++verdict.nonzero;
      continue;
    }
    const double expected = before + reference;
    if (!std::isfinite(value) || !std::isfinite(expected)) {
      if (std::isfinite(value) != std::isfinite(expected)) ++verdict.nonfinite;
      continue;
    }
    const double ideal = round_to(output.format, expected + target.ideal_error[index(row * output.cols + h)]);
    error_sq += square(value - expected);
    ideal_sq += square(ideal - expected);
    reference_sq += square(reference);
    const double stored = square(std::max(std::fabs(expected), info.smallest_normal));
    stored_sq += stored;
    verdict.stored.add(stored);
  }
  if (reference_sq == 0 && error_sq == 0) return;  // nothing that is finite, or nothing at all
  const Bound& bound = target.bounds[index(row)];
  const double float32 = share_of_float32(bound, target.terms, std::sqrt(reference_sq));
  const double stored = std::ldexp(std::sqrt(stored_sq), -info.mantissa_bits - 1);
  const double scattered = kCap * unit() * std::sqrt(bound.square) * target.operand_size,
               alike = unit() * std::sqrt(reference_sq);
  const double rounding = target.operand_size > 0 ? scattered + alike : unit() * bound.absolute;
  const double cap = std::max(rounding, kIdealFactor * std::sqrt(ideal_sq)) + float32 + stored;
  verdict.error_sq += error_sq;
  verdict.ideal_sq += ideal_sq;
  verdict.float32_sq += square(float32);
  if (error_sq > 0) verdict.cap = std::max(verdict.cap, std::sqrt(error_sq) / cap);
}

std::vector<Gate> LinearOracleCase::judge_rows(const Target& target, std::int64_t first, std::int64_t end) const {
  Verdict verdict;
  std::mutex mutex;
  oracle::split_work(operands_.threads, end - first, 1, [&](std::int64_t part_begin, std::int64_t part_end) {
    Verdict part;
    for (std::int64_t row = first + part_begin; row < first + part_end; ++row) judge_row(target, row, part);
    const std::lock_guard lock(mutex);
    verdict.merge(part);
  });
  const std::string name = target.name;
  const double unit_of_store = std::ldexp(1.0, -format_info(target.output.format).mantissa_bits - 1);
  const double scatter = target.spread.scatter(unit()) + verdict.stored.scatter(unit_of_store);
  const double allowed = std::max(std::sqrt(verdict.ideal_sq + scatter), std::sqrt(verdict.float32_sq) / kIdealFactor);
  const double ratio = verdict.error_sq > 0 ? std::sqrt(verdict.error_sq) / allowed : 0;
  return {make_gate(name + "/frobenius", ratio, kIdealFactor), make_gate(name + "/cap", verdict.cap, 1),
          make_gate(name + "/nonfinite", static_cast<double>(verdict.nonfinite), 0),
          make_gate(name + "/nonzero_where_ignored", static_cast<double>(verdict.nonzero), 0)};
}

LinearOracleCase::Target LinearOracleCase::target(LinearOutput which, const StoredMatrix& output,
                                                  const StoredMatrix& before) const {
  const LinearNorms& norms = is_low_rank(which) ? *norms_.low_rank : norms_;
  const bool is_dbias = which == LinearOutput::kDbias, is_token = is_by_token(which);
  return {.name = name_of(which),
          .reference = gradients_.gradient(which),
          .ideal_error = gradients_.ideal_error(which),
          .bounds = bounds_[index(which)],
          .spread = spreads_[index(which)],
          .terms = static_cast<double>(is_token ? operands_.vocab : rows_added_),
          .operand_size = is_dbias   ? 0
                          : is_token ? norms.max_head
                                     : norms.max_hidden,
          .output = output,
          .before = before};
}

std::vector<Gate> LinearOracleCase::judge(LinearOutput which, const StoredMatrix& output, const StoredMatrix& before) const {
  return judge_rows(target(which, output, before), 0, output.rows);
}

std::vector<Gate> LinearOracleCase::judge_token(LinearOutput which, const StoredMatrix& output, std::int64_t row) const {
  const StoredMatrix none;
  return judge_rows(target(which, output, none), row, row + 1);
}

}  // namespace tileloss::tools
