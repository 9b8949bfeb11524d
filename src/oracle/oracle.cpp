#include "oracle/oracle.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace tileloss::oracle {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Sums of 1e5 terms: 128 at a time in double, those in long double. The relative error of a sum of positive terms stays below
// 128 * 2^-53 = 1.4e-14 at worst and is about 1e-15 in practice.
constexpr std::size_t kSumBlock = 128;

template <typename Term>
double block_sum(std::size_t count, Term&& term) {
  long double total = 0.0L;
  for (std::size_t begin = 0; begin < count; begin += kSumBlock) {
    const std::size_t end = std::min(begin + kSumBlock, count);
    double partial = 0.0;
    for (std::size_t j = begin; j < end; ++j) partial += term(j);
    total += partial;
  }
  return static_cast<double>(total);
}

struct Capped {
  double value;  // tanh(v)
  double slope;  // 1 / cosh(v)^2
};

// Both from one exponential. 1 - tanh^2 would lose all digits where tanh is near 1.
Capped tanh_with_slope(double v) {
  const double size = std::fabs(v);
  Capped capped{};
  if (size >= 0.5) {
    const double e = std::exp(-2.0 * size);
    capped = {(1.0 - e) / (1.0 + e), 4.0 * e / ((1.0 + e) * (1.0 + e))};
  } else {
    const double e = std::expm1(-2.0 * size);
    capped = {-e / (2.0 + e), 4.0 * (1.0 + e) / ((2.0 + e) * (2.0 + e))};
  }
  capped.value = std::copysign(capped.value, v);
  return capped;
}

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

// NaN if any value is NaN.
double nan_max(std::span<const double> values) {
  double largest = -kInfinity;
  bool any_nan = false;
  for (const double value : values) {
    any_nan |= std::isnan(value);
    if (value > largest) largest = value;
  }
  return any_nan ? kNan : largest;
}

// The chain rule's last step, from z to x.
void multiply_by_slope(const SoftmaxRow& row, GradientRow& out) {
  const Transform& transform = row.transform();
  out.scale *= transform.logit_scale / transform.logit_temperature();
  if (row.slopes().empty() && row.slope() == 1.0) return;
  const std::span<const double> slopes = row.slopes();
  for (std::size_t j = 0; j < out.gradient.size(); ++j) {
    const double slope = slopes.empty() ? row.slope() : slopes[j];
    out.gradient[j] *= slope;
    out.magnitude[j] *= std::fabs(slope);
  }
}

}  // namespace

std::vector<std::uint8_t> unpack_allowed(std::span<const std::int32_t> words, std::int64_t columns) {
  if (std::ssize(words) < (columns + 31) / 32) throw std::invalid_argument("allowed: too few words");
  std::vector<std::uint8_t> allowed;
  for (std::int64_t j = 0; j < columns; ++j) {
    const auto word = static_cast<std::uint32_t>(words[index(j / 32)]);
    allowed.push_back(static_cast<std::uint8_t>(word >> (j % 32) & 1U));
  }
  return allowed;
}

// ------------------------------------------------------------------------------------------------------------ softmax

void SoftmaxRow::apply_transform(std::span<const double> logits) {
  const double scale = transform_.logit_scale;
  const double temperature = transform_.logit_temperature();
  z_.resize(logits.size());
  slopes_.clear();
  slope_ = scale / temperature;
  if (transform_.softcap == 0.0) {
    if (transform_.is_identity()) {
      std::copy(logits.begin(), logits.end(), z_.begin());
      return;
    }
    for (std::size_t j = 0; j < logits.size(); ++j) z_[j] = scale * logits[j] / temperature;
    return;
  }
  const double cap = transform_.softcap;
  slopes_.resize(logits.size());
  for (std::size_t j = 0; j < logits.size(); ++j) {
    const Capped capped = tanh_with_slope(scale * logits[j] / cap);
    z_[j] = cap * capped.value / temperature;
    slopes_[j] = slope_ * capped.slope;
  }
}

