#include "roofs/unfused_baseline.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/number_formats.h"

namespace tileloss::tools {
namespace {

using oracle::NumberFormat;

float load(NumberFormat format, const void* row, int64_t column) {
  if (format == NumberFormat::kFloat32) return static_cast<const float*>(row)[column];
  const uint16_t bits = static_cast<const uint16_t*>(row)[column];
  return format == NumberFormat::kBfloat16 ? to_float(impl::Bfloat16{bits}) : to_float(impl::Float16{bits});
}

void store(NumberFormat format, void* row, int64_t column, float value) {
  if (format == NumberFormat::kFloat32) {
    static_cast<float*>(row)[column] = value;
  } else if (format == NumberFormat::kBfloat16) {
    static_cast<uint16_t*>(row)[column] = impl::from_float<impl::Bfloat16>(value).bits;
  } else {
    static_cast<uint16_t*>(row)[column] = impl::from_float<impl::Float16>(value).bits;
  }
}

}  // namespace

std::vector<MemoryNeed> UnfusedBaseline::needs(int64_t rows, int64_t cols) {
  const double matrix = 4.0 * static_cast<double>(rows) * static_cast<double>(cols);
  return {{"float32 logits", matrix}, {"float32 softmax", matrix}, {"the reference's rows", 12.0 * static_cast<double>(rows)}};
}

UnfusedBaseline::UnfusedBaseline(const Function& function, NumberFormat format, int64_t rows, int64_t cols, int threads)
    : format_(format),
      rows_(rows),
      cols_(cols),
      valid_(function.get_integer("valid_vocab", -1)),
      ignore_index_(function.get_integer("ignore_index", -100)),
      scale_(static_cast<float>(function.get("logit_scale", 1))),
      softcap_(static_cast<float>(function.get("softcap", 0))),
      temperature_(static_cast<float>(function.get("temperature", 1))),
      smoothing_(static_cast<float>(function.get("label_smoothing", 0))),
      z_loss_(static_cast<float>(function.get("z_loss", 0))),
      sign_(function.is_loss() ? 1.0F : -1.0F),
      mean_(function.get_choice("reduction", "sum") == "mean"),
      num_items_(function.get("num_items", std::numeric_limits<double>::quiet_NaN())),
      team_(threads),
      z_(rows * cols * 4, "float32 logits"),
      softmax_(rows * cols * 4, "float32 softmax"),
      logp_(static_cast<size_t>(rows)),
      lse_(static_cast<size_t>(rows)),
      mean_log_softmax_(static_cast<size_t>(rows)) {
  if (valid_ < 0) valid_ = cols;
  if (function.get_choice("temperature_on", "logits") == "logprob") std::swap(temperature_, logp_temperature_);
}

void UnfusedBaseline::transform_row(int64_t row, const void* logits) {
  const void* from = static_cast<const char*>(logits) + row * cols_ * static_cast<int64_t>(format_info(format_).bytes);
  float* z = z_.as<float>() + row * cols_;
  for (int64_t j = 0; j < valid_; ++j) {
    float x = load(format_, from, j) * scale_;
    if (softcap_ > 0) x = softcap_ * std::tanh(x / softcap_);
    z[j] = x / temperature_;
  }
}

void UnfusedBaseline::softmax_row(int64_t row, int64_t label) {
  const float* z = z_.as<float>() + row * cols_;
  float* p = softmax_.as<float>() + row * cols_;
  float max = -std::numeric_limits<float>::infinity();
  for (int64_t j = 0; j < valid_; ++j) max = std::max(max, z[j]);
  double sum = 0;
  double sum_z = 0;
  for (int64_t j = 0; j < valid_; ++j) {
    p[j] = std::exp(z[j] - max);
    sum += p[j];
    sum_z += z[j];
  }
  const auto inverse = static_cast<float>(1 / sum);
  for (int64_t j = 0; j < valid_; ++j) p[j] *= inverse;
  const size_t i = static_cast<size_t>(row);
  lse_[i] = max + static_cast<float>(std::log(sum));
  logp_[i] = (z[label] - lse_[i]) / logp_temperature_;
  mean_log_softmax_[i] = static_cast<float>(sum_z / static_cast<double>(valid_)) - lse_[i];
}

double UnfusedBaseline::row_loss(int64_t row) const {
  const size_t i = static_cast<size_t>(row);
  const double smoothed = static_cast<double>(smoothing_) * -mean_log_softmax_[i];
  return sign_ * (1 - smoothing_) * -logp_[i] + smoothed + static_cast<double>(z_loss_) * lse_[i] * lse_[i];
}

void UnfusedBaseline::set_denominator(const int64_t* labels) {
  double count = num_items_;
  if (std::isnan(count)) count = static_cast<double>(rows_ - std::count(labels, labels + rows_, ignore_index_));
  factor_ = !mean_ ? 1.0F : count == 0 ? 0.0F : static_cast<float>(1 / count);
}

double UnfusedBaseline::forward(const void* logits, const int64_t* labels) {
  set_denominator(labels);
  team_.for_each(rows_, [&](int64_t row, int) {
    if (labels[row] != ignore_index_) transform_row(row, logits);
  });
  team_.for_each(rows_, [&](int64_t row, int) {
    if (labels[row] != ignore_index_) softmax_row(row, labels[row]);
  });
  double loss = 0;
  for (int64_t row = 0; row < rows_; ++row) loss += labels[row] != ignore_index_ ? row_loss(row) : 0;
  return loss * factor_;
}

void UnfusedBaseline::gradient_row(int64_t row, int64_t label, const void* logits, void* dlogits) const {
  const int64_t offset = row * cols_ * static_cast<int64_t>(format_info(format_).bytes);
  const void* x = static_cast<const char*>(logits) + offset;
  void* out = static_cast<char*>(dlogits) + offset;
  const float* p = softmax_.as<float>() + row * cols_;
  const float target = sign_ * (1 - smoothing_) / logp_temperature_;
  const float prob = target + smoothing_ + 2 * z_loss_ * lse_[static_cast<size_t>(row)];
  const float uniform = smoothing_ / static_cast<float>(valid_);
  for (int64_t j = 0; j < valid_; ++j) {
    float gradient = p[j] * prob - uniform - (j == label ? target : 0.0F);
    if (softcap_ > 0) {
      const float t = std::tanh(load(format_, x, j) * scale_ / softcap_);
      gradient *= 1 - t * t;
    }
    store(format_, out, j, gradient * scale_ / temperature_ * factor_);
  }
  for (int64_t j = valid_; j < cols_; ++j) store(format_, out, j, 0);
}

double UnfusedBaseline::value_and_grad(const void* logits, const int64_t* labels, void* dlogits) {
  const double loss = forward(logits, labels);
  const int64_t row_bytes = cols_ * static_cast<int64_t>(format_info(format_).bytes);
  team_.for_each(rows_, [&](int64_t row, int) {
    if (labels[row] != ignore_index_) {
      gradient_row(row, labels[row], logits, dlogits);
    } else {
      std::memset(static_cast<char*>(dlogits) + row * row_bytes, 0, static_cast<size_t>(row_bytes));
    }
  });
  return loss;
}

}  // namespace tileloss::tools
