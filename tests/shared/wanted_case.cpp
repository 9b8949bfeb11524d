#include "tests/shared/wanted_case.h"

#include "judge/inputs/targets.h"
#include "support/synthetic.h"

namespace tileloss::test {
namespace {

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

}  // namespace

// ------------------------------------------------------------------------------------------------------------ soft labels

// Padding, gaps and rows that are not in use stay NaN.
SoftLabelCase::SoftLabelCase(const SoftLabelSpec& spec)
    : spec_(spec),
      row_(spec.row),
      probs_(index(spec.row.rows * (spec.row.vocab + spec.stride_extra)) * oracle::format_info(spec.probs_format).bytes,
             spec.row.flush) {
  const std::int64_t stride = spec.row.vocab + spec.stride_extra;
  for (std::int64_t i = 0; i < spec.row.rows; ++i) {
    if (row_.labels()[index(i)] == spec.row.ignore_index) continue;
    tools::Random random(spec.row.seed, tools::Stream::kWeights, i);
    std::vector<double> probs(index(row_.valid_columns()));
    tools::draw_probabilities(random, spec.zeros, probs);
    for (std::size_t j = 0; j < probs.size(); ++j) set_prob(i, static_cast<std::int64_t>(j), probs[j]);
  }
  args().target_probs = tileloss_make_matrix(probs_.data(), abi_dtype(spec.probs_format), spec.row.rows, spec.row.vocab, stride);
}

void SoftLabelCase::set_prob(std::int64_t row, std::int64_t column, double value) {
  encode_at(spec_.probs_format, probs_.data(), row * (spec_.row.vocab + spec_.stride_extra) + column, value);
}
double SoftLabelCase::prob(std::int64_t row, std::int64_t column) const {
  return oracle::decode_at(spec_.probs_format, probs_.data(), row * (spec_.row.vocab + spec_.stride_extra) + column);
}

CheckResult SoftLabelCase::check(const tileloss_soft_cross_entropy_options& options) const {
  const tools::Function function("soft_cross_entropy", &options);
  return check_stored_rows(row_, function, *make_soft_cross_entropy(function, row_.oracle_tensors()), [&](std::int64_t row) {
    TargetValues target{std::vector<double>(index(row_.valid_columns())), {}};
    for (std::size_t j = 0; j < target.values.size(); ++j) target.values[j] = prob(row, static_cast<std::int64_t>(j));
    return target;
  });
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
  const std::int64_t rows = spec.row.rows, k = spec.columns;
  const std::size_t id_bytes = spec.int32_ids ? 4 : 8;
  id_buffer_ = GuardBuffer(index(rows * k) * id_bytes, spec.row.flush);
  log_q_buffer_ = GuardBuffer(index(rows * k) * sizeof(float), spec.row.flush);
  ids_.assign(index(rows * k), -1);
  log_q_.assign(index(rows * k), 0);
  for (std::int64_t i = 0; i < rows; ++i) {
    tools::Random random(spec.row.seed, tools::Stream::kWeights, i);
    tools::TargetRow drawn{
        {}, std::vector<double>(index(k)), std::vector<std::int64_t>(index(k)), index(row_.labels()[index(i)])};
    tools::draw_columns(random, row_.valid_columns(), spec.teacher_std, drawn);
    for (std::int64_t c = 0; c < k; ++c) {
      const std::int64_t id = drawn.ids[index(c)];
      if (id < 0 || (spec.has_gaps && random.next_below(5) == 0)) continue;
      const auto log_q = static_cast<float>(drawn.target[index(c)]);
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
  if (spec.row.extra_outputs) row_.add_divergence_outputs();
}

std::size_t SparseTeacherCase::at(std::int64_t row, std::int64_t k) const {
  return index(spec_.is_transposed ? k * spec_.row.rows + row : row * spec_.columns + k);
}

CheckResult SparseTeacherCase::check(const tileloss_sparse_distillation_options& options) const {
  const tools::Function function("sparse_distillation", &options);
  return check_stored_rows(row_, function, *make_sparse_distillation(function, row_.oracle_tensors()), [&](std::int64_t row) {
    TargetValues target;
    for (std::int64_t k = 0; k < spec_.columns; ++k) {
      target.ids.push_back(ids_[at(row, k)]);
      target.values.push_back(log_q_[at(row, k)]);
    }
    return target;
  });
}

}  // namespace tileloss::test