void SoftmaxRow::exclude(Allowed allowed) {
  if (!allowed.empty() && allowed.size() != z_.size()) throw std::invalid_argument("allowed: wrong size");
  allowed_.assign(allowed.begin(), allowed.end());
  for (std::size_t j = 0; j < allowed_.size(); ++j) {
    if (allowed_[j] != 0) continue;
    z_[j] = -kInfinity;
    if (!slopes_.empty()) slopes_[j] = 0.0;
  }
  classes_ = std::ssize(z_) - std::count(allowed_.begin(), allowed_.end(), 0);
  if (classes_ > 0) return;
  allowed_.clear();
  classes_ = std::ssize(z_);
}

void SoftmaxRow::clear_outside(std::span<double> values) const {
  for (std::size_t j = 0; j < allowed_.size(); ++j) {
    if (allowed_[j] == 0) values[j] = 0.0;
  }
}

void SoftmaxRow::set_label(std::int64_t label) {
  if (label < 0 || index(label) >= z_.size()) throw std::invalid_argument("label out of range: " + std::to_string(label));
  label_ = label;
}

void SoftmaxRow::compute(const Transform& transform, std::span<const double> logits, std::int64_t label, Allowed allowed) {
  transform_ = transform;
  apply_transform(logits);
  set_label(label);
  exclude(allowed);
  exps_.resize(z_.size());
  max_ = nan_max(z_);
  const auto in_set = [&](std::size_t j) { return is_allowed(static_cast<std::int64_t>(j)); };
  mean_logit_ = block_sum(z_.size(), [&](std::size_t j) { return in_set(j) ? z_[j] : 0.0; }) / static_cast<double>(classes_);
  argmax_ = -1;
  for (std::size_t j = 0; j < z_.size() && argmax_ < 0; ++j) {
    if (in_set(j) && z_[j] == max_) argmax_ = static_cast<std::int64_t>(j);
  }
  if (!std::isfinite(max_)) {
    // A NaN, a +inf, or nothing but -inf: there is no distribution. lse = m keeps its infinity.
    std::fill(exps_.begin(), exps_.end(), kNan);
    clear_outside(exps_);
    others_ = entropy_sum_ = square_sum_ = kNan;
    log_sum_ = std::isnan(max_) ? kNan : 0.0;
    return;
  }
  long double others = 0.0L, entropy_sum = 0.0L, square_sum = 0.0L;
  for (std::size_t begin = 0; begin < z_.size(); begin += kSumBlock) {
    const std::size_t end = std::min(begin + kSumBlock, z_.size());
    double block_others = 0.0, block_entropy = 0.0, block_square = 0.0;
    for (std::size_t j = begin; j < end; ++j) {
      const double below = max_ - z_[j];
      const double e = std::exp(-below);
      exps_[j] = e;
      if (e == 0.0 || static_cast<std::int64_t>(j) == argmax_) continue;  // 0 * inf is 0 here; the largest stays out
      block_others += e;
      block_entropy += below * e;
      block_square += e * e;
    }
    others += block_others;
    entropy_sum += block_entropy;
    square_sum += block_square;
  }
  others_ = static_cast<double>(others);
  entropy_sum_ = static_cast<double>(entropy_sum);
  square_sum_ = static_cast<double>(square_sum);
  log_sum_ = std::log1p(others_);
}

double SoftmaxRow::logp() const {
  if (!std::isfinite(max_)) return kNan;
  return z_[index(label_)] - max_ - log_sum_;
}

double SoftmaxRow::entropy() const { return std::isfinite(max_) ? log_sum_ + entropy_sum_ / sum() : kNan; }

double SoftmaxRow::one_minus_p_label() const {
  // Without the argmax's own 1 the sum is `others`; without another label's e it is 1 + (others - e), which is at least 1.
  const double e = exps_[index(label_)];
  return (e == 1.0 ? others_ : 1.0 + (others_ - e)) / sum();
}

