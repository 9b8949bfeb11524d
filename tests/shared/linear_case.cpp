#include "tests/shared/linear_case.h"

#include <algorithm>
#include <cmath>

#include "judge/gates/rows.h"
#include "judge/oracles/policy.h"
#include "support/synthetic.h"

namespace tileloss::test {
namespace {

using oracle::NumberFormat;
using oracle::StoredMatrix;

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

std::vector<unsigned char> copy_of(const GuardBuffer& buffer) {
  return {buffer.as<unsigned char>(), buffer.as<unsigned char>() + buffer.bytes()};
}

NumberFormat compute_format(const LinearCaseSpec& spec) {
  if (spec.compute_dtype == TILELOSS_FLOAT32) return NumberFormat::kFloat32;
  if (spec.compute_dtype == TILELOSS_BFLOAT16) return NumberFormat::kBfloat16;
  const bool both = spec.format == NumberFormat::kBfloat16 && spec.head_format == NumberFormat::kBfloat16;
  return both ? NumberFormat::kBfloat16 : NumberFormat::kFloat32;
}

std::int64_t valid_rows_of(const LinearCaseSpec& spec) {
  return spec.row.valid_vocab < 0 ? spec.row.vocab : spec.row.valid_vocab;
}

}  // namespace

// ------------------------------------------------------------------------------------------------------------- matrix

GuardedMatrix::GuardedMatrix(std::int64_t rows, std::int64_t cols, NumberFormat format, MatrixLayout layout, Flush flush,
                             std::int64_t misalignment)
    : view_{nullptr, format, rows, cols, cols, 1} {
  if (layout == MatrixLayout::kTransposed) {
    view_.row_stride = 1;
    view_.col_stride = rows + 3;
  } else if (layout == MatrixLayout::kGaps) {
    view_.col_stride = 2;
    view_.row_stride = 2 * cols + 5;
  }
  const std::size_t element = oracle::format_info(format).bytes;
  const std::int64_t last = (rows - 1) * view_.row_stride + (cols - 1) * view_.col_stride;
  buffer_ = GuardBuffer(rows == 0 ? 0 : index(last + 1) * element, flush, index(misalignment) * element);
  view_.data = buffer_.data();
}

tileloss_matrix GuardedMatrix::abi() const {
  tileloss_matrix matrix = tileloss_make_matrix(view_.data, abi_dtype(view_.format), view_.rows, view_.cols, view_.row_stride);
  matrix.col_stride = view_.col_stride;
  return matrix;
}

void GuardedMatrix::set(std::int64_t i, std::int64_t j, double value) {
  encode_at(view_.format, buffer_.data(), i * view_.row_stride + j * view_.col_stride, value);
}

bool GuardedMatrix::gaps_intact() const {
  const std::size_t element = oracle::format_info(view_.format).bytes;
  std::vector<bool> is_gap(buffer_.bytes() / element, true);
  for (std::int64_t i = 0; i < view_.rows; ++i) {
    for (std::int64_t j = 0; j < view_.cols; ++j) is_gap[index(i * view_.row_stride + j * view_.col_stride)] = false;
  }
  const auto* bytes = buffer_.as<unsigned char>();
  for (std::size_t at = 0; at < is_gap.size(); ++at) {
    const auto* gap = bytes + at * element;
    if (is_gap[at] && !std::all_of(gap, gap + element, [](unsigned char byte) { return byte == 0xff; })) return false;
  }
  return buffer_.canary_intact();
}

// --------------------------------------------------------------------------------------------------------------- case

LogitsCaseSpec LinearCase::without_logits(LogitsCaseSpec spec) {
  spec.dlogits = false;
  return spec;
}

LinearCase::LinearCase(const LinearCaseSpec& spec)
    : spec_(spec),
      row_(without_logits(spec.row)),
      hidden_(spec.row.rows, spec.hidden, spec.format, spec.hidden_layout, spec.row.flush, spec.row.misalignment),
      head_(spec.row.vocab, spec.hidden, spec.head_format, spec.head_layout, spec.row.flush, spec.row.misalignment),
      bias_(spec.bias ? spec.row.vocab : 0, 1, spec.bias_format, MatrixLayout::kRows, spec.row.flush, 0),
      operands_([this] {
        for (const std::int64_t label : row_.labels()) used_.push_back(label == spec_.row.ignore_index ? 0 : 1);
        fill_operands();
        std::vector<float> bias;
        for (std::int64_t v = 0; v < bias_.view().rows; ++v) bias.push_back(static_cast<float>(bias_.view().at(v, 0)));
        return make_operands(hidden_.view(), head_.view(), valid_rows_of(spec_), bias, compute_format(spec_), used_, 1);
      }()),
      norms_(operands_) {
  tileloss_args& args = row_.args();
  args.logits = {};
  hand_over(hidden_, args.hidden, args.hidden_r);
  hand_over(head_, args.head, args.head_r);
  if (spec.bias) args.bias = tileloss_make_vector(bias_.view().data, abi_dtype(spec.bias_format), spec.row.vocab);
  make_gradients();
}

// Rows that are not in use, and the head's from valid_vocab on, stay NaN.
void LinearCase::fill_operands() {
  tools::Random random(spec_.row.seed, tools::Stream::kLogits, -1);
  const double head_std = spec_.logit_std / std::sqrt(static_cast<double>(spec_.hidden));
  for (std::int64_t i = 0; i < spec_.row.rows; ++i) {
    for (std::int64_t h = 0; h < spec_.hidden; ++h) {
      const double value = random.next_normal();
      if (used_[index(i)] != 0) hidden_.set(i, h, value);
    }
  }
  for (std::int64_t v = 0; v < valid_rows_of(spec_); ++v) {
    for (std::int64_t h = 0; h < spec_.hidden; ++h) head_.set(v, h, head_std * random.next_normal());
    if (spec_.bias) bias_.set(v, 0, spec_.bias_of ? spec_.bias_of(v) : random.next_normal());
  }
  if (spec_.label_logit > 0) point_at_labels();
  hidden_.buffer().make_read_only();
  head_.buffer().make_read_only();
  if (spec_.bias) bias_.buffer().make_read_only();
}

void LinearCase::point_at_labels() {
  for (std::int64_t i = 0; i < spec_.row.rows; ++i) {
    if (used_[index(i)] == 0) continue;
    const std::int64_t label = row_.labels()[index(i)];
    double square = 0;
    for (std::int64_t h = 0; h < spec_.hidden; ++h) square += head_.view().at(label, h) * head_.view().at(label, h);
    for (std::int64_t h = 0; h < spec_.hidden; ++h) hidden_.set(i, h, spec_.label_logit / square * head_.view().at(label, h));
  }
}

void LinearCase::hand_over(const GuardedMatrix& matrix, tileloss_matrix& own, tileloss_matrix& low_rank) const {
  own = matrix.abi();
  if (spec_.rank == 0) return;
  low_rank = own;
  own.cols -= spec_.rank;
  low_rank.cols = spec_.rank;
  const auto bytes = static_cast<std::int64_t>(oracle::format_info(matrix.view().format).bytes);
  low_rank.data = static_cast<char*>(low_rank.data) + own.cols * own.col_stride * bytes;
}

void LinearCase::make_gradients() {
  const LogitsCaseSpec& row = spec_.row;
  tileloss_args& args = row_.args();
  if (spec_.dhidden) {
    const NumberFormat format = spec_.float32_dhidden ? NumberFormat::kFloat32 : spec_.format;
    dhidden_ = GuardedMatrix(row.rows, spec_.hidden, format, spec_.hidden_layout, row.flush, row.misalignment);
    hand_over(dhidden_, args.dhidden, args.dhidden_r);
  }
  if (spec_.dhead) {
    const NumberFormat format = spec_.float32_dhead ? NumberFormat::kFloat32 : spec_.head_format;
    dhead_ = GuardedMatrix(row.vocab, spec_.hidden, format, spec_.head_layout, row.flush, row.misalignment);
    hand_over(dhead_, args.dhead, args.dhead_r);
  }
  if (spec_.dbias) {
    const NumberFormat format = spec_.float32_dbias ? NumberFormat::kFloat32 : spec_.bias_format;
    dbias_ = GuardedMatrix(row.vocab, 1, format, MatrixLayout::kRows, row.flush, 0);
    args.dbias = tileloss_make_vector(dbias_.view().data, abi_dtype(format), row.vocab);
  }
  prefill();
}

void LinearCase::prefill() {
  if (!spec_.accumulate) return;
  tools::Random random(spec_.row.seed, tools::Stream::kWeights, -1);
  for (GuardedMatrix* matrix : {&dhead_, &dbias_}) {
    if (!*matrix) continue;
    for (std::int64_t i = 0; i < matrix->view().rows; ++i) {
      for (std::int64_t j = 0; j < matrix->view().cols; ++j) matrix->set(i, j, 0.1 * random.next_normal());
    }
    (matrix == &dhead_ ? dhead_before_ : dbias_before_) = copy_of(matrix->buffer());
  }
}

void LinearCase::reset() {
  row_.reset();
  for (GuardedMatrix* matrix : {&dhidden_, &dhead_, &dbias_}) {
    if (*matrix) matrix->buffer().fill_ones();
  }
  prefill();
}

std::vector<std::int64_t> LinearCase::used_rows() const {
  std::vector<std::int64_t> rows;
  for (std::size_t i = 0; i < used_.size(); ++i) {
    if (used_[i] != 0) rows.push_back(static_cast<std::int64_t>(i));
  }
  return rows;
}

std::vector<unsigned char> LinearCase::gradient_bytes() const {
  std::vector<unsigned char> bytes;
  for (const GuardedMatrix* matrix : {&dhidden_, &dhead_, &dbias_}) {
    if (!*matrix) continue;
    const std::vector<unsigned char> part = copy_of(matrix->buffer());
    bytes.insert(bytes.end(), part.begin(), part.end());
  }
  return bytes;
}

CheckResult LinearCase::check(const tools::Oracle& oracle, const std::function<void(tools::GivenRow& given)>& add_target) const {
  tools::LinearOracleCase oracle_case(operands_, norms_, {spec_.dhidden, spec_.dhead, spec_.dbias});
  const auto rows = [&](const RowWork& work) {
    for_each_linear_row(operands_, norms_, used_rows(), [&](const tools::LogitsRow& row) {
      tools::GivenRow given{row, row_.labels()[index(row.row)]};
      if (add_target) add_target(given);
      work(given);
    });
  };
  CheckResult result = check_rows(row_, oracle, rows, &oracle_case);
  oracle_case.finish();
  const auto before = [](const GuardedMatrix& matrix, const std::vector<unsigned char>& bytes) {
    StoredMatrix view = matrix.view();
    view.data = bytes.empty() ? nullptr : bytes.data();
    return view;
  };
  using tools::LinearOutput;
  if (spec_.dhidden) append(result.gates, oracle_case.judge(LinearOutput::kDhidden, dhidden_.view()));
  if (spec_.dhead) append(result.gates, oracle_case.judge(LinearOutput::kDhead, dhead_.view(), before(dhead_, dhead_before_)));
  if (spec_.dbias) append(result.gates, oracle_case.judge(LinearOutput::kDbias, dbias_.view(), before(dbias_, dbias_before_)));
  bool intact = true;
  for (const GuardedMatrix* matrix : {&dhidden_, &dhead_, &dbias_}) intact = intact && (!*matrix || matrix->gaps_intact());
  result.gates.push_back(tools::make_gate("surroundings_of_matrices_written", intact ? 0.0 : 1.0, 0.0));
  return result;
}

// ------------------------------------------------------------------------------------------------------------- losses

CheckResult check_linear_cross_entropy(const LinearCase& c, const tileloss_cross_entropy_options& options) {
  return c.check(*make_cross_entropy(tools::Function("cross_entropy", &options), c.row().oracle_tensors()));
}

CheckResult check_linear_logprobs(const LinearCase& c, const tileloss_logprobs_options& options) {
  return c.check(*make_logprobs(tools::Function("logprobs", &options), c.row().oracle_tensors()));
}

LinearPolicy::LinearPolicy(LinearCase& c, const tools::PolicyDraw& draw, const tileloss_policy_loss_options& options)
    : case_(c), options_(options), tensors_(tools::draw_policy_layout(draw)), rows_(index(draw.rows)) {
  oracle::SoftmaxRow softmax;
  for_each_linear_row(c.operands(), c.norms(), c.used_rows(), [&](const tools::LogitsRow& row) {
    softmax.compute(make_transform(options.logit), row.logits, c.row().labels()[index(row.row)]);
    rows_[index(row.row)] = tools::summarize(softmax, row);
  });
  tools::draw_policy_logps(draw, make_oracle_options(options, tensors_.sequence_length), c.used(), rows_, tensors_);
  tensors_.add_to(c.args());
}

CheckResult LinearPolicy::check() const {
  tools::OracleTensors tensors = case_.row().oracle_tensors();
  tensors.policy = tensors_;
  tensors.used.assign(case_.used().begin(), case_.used().end());
  tensors.summaries = rows_;
  return case_.check(*make_policy_loss(tools::Function("policy_loss", &options_), tensors));
}

}  // namespace tileloss::test
