#include "oracle/distillation.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

namespace tileloss::oracle {

Transform teacher_transform(const DistillationOptions& options) {
  Transform transform = options.teacher;
  if (std::isnan(transform.logit_scale)) transform.logit_scale = options.student.logit_scale;
  if (std::isnan(transform.softcap)) transform.softcap = options.student.softcap;
  if (std::isnan(transform.temperature)) transform.temperature = options.student.temperature;
  return transform;
}

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

Transform label_transform(const DistillationOptions& options) {
  Transform transform = options.student;
  if (!std::isnan(options.label_temperature)) transform.temperature = options.label_temperature;
  return transform;
}

void check_transform(const Transform& transform, const std::string& side) {
  if (!(transform.temperature > 0.0)) throw std::invalid_argument(side + " temperature: expected > 0");
  if (!(transform.softcap >= 0.0)) throw std::invalid_argument(side + " softcap: expected >= 0");
  if (transform.temperature_on != TemperatureOn::kLogits)
    throw std::invalid_argument(side + " temperature_on: expected logits, given logprob");
}

std::span<const double> valid_columns(const DistillationOptions& options, std::span<const double> logits, const char* side) {
  if (options.valid_vocab == -1) return logits;
  if (options.valid_vocab < 1 || index(options.valid_vocab) > logits.size())
    throw std::invalid_argument("valid_vocab: expected 1 to " + std::to_string(logits.size()) + ", the columns of " + side +
                                ", given " + std::to_string(options.valid_vocab));
  return logits.first(index(options.valid_vocab));
}

// Wide, so that the difference of two z keeps a double's digits.
long double wide_z(const Transform& transform, double logit) {
  const long double scaled = static_cast<long double>(transform.logit_scale) * logit;
  const long double cap = transform.softcap;
  return (cap == 0.0L ? scaled : cap * std::tanh(scaled / cap)) / transform.temperature;
}

bool has_distribution(const SoftmaxRow& row) { return std::isfinite(row.max()); }

double log_prob(const SoftmaxRow& row, std::size_t column) { return (row.logits_z()[column] - row.max()) - row.log_sum(); }

// log p_j - log q_j = (z_j - zt_j) - (lse - lset). Where all z - zt lie within 1 of one of them, r, the second is
// r + log sum q e^(z - zt - r): it keeps its digits however close p and q are.
void fill_log_ratios(const DistillationOptions& options, std::span<const double> x, std::span<const double> xt,
                     const SoftmaxRow& student, const SoftmaxRow& teacher, Classes& classes) {
  const Transform other = teacher_transform(options);
  std::vector<long double> apart(x.size());
  for (std::size_t j = 0; j < x.size(); ++j) apart[j] = wide_z(options.student, x[j]) - wide_z(other, xt[j]);
  const long double at_largest = apart[index(teacher.outputs().argmax)];
  const long double r = std::isfinite(at_largest) ? at_largest : 0.0L;
  bool close = true;
  long double sum = 0.0L;
  for (std::size_t j = 0; j < x.size() && close; ++j) {
    if (classes.p[j] == 0.0 && classes.q[j] == 0.0) continue;
    close = std::fabs(apart[j] - r) < 1.0L;
    sum += classes.q[j] * std::expm1(static_cast<double>(apart[j] - r));
  }
  // Both less r, so that a common offset costs nothing.
  const long double lse_apart = close ? std::log1p(sum)
                                      : (static_cast<long double>(student.max()) - teacher.max() - r) +
                                            (static_cast<long double>(student.log_sum()) - teacher.log_sum());
  for (std::size_t j = 0; j < x.size(); ++j) classes.log_ratio[j] = static_cast<double>((apart[j] - r) - lse_apart);
}

// -sum q log q
double entropy_of(const std::vector<double>& q, const std::vector<double>& log_q) {
  long double sum = 0.0L;
  for (std::size_t c = 0; c < q.size(); ++c) {
    if (q[c] != 0.0) sum -= static_cast<long double>(q[c]) * log_q[c];
  }
  return static_cast<double>(sum);
}

// log sum e^v; -inf if there is nothing.
double log_sum_exp(const std::vector<double>& values) {
  const double largest = values.empty() ? -kInfinity : *std::max_element(values.begin(), values.end());
  if (!std::isfinite(largest)) return largest;
  long double sum = 0.0L;
  for (const double value : values) sum += std::exp(value - largest);
  return largest + static_cast<double>(std::log(sum));
}

void check_ids(std::span<const std::int64_t> ids, std::span<const double> log_q, std::int64_t columns) {
  if (ids.size() != log_q.size())
    throw std::invalid_argument("log_q: expected " + std::to_string(ids.size()) + " values, one for each id, given " +
                                std::to_string(log_q.size()));
  std::vector<std::int64_t> sorted(ids.begin(), ids.end());
  std::sort(sorted.begin(), sorted.end());
  if (!sorted.empty() && (sorted.front() < 0 || sorted.back() >= columns))
    throw std::invalid_argument("ids: expected 0 to " + std::to_string(columns - 1) + ", given " +
                                std::to_string(sorted.front() < 0 ? sorted.front() : sorted.back()));
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end())
    throw std::invalid_argument("ids: expected distinct columns, given twice: " + std::to_string(*twice));
}

}  // namespace