RowOutputs SoftmaxRow::outputs() const {
  RowOutputs outputs;
  outputs.logp = logp() / transform_.logp_temperature();
  outputs.lse = max_ + log_sum_;
  outputs.entropy = entropy();
  outputs.log_sum_sq_probs = std::isfinite(max_) ? std::log1p(square_sum_) - 2.0 * log_sum_ : kNan;
  outputs.mean_logit = mean_logit_;
  outputs.argmax = argmax_;
  outputs.correct = argmax_ == label_;
  return outputs;
}

// ----------------------------------------------------------------------------------------------------------- logprobs

// d logp / dz_j = [j = y] - p_j,  d lse / dz_j = p_j,  d H / dz_j = -p_j (log p_j + H),  d mean / dz_j = 1 / V in
// the set, whose columns V counts.
void logprobs_gradient(const SoftmaxRow& row, const RowUpstream& upstream, GradientRow& out) {
  const std::span<const double> z = row.logits_z();
  const std::span<const double> exps = row.exps();
  const double inverse_sum = 1.0 / row.sum();
  const double g_logp = upstream.logp / row.transform().logp_temperature();
  const double g_lse = upstream.lse;
  const double g_entropy = upstream.entropy;
  const double entropy = row.entropy();
  out.gradient.resize(z.size());
  out.magnitude.resize(z.size());

  const double linear_magnitude = std::fabs(g_logp) + std::fabs(g_lse);
  for (std::size_t j = 0; j < z.size(); ++j) {
    const double p = exps[j] * inverse_sum;
    out.gradient[j] = p * g_lse - p * g_logp;
    out.magnitude[j] = p * linear_magnitude;
  }
  const std::size_t y = index(row.label());
  const double p_label = exps[y] * inverse_sum;
  out.gradient[y] = g_logp * row.one_minus_p_label() + p_label * g_lse;
  out.magnitude[y] = std::fabs(g_logp) * row.one_minus_p_label() + p_label * std::fabs(g_lse);
  if (g_entropy != 0.0) {
    const double entropy_size = entropy + (z[y] < row.max() ? 1.0 : 0.0);
    for (std::size_t j = 0; j < z.size(); ++j) {
      const double p = exps[j] * inverse_sum;
      if (p == 0.0 && std::isfinite(g_entropy)) continue;  // p log p is 0 there
      const double log_p = z[j] - row.max() - row.log_sum();
      out.gradient[j] -= g_entropy * p * (log_p + entropy);
      out.magnitude[j] += std::fabs(g_entropy) * p * (entropy_size - log_p);
    }
  }
  const double g_column = upstream.mean / static_cast<double>(row.classes());
  if (g_column != 0.0) {
    for (double& g : out.gradient) g += g_column;
    for (double& m : out.magnitude) m += std::fabs(g_column);
  }
  out.coefficients = {g_logp, g_lse - g_logp - (g_entropy == 0.0 ? 0.0 : g_entropy * entropy), 0.0 - g_entropy, g_column};
  out.dlogp = g_logp;
  // An exp lost to underflow in float32 has log p of about -88 - log S.
  out.scale = linear_magnitude + std::fabs(g_entropy) * (entropy + row.log_sum() + 88.0);
  row.clear_outside(out.gradient);
  row.clear_outside(out.magnitude);
  multiply_by_slope(row, out);
}

// sum_k g_k d logp_k / dz_j, with d logp_k / dz_j = [j = y_k] - p_j.
void logprobs_gradient(const SoftmaxRow& row, const RowUpstream& upstream, std::span<const LabelUpstream> labels,
                       GradientRow& out) {
  logprobs_gradient(row, {0.0, upstream.lse, upstream.entropy, upstream.mean}, out);
  double sum = 0.0, size = 0.0;
  std::vector<double> own(out.gradient.size()), own_size(out.gradient.size());  // of each column's labels
  for (const LabelUpstream& label : labels) {
    const double g = label.logp / row.transform().logp_temperature();
    sum += g;
    size += std::fabs(g);
    own[index(label.column)] += g;
    own_size[index(label.column)] += std::fabs(g);
  }
  for (std::size_t j = 0; j < own.size(); ++j) {
    const auto column = static_cast<std::int64_t>(j);
    const double p = row.p(column), slope = row.dz_dx(column);
    const double others = column == row.label() ? row.one_minus_p_label() : 1.0 - p;
    out.gradient[j] += slope * (own[j] * others - (sum - own[j]) * p);
    out.magnitude[j] += std::fabs(slope) * (own_size[j] * others + (size - own_size[j]) * p);
  }
  row.clear_outside(out.gradient);
  row.clear_outside(out.magnitude);
  out.dlogp = out.coefficients.target = own[index(row.label())];
  out.coefficients.prob -= sum;
  out.scale += size * row.largest_slope();
}

