#include "oracle/linear.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace tileloss::oracle {
namespace {

// Pieces of the vocabulary or of H that threads take, in elements: whole tiles, and whole cache lines of every type.
constexpr std::int64_t kGranule = 192;

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }
constexpr std::size_t index(LinearOutput output) { return static_cast<std::size_t>(output); }

constexpr auto kDhidden = index(LinearOutput::kDhidden), kDhead = index(LinearOutput::kDhead),
               kDbias = index(LinearOutput::kDbias);

// What a low-rank part's gradient is among its own.
LinearOutput of_part(LinearOutput output) { return is_by_token(output) ? LinearOutput::kDhidden : LinearOutput::kDhead; }

float as_seen(NumberFormat compute, double value) {
  return static_cast<float>(compute == NumberFormat::kFloat32 ? value : decode(compute, encode(compute, value)));
}

std::vector<float> gather(std::span<const float> values, std::int64_t width, std::span<const std::int64_t> rows) {
  std::vector<float> gathered;
  gathered.reserve(rows.size() * index(width));
  for (const std::int64_t row : rows) {
    const auto begin = values.begin() + row * width;
    gathered.insert(gathered.end(), begin, begin + width);
  }
  return gathered;
}

std::vector<float> squares(std::span<const float> values) {
  std::vector<float> squared(values.size());
  std::transform(values.begin(), values.end(), squared.begin(), [](float value) { return value * value; });
  return squared;
}

// out += x head^T
void add_product_with_head(const LinearOperands& o, std::span<const float> x, std::span<const float> head,
                           std::span<double> out) {
  const std::int64_t rows = static_cast<std::int64_t>(x.size()) / o.hidden;
  if (out.size() != index(rows * o.vocab)) throw std::invalid_argument("logits: wrong size");
  split_work(o.threads, o.vocab, kGranule, [&](std::int64_t begin, std::int64_t end) {
    add_product({rows, o.hidden, end - begin}, View<float>{x.data(), o.hidden, 1},
                View<float>{head.data() + begin * o.hidden, 1, o.hidden}, out.data() + begin, o.vocab);
  });
}

}  // namespace

LinearOperands make_operands(const StoredMatrix& hidden, const StoredMatrix& head, std::int64_t vocab,
                             std::span<const float> bias, NumberFormat compute, std::span<const std::uint8_t> used, int threads) {
  if (hidden.cols != head.cols) throw std::invalid_argument("hidden and head differ in H");
  if (vocab < 1 || vocab > head.rows) throw std::invalid_argument("vocab: out of the head's rows");
  if (compute == NumberFormat::kFloat16) throw std::invalid_argument("compute: expected float32 or bfloat16");
  if (!bias.empty() && bias.size() < index(vocab)) throw std::invalid_argument("bias: too short");
  if (!used.empty() && used.size() != index(hidden.rows)) throw std::invalid_argument("used: wrong size");
  LinearOperands o{hidden.rows, vocab, hidden.cols, compute, threads, {}, {}, {}, nullptr};
  o.hidden_values.assign(index(o.rows * o.hidden), 0.0F);
  for (std::int64_t i = 0; i < o.rows; ++i) {
    if (!used.empty() && used[index(i)] == 0) continue;
    for (std::int64_t h = 0; h < o.hidden; ++h) o.hidden_values[index(i * o.hidden + h)] = as_seen(compute, hidden.at(i, h));
  }
  o.head_values.resize(index(vocab * o.hidden));
  split_work(threads, vocab, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t v = begin; v < end; ++v) {
      for (std::int64_t h = 0; h < o.hidden; ++h) o.head_values[index(v * o.hidden + h)] = as_seen(compute, head.at(v, h));
    }
  });
  if (!bias.empty()) o.bias.assign(bias.begin(), bias.begin() + vocab);
  return o;
}

void linear_logits(const LinearOperands& o, std::span<const std::int64_t> rows, std::span<double> logits) {
  std::fill(logits.begin(), logits.end(), 0.0);
  for (const LinearOperands* part : {&o, o.low_rank.get()}) {
    if (part != nullptr) add_product_with_head(*part, gather(part->hidden_values, part->hidden, rows), part->head_values, logits);
  }
  if (o.bias.empty()) return;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    for (std::size_t v = 0; v < o.bias.size(); ++v) logits[r * o.bias.size() + v] += o.bias[v];
  }
}

void linear_spread(const LinearOperands& o, std::span<const std::int64_t> rows, std::span<double> spread) {
  std::fill(spread.begin(), spread.end(), 0.0);
  for (const LinearOperands* part : {&o, o.low_rank.get()}) {
    if (part == nullptr) continue;
    add_product_with_head(*part, squares(gather(part->hidden_values, part->hidden, rows)), squares(part->head_values), spread);
  }
  for (double& value : spread) value = std::sqrt(value);
}

