#include "check/linear_metric.h"

#include <algorithm>
#include <cmath>
#include <mutex>

namespace tileloss::tools {
namespace {

using reference::GradientRow;
using reference::LinearOperands;
using reference::NumberFormat;
using reference::SoftmaxRow;
using reference::StoredMatrix;

constexpr std::size_t kBlockRows = 64;

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

double square(double x) { return x * x; }

std::vector<double> row_norms(std::span<const float> values, std::int64_t width) {
  std::vector<double> norms;
  for (std::size_t begin = 0; begin < values.size(); begin += index(width)) {
    double sum = 0;
    for (const float value : values.subspan(begin, index(width))) sum += square(value);
    norms.push_back(std::sqrt(sum));
  }
  return norms;
}

double largest(std::span<const double> values) {
  double result = 0;
  for (const double value : values) result = std::max(result, std::fabs(value));
  return result;
}

// A softcap's slope moves with x as well: its relative change is at most twice that of z.
double sensitivity(const SoftmaxRow& softmax, std::int64_t column) {
  const double slope = std::fabs(softmax.dz_dx(column));
  return softmax.slopes().empty() ? slope : slope + 2 * std::fabs(softmax.transform().logit_scale) / softmax.transform().softcap;
}

double mean_error(const SoftmaxRow& softmax, const LinearRow& row) {
  double mean = 0;
  for (std::int64_t j = 0; j < softmax.vocab(); ++j) mean += softmax.p(j) * std::fabs(softmax.dz_dx(j)) * row.errors[index(j)];
  return mean;
}

double round_to(NumberFormat format, double value) {
  // The same, at a tenth of the time: a head's gradient has 233 million elements.
  if (format == NumberFormat::kFloat32) return static_cast<double>(static_cast<float>(value));
  return decode(format, encode(format, value));
}

}  // namespace

LinearNorms::LinearNorms(const LinearOperands& o)
    : hidden(row_norms(o.hidden_values, o.hidden)),
      head(row_norms(o.head_values, o.hidden)),
      max_hidden(largest(hidden)),
      max_head(largest(head)),
      max_bias(largest(o.bias)) {}

void for_each_linear_row(const LinearOperands& o, const LinearNorms& norms, std::span<const std::int64_t> rows,
                         const std::function<void(const LinearRow&)>& work) {
  const double terms = std::sqrt(static_cast<double>(o.hidden));
  std::vector<double> logits, spread, errors(index(o.vocab));
  for (std::size_t begin = 0; begin < rows.size(); begin += kBlockRows) {
    const auto block = rows.subspan(begin, std::min(kBlockRows, rows.size() - begin));
    logits.resize(block.size() * index(o.vocab));
    linear_logits(o, block, logits);
    // Another product, as dear as the logits' own: only where it decides.
    const bool is_exact = o.compute == NumberFormat::kFloat32;
    spread.resize(is_exact ? logits.size() : 0);
    if (is_exact) linear_spread(o, block, spread);
    for (std::size_t r = 0; r < block.size(); ++r) {
      const std::span<const double> row(logits.data() + r * index(o.vocab), index(o.vocab));
      const double length = norms.hidden[index(block[r])];
      for (std::size_t j = 0; j < row.size(); ++j) {
        const double x = std::fabs(row[j]);
        const double size = is_exact ? terms * (spread[r * row.size() + j] + x) : length * norms.head[j];
        errors[j] = 0x1p-24 * (size + x + (o.bias.empty() ? 0.0 : 2 * std::fabs(o.bias[j])));
      }
      work({block[r], row, errors, 0x1p-24 * (terms * length * norms.max_head + 2 * norms.max_bias)});
    }
  }
}

double output_error_of_z(const SoftmaxRow& softmax, const LinearRow& row) {
  return row.output_error * std::fabs(softmax.transform().logit_scale / softmax.transform().logit_temperature());
}

OutputMagnitudes linear_output_magnitudes(const SoftmaxRow& softmax, const LinearRow& row) {
  return output_magnitudes(softmax, output_error_of_z(softmax, row));
}

RowSummary summarize_linear(const SoftmaxRow& softmax, const LinearRow& row) {
  RowSummary summary = summarize(softmax);
  const double own = std::fabs(softmax.dz_dx(softmax.label())) * row.errors[index(softmax.label())];
  const double mean = mean_error(softmax, row);
  if (std::isfinite(summary.logp)) summary.logp_error += (own + mean) / softmax.transform().logp_temperature();
  if (std::isfinite(summary.entropy)) summary.entropy_error += 2 * mean * (1 + summary.entropy);
  return summary;
}

double linear_loss_magnitude(const SoftmaxRow& softmax, const reference::RowLoss& loss, const LinearRow& row) {
  const double error = kMagnitudeOfError * output_error_of_z(softmax, row);
  const double lse = std::fabs(softmax.max() + softmax.log_sum());
  const double of_z_loss = lse > 0 ? 2 * std::fabs(loss.z_loss) / lse : 0;
  return loss_magnitude(softmax, loss) + error * (2 * (loss.nll_weight + loss.smoothing_weight) + of_z_loss);
}

bool linear_argmax_agrees(const SoftmaxRow& softmax, const LinearRow& row, std::int64_t output) {
  if (argmax_agrees(softmax, output)) return true;
  if (output < 0 || output >= softmax.vocab()) return false;
  return softmax.max() - softmax.logits_z()[index(output)] <= 2 * output_error_of_z(softmax, row);
}

// -------------------------------------------------------------------------------------------------- the oracle over a case

LinearOracleCase::LinearOracleCase(const LinearOperands& operands, const LinearNorms& norms,
                                   const reference::LinearGradients::Wanted& wanted)
    : operands_(operands), norms_(norms), gradients_(operands, wanted) {
  if (wanted.dhidden) dhidden_bounds_.resize(index(operands.rows));
  if (wanted.dhead) dhead_bounds_.resize(index(operands.vocab));
  if (wanted.dbias) dbias_bounds_.resize(index(operands.vocab));
}

void LinearOracleCase::add_row(const LinearRow& row, const SoftmaxRow& softmax, const GradientRow& gradient) {
  ++rows_added_;
  block_rows_.push_back(row.row);
  block_.insert(block_.end(), gradient.gradient.begin(), gradient.gradient.end());
  const double of_row = 0x1p-21 + 2 * mean_error(softmax, row);
  const double length = norms_.hidden[index(row.row)];
  const bool transformed = !softmax.transform().is_identity();
  const auto add = [](Bound& bound, Spread& spread, double dlogit, double error, double common, double size) {
    const double term = square(dlogit * size);
    bound.square += square(dlogit);
    bound.absolute += std::fabs(dlogit);
    bound.weighted += term;
    bound.independent_sq += square(error * size);
    bound.common += common * size;
    spread.add(term);
  };
  for (std::int64_t j = 0; j < softmax.vocab(); ++j) {
    const double dlogit = gradient.gradient[index(j)], magnitude = gradient.magnitude[index(j)];
    const double z = softmax.logits_z()[index(j)];
    const double distance = magnitude > 0 ? softmax.max() - z : 0;
    const double more = transformed && magnitude > 0 ? 2 * std::max(std::fabs(z), std::fabs(softmax.max())) : 0;
    const double error = magnitude * (0x1p-24 * (8 + 2 * distance + more) + sensitivity(softmax, j) * row.errors[index(j)]) +
                         0x1p-126 * std::max(1.0, gradient.scale);
    const double common = of_row * magnitude + (gradient.blur.empty() ? 0.0 : gradient.blur[index(j)]);
    if (!dhidden_bounds_.empty()) {
      add(dhidden_bounds_[index(row.row)], dhidden_spread_, dlogit, error, common, norms_.head[index(j)]);
    }
    if (!dhead_bounds_.empty()) add(dhead_bounds_[index(j)], dhead_spread_, dlogit, error, common, length);
    if (!dbias_bounds_.empty()) add(dbias_bounds_[index(j)], dbias_spread_, dlogit, error, common, 1);
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

std::vector<Gate> LinearOracleCase::judge(const Target& target) const { return judge_rows(target, 0, target.output.rows); }

std::vector<Gate> LinearOracleCase::judge_rows(const Target& target, std::int64_t first, std::int64_t end) const {
  Verdict verdict;
  std::mutex mutex;
  reference::split_work(operands_.threads, end - first, 1, [&](std::int64_t part_begin, std::int64_t part_end) {
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

LinearOracleCase::Target LinearOracleCase::dhidden_target(const StoredMatrix& output, const StoredMatrix& before) const {
  const double vocab = static_cast<double>(operands_.vocab);
  return {"dhidden",
          gradients_.dhidden(),
          gradients_.ideal_dhidden_error(),
          dhidden_bounds_,
          dhidden_spread_,
          vocab,
          norms_.max_head,
          output,
          before};
}

std::vector<Gate> LinearOracleCase::judge_dhidden(const StoredMatrix& output) const {
  return judge(dhidden_target(output, StoredMatrix{}));
}

std::vector<Gate> LinearOracleCase::judge_dhidden_row(const StoredMatrix& output, std::int64_t row) const {
  return judge_rows(dhidden_target(output, StoredMatrix{}), row, row + 1);
}

std::vector<Gate> LinearOracleCase::judge_dhead(const StoredMatrix& output, const StoredMatrix& before) const {
  return judge({"dhead", gradients_.dhead(), gradients_.ideal_dhead_error(), dhead_bounds_, dhead_spread_,
                static_cast<double>(rows_added_), norms_.max_hidden, output, before});
}

std::vector<Gate> LinearOracleCase::judge_dbias(const StoredMatrix& output, const StoredMatrix& before) const {
  return judge({"dbias", gradients_.dbias(), gradients_.ideal_dbias_error(), dbias_bounds_, dbias_spread_,
                static_cast<double>(rows_added_), 0, output, before});
}

}  // namespace tileloss::tools