void check_options(const DistillationOptions& options) {
  check_beta(options.divergence, options.beta);
  check_transform(options.student, "student");
  check_transform(teacher_transform(options), "teacher");
  check_transform(label_transform(options), "label");
  for (const auto& [name, weight] :
       {std::pair("label_weight", options.label_weight), std::pair("divergence_weight", options.divergence_weight)}) {
    if (!(weight >= 0.0)) throw std::invalid_argument(std::string(name) + ": expected >= 0, given " + std::to_string(weight));
  }
}

// ----------------------------------------------------------------------------------------------------------------- row

void DistillationRow::start(const DistillationOptions& options, std::span<const double> student, std::int64_t label,
                            Allowed allowed) {
  check_options(options);
  const std::span<const double> x = valid_columns(options, student, "student");
  if (x.empty()) throw std::invalid_argument("student: expected at least one column");
  if (label == kNoLabel && options.label_weight != 0.0)
    throw std::invalid_argument("label: expected one with label_weight > 0, given none");
  columns_ = std::ssize(student);
  label_ = label;
  student_.compute(options.student, x, has_label() ? label : 0, allowed);
  at_label_temperature_.compute(label_transform(options), x, has_label() ? label : 0, allowed);
  divergence_factor_ = options.scale_by_temperature_squared ? options.student.temperature * options.student.temperature : 1.0;
  ids_.clear();
}

void DistillationRow::finish(const DistillationOptions& options, double teacher_entropy, double teacher_lse,
                             std::int64_t teacher_argmax) {
  const RowOutputs own = student_.outputs();
  const double logp = has_label() ? at_label_temperature_.outputs().logp : kNan;
  outputs_ = {kNan, own.entropy, teacher_entropy, logp, own.lse, teacher_lse, false};
  outputs_.agreement = own.argmax >= 0 && own.argmax == teacher_argmax;
  if (is_undefined_) return;
  outputs_.divergence = divergence_factor_ * divergence_value(options.divergence, options.beta, classes_);
  divergence_slopes(options.divergence, options.beta, classes_, slopes_);
}

void DistillationRow::compute(const DistillationOptions& options, std::span<const double> student,
                              std::span<const double> teacher, std::int64_t label, Allowed allowed) {
  start(options, student, label, allowed);
  const std::span<const double> x = valid_columns(options, student, "student"), xt = valid_columns(options, teacher, "teacher");
  if (x.size() != xt.size())
    throw std::invalid_argument("teacher: expected " + std::to_string(x.size()) + " columns, given " + std::to_string(xt.size()));
  teacher_.compute(teacher_transform(options), xt, 0, allowed);
  sparse_ = false;
  is_undefined_ = !has_distribution(student_) || !has_distribution(teacher_);
  if (!is_undefined_) {
    classes_.resize(x.size());
    classes_.complete = true;
    for (std::size_t j = 0; j < x.size(); ++j) {
      classes_.p[j] = student_.p(static_cast<std::int64_t>(j));
      classes_.q[j] = teacher_.p(static_cast<std::int64_t>(j));
      classes_.log_p[j] = log_prob(student_, j);
      classes_.log_q[j] = log_prob(teacher_, j);
    }
    fill_log_ratios(options, x, xt, student_, teacher_, classes_);
  }
  const RowOutputs other = teacher_.outputs();
  finish(options, other.entropy, other.lse, other.argmax);
}

