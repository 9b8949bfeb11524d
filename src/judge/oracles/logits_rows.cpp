#include "judge/oracles/logits_rows.h"

#include <algorithm>
#include <cmath>

namespace tileloss::tools {
namespace {

using oracle::LinearOperands;
using oracle::SoftmaxRow;

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

std::vector<double> row_norms(std::span<const float> values, std::int64_t width) {
  std::vector<double> norms;
  for (std::size_t begin = 0; begin < values.size(); begin += index(width)) {
    double sum = 0;
    for (const float value : values.subspan(begin, index(width))) sum += static_cast<double>(value) * static_cast<double>(value);
    norms.push_back(std::sqrt(sum));
  }
  return norms;
}

double largest(std::span<const double> values) {
  double result = 0;
  for (const double value : values) result = std::max(result, std::fabs(value));
  return result;
}

}  // namespace

double error_of_z(const SoftmaxRow& softmax, const LogitsRow& row) {
  return row.output_error * std::fabs(softmax.transform().logit_scale / softmax.transform().logit_temperature());
}

double mean_error(const SoftmaxRow& softmax, const LogitsRow& row) {
  if (row.errors.empty()) return 0;
  double mean = 0;
  for (std::int64_t j = 0; j < softmax.vocab(); ++j) mean += softmax.p(j) * std::fabs(softmax.dz_dx(j)) * row.errors[index(j)];
  return mean;
}

const char* name_of(LinearOutput output) {
  constexpr const char* kNames[] = {"dhidden", "dhead", "dbias", "dhidden_r", "dhead_r"};
  return kNames[static_cast<std::size_t>(output)];
}

LinearNorms::LinearNorms(const LinearOperands& o)
    : hidden(row_norms(o.hidden_values, o.hidden)),
      head(row_norms(o.head_values, o.hidden)),
      max_hidden(largest(hidden)),
      max_head(largest(head)),
      max_bias(largest(o.bias)),
      low_rank(o.low_rank == nullptr ? nullptr : std::make_shared<LinearNorms>(*o.low_rank)) {}

void for_each_linear_row(const LinearOperands& o, const LinearNorms& norms, std::span<const std::int64_t> rows,
                         const std::function<void(const LogitsRow&)>& work) {
  const LinearOperands* low_rank = o.low_rank.get();
  const double terms = std::sqrt(static_cast<double>(o.hidden + (low_rank == nullptr ? 0 : low_rank->hidden)));
  std::vector<double> logits, of_low_rank, spread, errors(index(o.vocab));
  for (std::size_t begin = 0; begin < rows.size(); begin += kBlockRows) {
    const auto block = rows.subspan(begin, std::min(kBlockRows, rows.size() - begin));
    logits.resize(block.size() * index(o.vocab));
    linear_logits(o, block, logits);
    of_low_rank.resize(low_rank == nullptr ? 0 : logits.size());
    if (low_rank != nullptr) linear_logits(*low_rank, block, of_low_rank);
    // Another product, as dear as the logits' own: only where it decides.
    const bool is_exact = o.compute == oracle::NumberFormat::kFloat32;
    spread.resize(is_exact ? logits.size() : 0);
    if (is_exact) linear_spread(o, block, spread);
    for (std::size_t r = 0; r < block.size(); ++r) {
      const std::span<const double> row(logits.data() + r * index(o.vocab), index(o.vocab));
      const double length = norms.hidden[index(block[r])];
      const double length_r = low_rank == nullptr ? 0 : norms.low_rank->hidden[index(block[r])];
      double longest = length * norms.max_head;
      if (low_rank != nullptr) longest += length_r * norms.low_rank->max_head;
      for (std::size_t j = 0; j < row.size(); ++j) {
        const double x = std::fabs(row[j]);
        double size = is_exact ? terms * (spread[r * row.size() + j] + x) : length * norms.head[j];
        if (!is_exact && low_rank != nullptr) size += length_r * norms.low_rank->head[j];
        errors[j] = 0x1p-24 * (size + x + (o.bias.empty() ? 0.0 : 2 * std::fabs(o.bias[j])));
      }
      LogitsRow one{block[r], row, errors, 0x1p-24 * (terms * longest + 2 * norms.max_bias)};
      if (low_rank != nullptr) one.low_rank = std::span(of_low_rank).subspan(r * row.size(), row.size());
      work(one);
    }
  }
}

}  // namespace tileloss::tools
