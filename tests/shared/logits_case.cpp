#include "tests/shared/logits_case.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "support/arg_slots.h"
#include "support/synthetic.h"

namespace tileloss::test {
namespace {

constexpr std::int64_t kUpstreamStride = 3;

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

double as_float(double value) { return static_cast<double>(static_cast<float>(value)); }

}  // namespace

LogitsCase::LogitsCase(const LogitsCaseSpec& spec) : LogitsCase(spec, Open{}) { seal(); }

LogitsCase::LogitsCase(const LogitsCaseSpec& spec, Open) : spec_(spec) {
  tileloss_args_init(&args_);
  make_labels();
  make_logits();
  const std::int64_t rows = spec_.rows;
  if (spec_.token_weights) {
    tools::Random random(spec_.seed, tools::Stream::kWeights, 0);
    for (std::int64_t i = 0; i < rows; ++i) token_weights_.push_back(as_float(0.25 + 1.75 * random.next_uniform()));
    args_.token_weights = make_input(token_weights_, 1);
  }
  if (spec_.class_weights) {
    tools::Random random(spec_.seed, tools::Stream::kWeights, 1);
    for (std::int64_t j = 0; j < valid_columns(); ++j) class_weights_.push_back(as_float(0.5 + random.next_uniform()));
    args_.class_weights = make_input(class_weights_, 1);
  }
  args_.loss_grad = make_upstream(spec_.loss_grad, spec_.per_row_loss ? rows : 1, 0, loss_grad_);
  args_.logp_grad = make_upstream(spec_.logp_grad, rows, 1, logp_grad_);
  args_.lse_grad = make_upstream(spec_.lse_grad, rows, 2, lse_grad_);
  args_.entropy_grad = make_upstream(spec_.entropy_grad, rows, 3, entropy_grad_);
  args_.mean_logit_grad = make_upstream(spec_.mean_logit_grad, rows, 4, mean_logit_grad_);
  make_outputs();
}

LogitsCase::LogitsCase(const LogitsCaseSpec& spec, const std::function<double(std::int64_t, std::int64_t)>& logit)
    : LogitsCase(spec, Open{}) {
  for (std::int64_t i = 0; i < spec_.rows; ++i) {
    for (std::int64_t j = 0; j < spec_.vocab; ++j) set_logit(i, j, logit(i, j));
  }
  seal();
}

std::size_t LogitsCase::matrix_bytes() const {
  if (spec_.rows == 0) return 0;
  return index((spec_.rows - 1) * row_stride() + spec_.vocab) * oracle::format_info(spec_.format).bytes;
}

tileloss_matrix LogitsCase::make_matrix(const GuardBuffer& buffer) const {
  return tileloss_make_matrix(buffer.data(), abi_dtype(spec_.format), spec_.rows, spec_.vocab, row_stride());
}

GuardBuffer& LogitsCase::add_buffer(std::size_t bytes, std::size_t misalignment) {
  return inputs_.emplace_back(bytes, spec_.flush, misalignment);
}

void LogitsCase::make_labels() {
  labels_ = tools::make_labels({valid_columns(), spec_.ignore_prob, spec_.ignore_index}, spec_.seed, spec_.rows);
  const std::size_t bytes = spec_.int32_labels ? sizeof(std::int32_t) : sizeof(std::int64_t);
  GuardBuffer& buffer = add_buffer(labels_.size() * bytes);
  for (std::size_t i = 0; i < labels_.size(); ++i) {
    if (spec_.int32_labels) {
      buffer.as<std::int32_t>()[i] = static_cast<std::int32_t>(labels_[i]);
    } else {
      buffer.as<std::int64_t>()[i] = labels_[i];
    }
  }
  buffer.make_read_only();
  args_.labels = tileloss_make_vector(buffer.data(), spec_.int32_labels ? TILELOSS_INT32 : TILELOSS_INT64, spec_.rows);
}

void LogitsCase::make_logits() {
  const auto distribution = tools::find_distribution(spec_.distribution);
  if (!distribution) throw std::invalid_argument("unknown distribution " + spec_.distribution);
  const std::size_t bytes = oracle::format_info(spec_.format).bytes;
  logits_ = GuardBuffer(matrix_bytes(), spec_.flush, index(spec_.misalignment) * bytes);
  args_.logits = make_matrix(logits_);
  for (std::int64_t i = 0; i < spec_.rows; ++i) {
    const std::int64_t label = labels_[index(i)];
    if (label == spec_.ignore_index) continue;  // stays NaN
    auto* row = logits_.as<unsigned char>() + index(i * row_stride()) * bytes;
    tools::fill_logits_row(*distribution, spec_.seed, i, label, spec_.format, row, valid_columns());
  }
}

void LogitsCase::seal() {
  original_.assign(logits_.as<unsigned char>(), logits_.as<unsigned char>() + logits_.bytes());
  if (!spec_.in_place) logits_.make_read_only();
}

void LogitsCase::set_logit(std::int64_t row, std::int64_t column, double value) {
  auto* start = logits_.as<unsigned char>() + index(row * row_stride()) * oracle::format_info(spec_.format).bytes;
  oracle::encode_at(spec_.format, start, column, value);
}

void LogitsCase::reset() {
  for (GuardBuffer& output : outputs_) output.fill_ones();
  if (dlogits_) dlogits_.fill_ones();
  if (spec_.in_place && !original_.empty()) std::memcpy(logits_.data(), original_.data(), original_.size());
}

void LogitsCase::set_allowed(std::vector<std::int32_t> words) {
  allowed_ = {(spec_.vocab + 31) / 32, false, std::move(words)};
  args_.allowed = tileloss_make_matrix(allowed_.words.data(), TILELOSS_INT32, spec_.rows, allowed_.row_words, allowed_.row_words);
}

tileloss_vector LogitsCase::make_input(std::span<const double> values, std::int64_t stride) {
  const std::size_t count = values.empty() ? 0 : (values.size() - 1) * index(stride) + 1;
  GuardBuffer& buffer = add_buffer(count * sizeof(float));
  for (std::size_t i = 0; i < values.size(); ++i) buffer.as<float>()[i * index(stride)] = static_cast<float>(values[i]);
  buffer.make_read_only();
  tileloss_vector vector = tileloss_make_vector(buffer.data(), TILELOSS_FLOAT32, static_cast<std::int64_t>(values.size()));
  vector.stride = stride;
  return vector;
}

tileloss_vector LogitsCase::make_upstream(Upstream kind, std::int64_t size, std::int64_t stream_row,
                                          std::vector<double>& values) {
  if (kind == Upstream::kAbsent) return {};
  tools::Random random(spec_.seed, tools::Stream::kUpstream, stream_row);
  const bool per_row = kind == Upstream::kPerRow || kind == Upstream::kStrided;
  for (std::int64_t i = 0; i < (per_row ? size : 1); ++i) values.push_back(as_float(0.5 + random.next_normal()));
  if (per_row) return make_input(values, kind == Upstream::kStrided ? kUpstreamStride : 1);
  tileloss_vector vector = make_input(values, 1);
  vector.size = size;
  vector.stride = size == 1 ? 1 : 0;
  values.assign(index(size), values[0]);
  return vector;
}

tileloss_vector LogitsCase::make_output(std::int64_t size, tileloss_dtype dtype) {
  const GuardBuffer& buffer = outputs_.emplace_back(index(size) * tools::element_bytes(dtype), spec_.flush);
  return tileloss_make_vector(buffer.data(), dtype, size);
}

void LogitsCase::make_outputs() {
  const std::int64_t rows = spec_.rows;
  if (spec_.loss) args_.loss = make_output(spec_.per_row_loss ? rows : 1, TILELOSS_FLOAT32);
  if (spec_.row_outputs) {
    args_.logp = make_output(rows, TILELOSS_FLOAT32);
    args_.lse = make_output(rows, TILELOSS_FLOAT32);
  }
  if (spec_.extra_outputs) {
    args_.entropy = make_output(rows, TILELOSS_FLOAT32);
    args_.argmax = make_output(rows, TILELOSS_INT64);
    args_.correct = make_output(rows, TILELOSS_UINT8);
    args_.log_sum_sq_probs = make_output(rows, TILELOSS_FLOAT32);
    if (!spec_.class_weights) args_.mean_logit = make_output(rows, TILELOSS_FLOAT32);
  }
  if (!spec_.dlogits) return;
  if (spec_.in_place) {
    args_.dlogits = args_.logits;
    return;
  }
  const std::size_t bytes = oracle::format_info(spec_.format).bytes;
  dlogits_ = GuardBuffer(matrix_bytes(), spec_.flush, index(spec_.misalignment) * bytes);
  args_.dlogits = make_matrix(dlogits_);
}

void LogitsCase::add_divergence_outputs() {
  args_.divergence = make_output(spec_.rows, TILELOSS_FLOAT32);
  args_.teacher_entropy = make_output(spec_.rows, TILELOSS_FLOAT32);
  args_.agreement = make_output(spec_.rows, TILELOSS_UINT8);
}

oracle::RowUpstream LogitsCase::upstream(std::int64_t row) const {
  const auto value = [&](const std::vector<double>& values) { return values.empty() ? 0.0 : values[index(row)]; };
  return {value(logp_grad_), value(lse_grad_), value(entropy_grad_), value(mean_logit_grad_)};
}

tools::OracleTensors LogitsCase::oracle_tensors() const {
  tools::OracleTensors tensors;
  tensors.labels = labels_;
  tensors.token_weights = token_weights_;
  tensors.class_weights = class_weights_;
  tensors.loss_grad = loss_grad_;
  tensors.logp_grad = logp_grad_;
  tensors.lse_grad = lse_grad_;
  tensors.entropy_grad = entropy_grad_;
  tensors.mean_logit_grad = mean_logit_grad_;
  tensors.allowed = allowed_;
  return tensors;
}

std::vector<double> LogitsCase::logits_row(std::int64_t row) const {
  std::vector<double> values(index(valid_columns()));
  const std::size_t bytes = oracle::format_info(spec_.format).bytes;
  oracle::decode_row(spec_.format, original_.data() + index(row * row_stride()) * bytes, values);
  return values;
}

const void* LogitsCase::dlogits_row(std::int64_t row) const {
  const std::size_t bytes = oracle::format_info(spec_.format).bytes;
  return static_cast<const unsigned char*>(args_.dlogits.data) + index(row * row_stride()) * bytes;
}

bool LogitsCase::surroundings_intact() const {
  const auto intact = [](const GuardBuffer& buffer) { return buffer.canary_intact(); };
  if (!std::all_of(outputs_.begin(), outputs_.end(), intact)) return false;
  if (!spec_.dlogits) return true;
  if (!(spec_.in_place ? logits_ : dlogits_).canary_intact()) return false;
  const std::size_t bytes = oracle::format_info(spec_.format).bytes;
  for (std::int64_t i = 0; i + 1 < spec_.rows; ++i) {
    const auto* gap = static_cast<const unsigned char*>(dlogits_row(i)) + index(spec_.vocab) * bytes;
    if (!std::all_of(gap, gap + index(spec_.stride_extra) * bytes, [](unsigned char byte) { return byte == 0xff; })) return false;
  }
  return true;
}

}  // namespace tileloss::test