void DistillationRow::compute_sparse(const DistillationOptions& options, std::span<const double> student,
                                     std::span<const std::int64_t> ids, std::span<const double> log_q, Tail tail,
                                     std::int64_t label, Allowed allowed) {
  start(options, student, label, allowed);
  check_ids(ids, log_q, student_.vocab());
  sparse_ = true;
  tail_ = tail;
  std::vector<double> listed_p, listed_q;
  for (std::size_t c = 0; c < ids.size(); ++c) {
    if (!student_.is_allowed(ids[c])) continue;
    ids_.push_back(ids[c]);
    listed_p.push_back(log_prob(student_, index(ids[c])));
    listed_q.push_back(log_q[c]);
  }
  const std::vector<double> known_q = listed_q;  // as given, of the set
  const bool readable = std::none_of(known_q.begin(), known_q.end(), [](double v) { return std::isnan(v) || v == kInfinity; });
  is_undefined_ = !readable || !has_distribution(student_);
  // The teacher's side also beside a student without a distribution, whose p come to nothing.
  if (tail == Tail::kRenormalise && readable) {
    const double sum_p = log_sum_exp(listed_p), sum_q = log_sum_exp(listed_q);
    is_undefined_ = is_undefined_ || (!ids_.empty() && (sum_p == -kInfinity || sum_q == -kInfinity));
    for (double& value : listed_p) value -= sum_p;
    for (double& value : listed_q) value -= sum_q;
  }
  // A lumped class after the listed ones. If it has no p, a q that is no more than what rounded log q leave of 1 is none.
  if (tail == Tail::kLump && readable) {
    std::vector<bool> listed(student_.exps().size());
    for (const std::int64_t id : ids_) listed[index(id)] = true;
    long double others = 0.0L, left = 1.0L;
    for (std::size_t j = 0; j < listed.size(); ++j) {
      if (!listed[j]) others += student_.exps()[j];
    }
    for (const double value : listed_q) left -= std::exp(static_cast<long double>(value));
    if (others == 0.0L && left < 0.01L) left = 0.0L;
    listed_p.push_back(static_cast<double>(std::log(others)) - student_.log_sum());
    listed_q.push_back(static_cast<double>(std::log(std::max(left, 0.0L))));
  }
  classes_.resize(listed_p.size());
  classes_.complete = tail == Tail::kRenormalise;
  for (std::size_t c = 0; c < listed_p.size(); ++c) classes_.set(c, listed_p[c], listed_q[c]);

  std::int64_t argmax = -1;
  double largest = -kInfinity;
  for (std::size_t c = 0; c < ids_.size() && readable; ++c) {
    if (argmax == -1 || known_q[c] > largest || (known_q[c] == largest && ids_[c] < argmax)) {
      argmax = ids_[c];
      largest = known_q[c];
    }
  }
  const bool without_q = tail == Tail::kRenormalise && !ids_.empty() && largest == -kInfinity;
  finish(options, readable && !without_q ? entropy_of(classes_.q, classes_.log_q) : kNan, kNan, argmax);
}

