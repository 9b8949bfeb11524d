#include "judge/oracles/row_outputs.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace tileloss::tools {

using oracle::SoftmaxRow;

struct OutputTerms {
  OutputTerms(const SoftmaxRow& softmax, double error_of_z);

  double max, log_sum, temperature;  // |m|, log sum exp(z - m), the temperature of logp alone
  double label, mean;                // z there, and over all columns, as distances from 0 and from m
  double logp, entropy;              // |their values|, at most 1
  double flushed;                    // the exps below 2^-126
  double distance;                   // of the columns but the label from m, half of it
  double blur;                       // what a transform's z and m may be wrong by
  double sum_blur;                   // of log S near 0
  double error;                      // of each z besides, and of a sum of -p log p for each such
  double error_of_entropy;
};

namespace {

double logp_magnitude(const OutputTerms& t) {
  double magnitude = t.flushed + t.distance * t.logp;
  if (t.blur > 0.0) magnitude += (t.label + t.blur) * t.logp;
  // logp = z_y - lse moves by the errors of two.
  return (magnitude + 2.0 * t.error) / t.temperature;
}

double entropy_magnitude(const OutputTerms& t) {
  const double blur = t.blur > 0.0 ? 2.0 * t.blur * t.entropy : 0.0;
  return kExpRange * t.flushed + t.distance * t.entropy + t.sum_blur + blur + t.error_of_entropy;
}

double of_pair(const OutputTerms&) { return 0.0; }

constexpr std::array<RowOutput, kOutputCount> kOutputs{{
    {"logp", &tileloss_args::logp, TILELOSS_FLOAT32, [](const ExpectedRow& o) { return o.own.logp; }, logp_magnitude},
    {"lse", &tileloss_args::lse, TILELOSS_FLOAT32, [](const ExpectedRow& o) { return o.own.lse; },
     [](const OutputTerms& t) { return t.max + t.log_sum + t.error; }},
    {"entropy", &tileloss_args::entropy, TILELOSS_FLOAT32, [](const ExpectedRow& o) { return o.own.entropy; }, entropy_magnitude},
    {"argmax", &tileloss_args::argmax, TILELOSS_INT64, [](const ExpectedRow& o) { return static_cast<double>(o.own.argmax); },
     nullptr},
    {"correct", &tileloss_args::correct, TILELOSS_UINT8, [](const ExpectedRow& o) { return o.own.correct ? 1.0 : 0.0; }, nullptr},
    // Both of its sums hold the largest's 1.
    {"log_sum_sq_probs", &tileloss_args::log_sum_sq_probs, TILELOSS_FLOAT32,
     [](const ExpectedRow& o) { return o.own.log_sum_sq_probs; },
     [](const OutputTerms& t) { return 4.0 + 2.0 * t.log_sum + 2.0 * t.blur + 4.0 * t.error; }},
    // A float32 sum of 1e5 terms of one sign loses several units in the last place.
    {"mean_logit", &tileloss_args::mean_logit, TILELOSS_FLOAT32, [](const ExpectedRow& o) { return o.own.mean_logit; },
     [](const OutputTerms& t) { return t.max + 16.0 * t.mean + t.error; }, false, true},
    {"divergence", &tileloss_args::divergence, TILELOSS_FLOAT32, [](const ExpectedRow& o) { return o.divergence; }, of_pair,
     true},
    {"teacher_entropy", &tileloss_args::teacher_entropy, TILELOSS_FLOAT32, [](const ExpectedRow& o) { return o.teacher_entropy; },
     of_pair, true},
    {"agreement", &tileloss_args::agreement, TILELOSS_UINT8, [](const ExpectedRow& o) { return o.agreement ? 1.0 : 0.0; },
     nullptr, true},
}};

template <class T>
std::vector<double> widen_as(std::span<const char> elements) {
  std::vector<double> values(elements.size() / sizeof(T));
  for (std::size_t i = 0; i < values.size(); ++i) {
    T value;
    std::memcpy(&value, elements.data() + i * sizeof value, sizeof value);
    values[i] = static_cast<double>(value);
  }
  return values;
}

}  // namespace

