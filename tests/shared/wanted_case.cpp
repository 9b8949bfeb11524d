#include "tests/shared/wanted_case.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "check/pair_row.h"
#include "check/soft_labels_oracle_case.h"
#include "check/sparse_oracle_case.h"
#include "support/synthetic.h"
#include "tests/shared/row_output_check.h"

namespace tileloss::test {
namespace {

constexpr double kTiny = 0x1p-100;  // no weight, no error: 0 is held to this

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

// What both judgements gather: losses, gradients, what surrounds the buffers.
class Judgement {
 public:
  Judgement(const LogitsCase& c, const reference::DistillationOptions& options, const tileloss_args& args)
      : c_(c),
        args_(args),
        oracle_(options, c.spec().rows, c.labels(), c.token_weights(), c.loss_grad()),
        outputs_(args),
        gradient_(c.spec().format) {}

  const reference::Distillation& oracle() const { return oracle_; }
  double weight(std::int64_t i) const { return std::fabs(oracle_.upstream(i) * oracle_.token_weight(i) * oracle_.factor()); }

  void ignored(std::int64_t i) {
    outputs_.add(i, nullptr);
    add_loss(i, 0, 0);
    if (c_.spec().dlogits) gradient_.add_ignored_row(i, c_.dlogits_row(i), c_.spec().vocab);
  }
  // `values`: of a row whose label may have a temperature of its own.
  void add(std::int64_t i, const reference::SoftmaxRow& softmax, double loss, double magnitude, std::span<const double> dlogits,
           std::span<const double> magnitudes, double scale, const reference::DistillationRow* values = nullptr) {
    outputs_.add(i, &softmax, nullptr, values == nullptr ? nullptr : &values->at_label_temperature());
    const reference::SoftmaxRow& wider = values == nullptr ? softmax : tools::wider_row(*values);
    add_loss(i, loss, std::fmax(magnitude * std::fabs(oracle_.token_weight(i)), kTiny));
    if (!c_.spec().dlogits) return;
    gradient_.add_row(i, c_.dlogits_row(i), c_.spec().vocab,
                      {.gradient = dlogits,
                       .magnitude = magnitudes,
                       .blur = {},
                       .z = wider.logits_z(),
                       .max = wider.max(),
                       .scale = wider.largest_slope() * scale,
                       .transformed = !wider.transform().is_identity(),
                       .target = std::max<std::int64_t>(softmax.label(), 0),
                       .others_distance = tools::others_distance(wider)});
  }
  CheckResult finish(bool per_row, std::vector<tools::Gate> more) {
    CheckResult result;
    const auto append = [&](const std::vector<tools::Gate>& gates) {
      result.gates.insert(result.gates.end(), gates.begin(), gates.end());
    };
    if (present(args_.loss)) {
      tools::OutputMetric loss("loss");
      for (std::size_t i = 0; per_row && i < losses_.size(); ++i) {
        loss.add(static_cast<std::int64_t>(i), output_at(args_.loss, static_cast<std::int64_t>(i)), losses_[i], magnitudes_[i]);
      }
      if (!per_row) {
        const double magnitude = std::accumulate(magnitudes_.begin(), magnitudes_.end(), 0.0);
        loss.add(-1, output_at(args_.loss, 0), oracle_.reduce(losses_), std::fmax(magnitude * oracle_.factor(), kTiny));
      }
      append(loss.gates());
    }
    append(more);
    outputs_.append_gates(result.gates);
    if (c_.spec().dlogits) append(gradient_.gates());
    result.mistrusted = c_.spec().dlogits && gradient_.mistrusted();
    result.gates.push_back(tools::make_gate("surroundings_written", c_.surroundings_intact() ? 0.0 : 1.0, 0.0));
    return result;
  }

 private:
  void add_loss(std::int64_t, double loss, double magnitude) {
    losses_.push_back(loss);
    magnitudes_.push_back(magnitude);
  }