// ------------------------------------------------------------------------------------------------------ cross-entropy

RowWeights::RowWeights(std::int64_t rows, std::span<const std::int64_t> labels, std::int64_t ignore_index,
                       std::span<const double> token_weights, std::span<const double> loss_grad, Reduction reduction)
    : rows_(rows), labels_(labels), ignore_index_(ignore_index), token_weights_(token_weights), loss_grad_(loss_grad) {
  if (!labels.empty() && std::ssize(labels) != rows) throw std::invalid_argument("labels: wrong size");
  if (!token_weights.empty() && std::ssize(token_weights) != rows) throw std::invalid_argument("token_weights: wrong size");
  const bool per_row = reduction == Reduction::kNone && std::ssize(loss_grad) == rows;
  if (loss_grad.size() > 1 && !per_row) throw std::invalid_argument("loss_grad: wrong size");
}

CrossEntropy::CrossEntropy(const CrossEntropyOptions& options, std::span<const std::int64_t> labels,
                           std::span<const double> token_weights, std::span<const double> class_weights,
                           std::span<const double> loss_grad)
    : RowWeights(std::ssize(labels), labels, options.ignore_index, token_weights, loss_grad, options.reduction),
      options_(options),
      class_weights_(class_weights) {
  if (options.label_smoothing != 0.0 && options.transform.temperature_on == TemperatureOn::kLogprob)
    throw std::invalid_argument("label_smoothing: not with temperature_on logprob");
  if (options.reduction != Reduction::kMean) return;
  cross_entropy_factor_ = share_of_mean(options.num_items, [&](std::int64_t row) {
    return static_cast<long double>(token_weight(row)) * class_weight(labels[index(row)]);
  });
  z_loss_factor_ = share_of_mean(options.num_items, [&](std::int64_t row) { return token_weight(row); });
}

double CrossEntropy::class_weight(std::int64_t column) const {
  return class_weights_.empty() ? 1.0 : class_weights_[index(column)];
}

CrossEntropy::ClassWeights CrossEntropy::class_weights_of(const SoftmaxRow& softmax) const {
  const auto sum = [&](auto&& value) {
    return block_sum(index(softmax.vocab()), [&](std::size_t j) {
      const auto column = static_cast<std::int64_t>(j);
      return softmax.is_allowed(column) ? value(class_weight(column)) : 0.0;
    });
  };
  return {sum([](double weight) { return weight; }), sum([](double weight) { return std::fabs(weight); })};
}

RowLoss CrossEntropy::row_loss(std::int64_t row, const SoftmaxRow& softmax) const {
  RowLoss loss;
  if (is_ignored(row)) return loss;
  const double weight = token_weight(row);
  const double smoothing = options_.label_smoothing;
  const double nll = -softmax.logp() / options_.transform.logp_temperature();
  loss.cross_entropy = weight * ((1.0 - smoothing) * class_weight(softmax.label()) * nll);
  loss.nll_weight = std::fabs(weight * (1.0 - smoothing) * class_weight(softmax.label()));
  if (smoothing != 0.0) {
    const std::span<const double> z = softmax.logits_z();
    const double all = block_sum(z.size(), [&](std::size_t j) {
      const auto column = static_cast<std::int64_t>(j);
      return softmax.is_allowed(column) ? class_weight(column) * (softmax.log_sum() + (softmax.max() - z[j])) : 0.0;
    });
    const auto columns = static_cast<double>(softmax.classes());
    loss.smoothing = weight * (smoothing / columns * all);
    loss.cross_entropy += loss.smoothing;
    loss.smoothing_weight = std::fabs(weight) * smoothing / columns * class_weights_of(softmax).size;
  }
  if (options_.z_loss != 0.0) {
    const double lse = softmax.max() + softmax.log_sum();
    loss.z_loss = weight * options_.z_loss * lse * lse;
  }
  return loss;
}