OutputTerms::OutputTerms(const SoftmaxRow& softmax, double error_of_z)
    : max(std::fabs(softmax.max())), log_sum(softmax.log_sum()), temperature(softmax.transform().logp_temperature()) {
  const double z_label = softmax.logits_z()[static_cast<std::size_t>(softmax.label())];
  label = std::fabs(z_label);
  mean = std::fabs(softmax.max() - softmax.outputs().mean_logit);
  logp = std::min(1.0, std::fabs(softmax.logp()));
  const double full_entropy = softmax.entropy();
  entropy = std::min(1.0, full_entropy);
  // Near 0 logp and entropy are sums of exps that z - m costs |z - m| 2^-24 of their value, those below 2^-126 all of it.
  flushed = 0x1p-104 * static_cast<double>(softmax.vocab());
  distance = 0.5 * others_distance(softmax);
  // The logits that hold the mass lie within 16 of the maximum.
  blur = softmax.transform().is_identity() ? 0.0 : max + 16.0;
  // log S keeps its relative precision near 0 only where the sum without the label lacks the maximum's exp, which is 1 give or
  // take its rounding (3.9e-7 for 16-bit logits), that of the float32 sums, and that of z.
  sum_blur = z_label < softmax.max() ? 3.0 + blur : 0.0;
  error = kMagnitudeOfError * error_of_z;
  error_of_entropy = 2.0 * error * (std::isfinite(softmax.max()) ? 1.0 + full_entropy : 1.0);
}

std::span<const RowOutput, kOutputCount> checked_outputs() { return kOutputs; }

std::vector<std::string> output_names(bool has_divergence) {
  std::vector<std::string> names;
  for (const RowOutput& output : kOutputs) {
    if (has_divergence || !output.of_pair) names.emplace_back(output.name);
  }
  return names;
}

std::vector<double> widen(tileloss_dtype dtype, std::span<const char> elements) {
  switch (dtype) {
    case TILELOSS_INT32: return widen_as<std::int32_t>(elements);
    case TILELOSS_INT64: return widen_as<std::int64_t>(elements);
    case TILELOSS_UINT8: return widen_as<std::uint8_t>(elements);
    default: return widen_as<float>(elements);
  }
}

OutputMagnitudes output_magnitudes(const SoftmaxRow& softmax, double error_of_z) {
  const OutputTerms terms(softmax, error_of_z);
  OutputMagnitudes magnitudes{};
  for (std::size_t o = 0; o < kOutputCount; ++o) {
    if (!kOutputs[o].is_exact()) magnitudes[o] = kOutputs[o].magnitude(terms);
  }
  return magnitudes;
}

double loss_magnitude(const SoftmaxRow& softmax, const oracle::RowLoss& loss, double error_of_z) {
  const OutputMagnitudes magnitudes = output_magnitudes(softmax);
  double magnitude = loss.nll_weight * magnitudes[kLogp];
  if (!softmax.transform().is_identity()) magnitude += loss.smoothing_weight * 2.0 * (std::fabs(softmax.max()) + 16.0);
  const double lse = std::fabs(softmax.max() + softmax.log_sum());
  const double of_z_loss = lse > 0.0 ? 2.0 * std::fabs(loss.z_loss) / lse : 0.0;
  return magnitude + of_z_loss * magnitudes[kLse] +
         kMagnitudeOfError * error_of_z * (2.0 * (loss.nll_weight + loss.smoothing_weight) + of_z_loss);
}

bool argmax_agrees(const SoftmaxRow& softmax, std::int64_t output, double error_of_z) {
  const std::int64_t expected = softmax.outputs().argmax;
  if (output == expected) return true;
  if (output < 0 || output >= softmax.vocab()) return false;
  const double below = softmax.max() - softmax.logits_z()[static_cast<std::size_t>(output)];
  const bool may_tie = !softmax.transform().is_identity() && expected >= 0;
  return (may_tie && below <= 0x1p-20 * std::fabs(softmax.max())) || (error_of_z > 0.0 && below <= 2.0 * error_of_z);
}

}  // namespace tileloss::tools