LinearGradients::LinearGradients(const LinearOperands& operands, const NeedsGrad& needs_grad) : operands_(operands) {
  const std::int64_t sizes[] = {operands.rows * operands.hidden, operands.vocab * operands.hidden, operands.vocab};
  for (std::size_t which = 0; which < gradients_.size(); ++which) {
    if (!needs_grad[which]) continue;
    gradients_[which].assign(index(sizes[which]), 0.0);
    errors_[which].assign(index(sizes[which]), 0.0F);
  }
  if (operands.low_rank == nullptr) return;
  const NeedsGrad of_low_rank{needs_grad[index(LinearOutput::kDhiddenR)], needs_grad[index(LinearOutput::kDheadR)]};
  low_rank_ = std::make_unique<LinearGradients>(*operands.low_rank, of_low_rank);
}

std::span<const double> LinearGradients::gradient(LinearOutput which) const {
  return is_low_rank(which) ? low_rank_->gradient(of_part(which)) : gradients_[index(which)];
}

std::span<const float> LinearGradients::ideal_error(LinearOutput which) const {
  return is_low_rank(which) ? low_rank_->ideal_error(of_part(which)) : errors_[index(which)];
}

void LinearGradients::add(std::span<const std::int64_t> rows, std::span<const double> dlogits) {
  if (dlogits.size() != rows.size() * index(operands_.vocab)) throw std::invalid_argument("dlogits: wrong size");
  rounding_.resize(dlogits.size());
  split_work(operands_.threads, static_cast<std::int64_t>(dlogits.size()), kGranule, [&](std::int64_t begin, std::int64_t end) {
    for (std::size_t at = index(begin); at < index(end); ++at) {
      rounding_[at] = decode(operands_.compute, encode(operands_.compute, dlogits[at])) - dlogits[at];
    }
  });
  if (!gradients_[kDhidden].empty()) add_dhidden(rows, dlogits);
  if (!gradients_[kDhead].empty()) add_dhead(gather(operands_.hidden_values, operands_.hidden, rows), dlogits);
  if (!gradients_[kDbias].empty()) add_dbias(dlogits);
  if (low_rank_ != nullptr) low_rank_->add(rows, dlogits);
}

void LinearGradients::add_dhidden(std::span<const std::int64_t> rows, std::span<const double> dlogits) {
  const std::int64_t hidden = operands_.hidden, vocab = operands_.vocab;
  const auto count = static_cast<std::int64_t>(rows.size());
  std::vector<double> block(index(count * hidden), 0.0);
  std::vector<float> error(index(count * hidden), 0.0F);
  split_work(operands_.threads, hidden, kGranule, [&](std::int64_t begin, std::int64_t end) {
    const ProductSizes sizes{count, vocab, end - begin};
    const View<float> head{operands_.head_values.data() + begin, hidden, 1};
    add_product(sizes, View<double>{dlogits.data(), vocab, 1}, head, block.data() + begin, hidden);
    add_product(sizes, View<double>{rounding_.data(), vocab, 1}, head, error.data() + begin, hidden);
  });
  for (std::int64_t r = 0; r < count; ++r) {
    const std::int64_t row = rows[index(r)];
    std::copy_n(block.begin() + r * hidden, hidden, gradients_[kDhidden].begin() + row * hidden);
    std::copy_n(error.begin() + r * hidden, hidden, errors_[kDhidden].begin() + row * hidden);
  }
}

void LinearGradients::add_dhead(std::span<const float> hidden_rows, std::span<const double> dlogits) {
  const std::int64_t hidden = operands_.hidden, vocab = operands_.vocab;
  const std::int64_t count = static_cast<std::int64_t>(dlogits.size()) / vocab;
  split_work(operands_.threads, vocab, kGranule, [&](std::int64_t begin, std::int64_t end) {
    const ProductSizes sizes{end - begin, count, hidden};
    const View<float> x{hidden_rows.data(), hidden, 1};
    add_product(sizes, View<double>{dlogits.data() + begin, 1, vocab}, x, gradients_[kDhead].data() + begin * hidden, hidden);
    add_product(sizes, View<double>{rounding_.data() + begin, 1, vocab}, x, errors_[kDhead].data() + begin * hidden, hidden);
  });
}

void LinearGradients::add_dbias(std::span<const double> dlogits) {
  std::vector<double>& dbias = gradients_[kDbias];
  for (std::size_t at = 0; at < dlogits.size(); ++at) {
    dbias[at % dbias.size()] += dlogits[at];
    errors_[kDbias][at % dbias.size()] += static_cast<float>(rounding_[at]);
  }
}

}  // namespace tileloss::oracle
