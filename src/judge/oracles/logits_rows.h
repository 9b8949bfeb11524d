// Rows of logits in double, stored or of a product, and what float32 may get wrong in each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "oracle/linear.h"
#include "oracle/oracle.h"

namespace tileloss::tools {

struct LogitsRow {
  std::int64_t row = 0;
  std::span<const double> logits;
  // Of a product, what float32 may get wrong in each logit: as the terms of its own sum have it, for gradients; and the bound for
  // row outputs, 2^-24 sqrt(H) ||hidden_i|| max ||head_j|| and the bias's rounding, with a low-rank part summed over H + R. Of
  // stored logits nothing.
  std::span<const double> errors = {};
  double output_error = 0;
  std::span<const double> low_rank = {};  // what a low-rank part of the head makes of the logits
};

// The output error, of z.
double error_of_z(const oracle::SoftmaxRow& softmax, const LogitsRow& row);
// The mean error of a gradient's logits, weighted by p.
double mean_error(const oracle::SoftmaxRow& softmax, const LogitsRow& row);

using oracle::LinearOutput;
const char* name_of(LinearOutput output);

// Lengths of the operands' rows.
struct LinearNorms {
  explicit LinearNorms(const oracle::LinearOperands& operands);

  std::vector<double> hidden, head;  // [N], [vocab]
  double max_hidden = 0, max_head = 0, max_bias = 0;
  std::shared_ptr<const LinearNorms> low_rank;  // null: there is none
};

// Rows of logits that are held at a time: each is as long as the vocabulary, in double.
constexpr std::size_t kBlockRows = 64;
// The logits of `rows`, a block of them at a time.
void for_each_linear_row(const oracle::LinearOperands& operands, const LinearNorms& norms, std::span<const std::int64_t> rows,
                         const std::function<void(const LogitsRow&)>& work);

}  // namespace tileloss::tools