  const LogitsCase& c_;
  const tileloss_args& args_;
  const reference::Distillation oracle_;
  RowOutputCheck outputs_;
  tools::GradientMetric gradient_;
  std::vector<double> losses_, magnitudes_;
};

}  // namespace

// ------------------------------------------------------------------------------------------------------------ soft labels

// Padding, gaps and rows that are not in use stay NaN.
SoftLabelCase::SoftLabelCase(const SoftLabelSpec& spec)
    : spec_(spec),
      row_(spec.row),
      probs_(index(spec.row.rows * (spec.row.vocab + spec.stride_extra)) * reference::format_info(spec.probs_format).bytes,
             spec.row.flush) {
  const std::int64_t stride = spec.row.vocab + spec.stride_extra;
  for (std::int64_t i = 0; i < spec.row.rows; ++i) {
    if (row_.labels()[index(i)] == spec.row.ignore_index) continue;
    tools::Random random(spec.row.seed, tools::Stream::kWeights, i);
    std::vector<double> weights(index(row_.valid_columns()));
    double sum = 0;
    for (double& w : weights) sum += w = random.next_uniform() < spec.zeros ? 0 : std::exp(2 * random.next_normal());
    for (std::size_t j = 0; j < weights.size(); ++j) {
      set_prob(i, static_cast<std::int64_t>(j), sum > 0 ? weights[j] / sum : 0);
    }
  }
  args().target_probs = tileloss_make_matrix(probs_.data(), abi_dtype(spec.probs_format), spec.row.rows, spec.row.vocab, stride);
}

void SoftLabelCase::set_prob(std::int64_t row, std::int64_t column, double value) {
  encode_at(spec_.probs_format, probs_.data(), row * (spec_.row.vocab + spec_.stride_extra) + column, value);
}
double SoftLabelCase::prob(std::int64_t row, std::int64_t column) const {
  return reference::decode_at(spec_.probs_format, probs_.data(), row * (spec_.row.vocab + spec_.stride_extra) + column);
}

CheckResult SoftLabelCase::check(const tileloss_soft_cross_entropy_options& options) const {
  const reference::DistillationOptions rows = make_oracle_options(options);
  const reference::Transform& transform = rows.student;
  tools::SoftLabelsOptions soft_options;
  soft_options.label_smoothing = options.label_smoothing;
  soft_options.class_weights.assign(row_.class_weights().begin(), row_.class_weights().end());
  soft_options.rows = rows;
  const auto copy = [](std::span<const double> values) { return std::vector<double>(values.begin(), values.end()); };
  const tools::SoftLabelsOracleCase oracle_case(soft_options, {row_.labels().begin(), row_.labels().end()},
                                                copy(row_.token_weights()), copy(row_.loss_grad()));
  Judgement judgement(row_, rows, row_.args());
  reference::SoftmaxRow softmax;
  reference::GradientRow gradient;
  tools::SoftRow soft;
  std::vector<double> q(index(row_.valid_columns()));
  for (std::int64_t i = 0; i < spec_.row.rows; ++i) {
    if (judgement.oracle().is_ignored(i)) {
      judgement.ignored(i);
      continue;
    }
    for (std::size_t j = 0; j < q.size(); ++j) q[j] = prob(i, static_cast<std::int64_t>(j));
    const std::vector<double> logits = row_.logits_row(i);
    softmax.compute(transform, logits, row_.labels()[index(i)]);
    soft.compute(oracle_case.options(), softmax, logits, q);
    oracle_case.row_gradient(i, soft, gradient);
    judgement.add(i, softmax, oracle_case.row_loss(i, soft), soft.output_magnitude(), gradient.gradient, gradient.magnitude,
                  judgement.weight(i) * soft.mass());
  }
  return judgement.finish(rows.reduction == reference::Reduction::kNone, {});
}

// --------------------------------------------------------------------------------------------------------- sparse teachers

SparseTeacherCase::SparseTeacherCase(const SparseTeacherSpec& spec) : spec_(spec), row_(spec.row) { make_teacher(); }
SparseTeacherCase::SparseTeacherCase(const SparseTeacherSpec& spec, Open) : spec_(spec), row_(spec.row, LogitsCase::Open{}) {
  make_teacher();
}

void SparseTeacherCase::set_log_q(std::int64_t row, std::int64_t k, double value) {
  log_q_[at(row, k)] = value;
  log_q_buffer_.as<float>()[at(row, k)] = static_cast<float>(value);
}

void SparseTeacherCase::make_teacher() {
  const SparseTeacherSpec& spec = spec_;
  const std::int64_t rows = spec.row.rows, k = spec.columns, valid = row_.valid_columns();
  const std::size_t id_bytes = spec.int32_ids ? 4 : 8;
  id_buffer_ = GuardBuffer(index(rows * k) * id_bytes, spec.row.flush);
  log_q_buffer_ = GuardBuffer(index(rows * k) * sizeof(float), spec.row.flush);
  ids_.assign(index(rows * k), -1);
  log_q_.assign(index(rows * k), 0);
  std::vector<std::int64_t> columns(index(valid));
  for (std::int64_t i = 0; i < rows; ++i) {
    tools::Random random(spec.row.seed, tools::Stream::kWeights, i);
    std::iota(columns.begin(), columns.end(), 0);
    // The label and the largest logit are among them where the draw says so; the rest of the mass is the tail's.
    const std::int64_t label = row_.labels()[index(i)];
    if (label >= 0 && label < valid && random.next_uniform() < 0.7) std::swap(columns[0], columns[index(label)]);
    for (std::int64_t c = 1; c < std::min(k, valid); ++c) {
      std::swap(columns[index(c)], columns[index(c + random.next_below(valid - c))]);
    }
    double sum = std::exp(random.next_normal());
    std::vector<double> scores(index(k));
    for (double& score : scores) sum += std::exp(score = spec.teacher_std * random.next_normal());
    for (std::int64_t c = 0; c < k; ++c) {
      if (c >= valid || (spec.has_gaps && random.next_below(5) == 0)) continue;
      const std::int64_t id = columns[index(c)];
      const auto log_q = static_cast<float>(scores[index(c)] - std::log(sum));
      ids_[at(i, c)] = id;
      log_q_[at(i, c)] = static_cast<double>(log_q);
      log_q_buffer_.as<float>()[at(i, c)] = log_q;
      if (spec.int32_ids) {
        id_buffer_.as<std::int32_t>()[at(i, c)] = static_cast<std::int32_t>(id);
      } else {
        id_buffer_.as<std::int64_t>()[at(i, c)] = id;
      }
    }
  }
  const auto matrix = [&](GuardBuffer& buffer, tileloss_dtype dtype) {
    tileloss_matrix m = tileloss_make_matrix(buffer.data(), dtype, rows, k, spec.is_transposed ? 1 : k);
    m.col_stride = spec.is_transposed ? rows : 1;
    return m;
  };
  args().teacher_ids = matrix(id_buffer_, spec.int32_ids ? TILELOSS_INT32 : TILELOSS_INT64);
  args().teacher_logprobs = matrix(log_q_buffer_, TILELOSS_FLOAT32);
  if (!spec.row.extra_outputs) return;
  for (tileloss_vector tileloss_args::*output : {&tileloss_args::divergence, &tileloss_args::teacher_entropy}) {
    outputs_.emplace_back(index(rows) * sizeof(float), Flush::kRight, 0);
    args().*output = tileloss_make_vector(outputs_.back().data(), TILELOSS_FLOAT32, rows);
  }
}

std::size_t SparseTeacherCase::at(std::int64_t row, std::int64_t k) const {
  return index(spec_.is_transposed ? k * spec_.row.rows + row : row * spec_.columns + k);
}

CheckResult SparseTeacherCase::check(const tileloss_sparse_distillation_options& options) const {
  const reference::DistillationOptions oracle_options = make_oracle_options(options);
  const auto tail = static_cast<reference::Tail>(options.tail);
  const tileloss_args& args = row_.args();
  const auto copy = [](std::span<const double> values) { return std::vector<double>(values.begin(), values.end()); };
  const tools::SparseOracleCase oracle_case({oracle_options, tail}, {row_.labels().begin(), row_.labels().end()},
                                            copy(row_.token_weights()), copy(row_.loss_grad()));
  Judgement judgement(row_, oracle_options, args);
  tools::OutputMetric divergence("divergence"), entropy("teacher_entropy");
  tools::SparseRow sparse;
  reference::GradientRow gradient;
  for (std::int64_t i = 0; i < spec_.row.rows; ++i) {
    if (judgement.oracle().is_ignored(i)) {
      judgement.ignored(i);
      if (present(args.divergence)) divergence.add(i, output_at(args.divergence, i), 0, 0);
      continue;
    }
    std::vector<std::int64_t> ids;
    std::vector<double> log_q;
    for (std::int64_t k = 0; k < spec_.columns; ++k) {
      ids.push_back(ids_[at(i, k)]);
      log_q.push_back(log_q_[at(i, k)]);
    }
    sparse.compute(oracle_case.options(), row_.logits_row(i), ids, log_q, row_.labels()[index(i)]);
    oracle_case.row_gradient(i, sparse, gradient);
    const double magnitude = sparse.output_magnitude();
    judgement.add(i, sparse.student(), oracle_case.row_loss(i, sparse), magnitude * sparse.square(), gradient.gradient,
                  gradient.magnitude, judgement.weight(i), &sparse.values());
    if (!present(args.divergence)) continue;
    divergence.add(i, output_at(args.divergence, i), sparse.expected().divergence, magnitude);
    entropy.add(i, output_at(args.teacher_entropy, i), sparse.expected().teacher_entropy, magnitude);
  }
  std::vector<tools::Gate> more;
  if (present(args.divergence)) {
    more = divergence.gates();
    const std::vector<tools::Gate> others = entropy.gates();
    more.insert(more.end(), others.begin(), others.end());
  }
  return judgement.finish(oracle_options.reduction == reference::Reduction::kNone, more);
}

}  // namespace tileloss::test