void DistillationRow::add_divergence_gradient(double factor, std::span<double> dz, std::span<double> magnitude) const {
  factor *= divergence_factor_;
  const auto add = [&](std::size_t column, double slope, double size) {
    dz[column] += factor * slope;
    magnitude[column] += std::fabs(factor) * size;
  };
  const auto add_class = [&](std::size_t column, std::size_t c) {
    const double p = classes_.p[c];
    add(column, slopes_.gradient(classes_, c), slopes_.size[c] + (p == 0.0 ? 0.0 : p * slopes_.size_sum));
  };
  if (!sparse_) {
    for (std::size_t j = 0; j < dz.size(); ++j) add_class(j, j);
    return;
  }
  std::vector<bool> listed(dz.size());
  for (std::size_t c = 0; c < ids_.size(); ++c) {
    listed[index(ids_[c])] = true;
    add_class(index(ids_[c]), c);
  }
  if (tail_ == Tail::kRenormalise) return;
  // The other columns: each has its share p_j / p of the lumped class's slope, or none of its own.
  const bool lumped = classes_.size() > ids_.size();
  const std::size_t last = ids_.size();
  for (std::size_t j = 0; j < dz.size(); ++j) {
    const double p = student_.p(static_cast<std::int64_t>(j));
    if (listed[j] || p == 0.0) continue;
    const double share = lumped ? p / classes_.p[last] : 0.0;
    add(j, (lumped ? share * slopes_.slope[last] : 0.0) - p * slopes_.slope_sum,
        (lumped ? share * slopes_.size[last] : 0.0) + p * slopes_.size_sum);
  }
}

void DistillationRow::add_cross_entropy_gradient(double factor, std::span<double> dz, std::span<double> magnitude) const {
  for (std::size_t j = 0; j < dz.size(); ++j) {
    const SoftmaxRow& row = at_label_temperature_;
    if (!row.is_allowed(static_cast<std::int64_t>(j))) continue;
    const bool own = static_cast<std::int64_t>(j) == label_;
    const double slope = label_ratio() * (own ? -row.one_minus_p_label() : row.p(static_cast<std::int64_t>(j)));
    dz[j] += factor * slope;
    magnitude[j] += std::fabs(factor * slope);
  }
}

// ----------------------------------------------------------------------------------------------------------- reduction

Distillation::Distillation(const DistillationOptions& options, std::int64_t rows, std::span<const std::int64_t> labels,
                           std::span<const double> token_weights, std::span<const double> loss_grad)
    : RowWeights(rows, labels, options.ignore_index, token_weights, loss_grad, options.reduction), options_(options) {
  check_options(options);
  if (options.reduction != Reduction::kMean) return;
  factor_ = share_of_mean(options.num_items, [&](std::int64_t row) { return token_weight(row); });
}

double Distillation::row_loss(std::int64_t row, const DistillationRow& values) const {
  if (is_ignored(row)) return 0.0;
  if (values.is_undefined()) return kNan;
  double loss = 0.0;
  if (options_.label_weight != 0.0) loss += options_.label_weight * -values.outputs().logp;
  if (options_.divergence_weight != 0.0) loss += options_.divergence_weight * values.outputs().divergence;
  return token_weight(row) * loss;
}

void Distillation::row_gradient(std::int64_t row, const DistillationRow& values, DistillationGradient& out) const {
  for (std::vector<double>* part : {&out.dz, &out.dlogits, &out.magnitude}) part->assign(index(values.columns()), 0.0);
  if (is_ignored(row)) return;
  const SoftmaxRow& student = values.student();
  const std::span<double> dz = std::span(out.dz).first(index(student.vocab()));
  const std::span<double> magnitude = std::span(out.magnitude).first(dz.size());
  const double factor = token_weight(row) * upstream(row) * factor_;
  if (values.is_undefined()) {
    std::fill(dz.begin(), dz.end(), kNan);
    std::fill(magnitude.begin(), magnitude.end(), kNan);
  } else {
    if (options_.label_weight != 0.0) values.add_cross_entropy_gradient(factor * options_.label_weight, dz, magnitude);
    if (options_.divergence_weight != 0.0) values.add_divergence_gradient(factor * options_.divergence_weight, dz, magnitude);
  }
  student.clear_outside(dz);
  student.clear_outside(magnitude);
  for (std::size_t j = 0; j < dz.size(); ++j) {
    const double slope = student.dz_dx(static_cast<std::int64_t>(j));
    out.dlogits[j] = dz[j] * slope;
    magnitude[j] *= std::fabs(slope);
  }
}

double Distillation::reduce(std::span<const double> losses) const {
  long double sum = 0.0L;
  for (const double loss : losses) sum += loss;
  return factor_ == 0.0 ? 0.0 : static_cast<double>(sum) * factor_;
}

}  // namespace tileloss::oracle