void CrossEntropy::row_gradient(std::int64_t row, const SoftmaxRow& softmax, GradientRow& out) const {
  const std::span<const double> exps = softmax.exps();
  out.gradient.assign(exps.size(), 0.0);
  out.magnitude.assign(exps.size(), 0.0);
  out.coefficients = {};
  out.dlogp = out.scale = 0.0;
  if (is_ignored(row)) return;
  const double inverse_sum = 1.0 / softmax.sum();
  const double weight = token_weight(row) * upstream(row);
  const double smoothing = options_.label_smoothing;
  const std::size_t y = index(softmax.label());

  // -(1-s) c_y logp
  const double nll_weight =
      (1.0 - smoothing) * class_weight(softmax.label()) * weight * cross_entropy_factor_ / options_.transform.logp_temperature();
  for (std::size_t j = 0; j < exps.size(); ++j) {
    out.gradient[j] = nll_weight * (exps[j] * inverse_sum);
    out.magnitude[j] = std::fabs(out.gradient[j]);
  }
  out.gradient[y] = -nll_weight * softmax.one_minus_p_label();
  out.magnitude[y] = std::fabs(out.gradient[y]);
  out.coefficients.target = -nll_weight;
  out.coefficients.prob = nll_weight;
  out.dlogp = -nll_weight;
  out.scale = std::fabs(nll_weight);

  // (s/V) sum_k c_k (-log p_k): each -log p_k gives p_j - [j = k]
  if (smoothing != 0.0) {
    const double each = smoothing / static_cast<double>(softmax.classes()) * weight * cross_entropy_factor_;
    const double total = class_weights_of(softmax).sum;
    for (std::size_t j = 0; j < exps.size(); ++j) {
      const double p = exps[j] * inverse_sum;
      const double own = class_weight(static_cast<std::int64_t>(j));
      out.gradient[j] += each * (total * p - own);
      out.magnitude[j] += std::fabs(each) * (std::fabs(total) * p + std::fabs(own));
    }
    out.coefficients.prob += each * total;
    out.coefficients.uniform = -each;
    out.scale += std::fabs(each * total);
  }

  // zeta lse^2
  if (options_.z_loss != 0.0) {
    const double factor = 2.0 * options_.z_loss * weight * z_loss_factor_;
    const double dlse = factor * (softmax.max() + softmax.log_sum());
    const double size = std::fabs(factor) * (std::fabs(softmax.max()) + softmax.log_sum());
    for (std::size_t j = 0; j < exps.size(); ++j) {
      const double p = exps[j] * inverse_sum;
      out.gradient[j] += dlse * p;
      out.magnitude[j] += size * p;
    }
    out.coefficients.prob += dlse;
    out.scale += size;
  }
  softmax.clear_outside(out.gradient);
  softmax.clear_outside(out.magnitude);
  multiply_by_slope(softmax, out);
}

double CrossEntropy::reduce(std::span<const RowLoss> losses) const {
  long double cross_entropy = 0.0L, z_loss = 0.0L;
  for (const RowLoss& loss : losses) {
    cross_entropy += loss.cross_entropy;
    z_loss += loss.z_loss;
  }
  // A denominator of 0 gives 0, whatever the rows hold.
  const double first = cross_entropy_factor_ == 0.0 ? 0.0 : static_cast<double>(cross_entropy) * cross_entropy_factor_;
  const double second = z_loss_factor_ == 0.0 ? 0.0 : static_cast<double>(z_loss) * z_loss_factor_;
  return first + second;
}

}  // namespace tileloss::oracle
