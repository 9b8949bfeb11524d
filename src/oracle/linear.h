// Losses fused with the LM head: logits from hidden states and head, and the gradients of hidden, head and bias, in double.
//
//   logits[i, v] = sum_h hidden[i, h] head[v, h] + bias[v]
//   dhidden = dlogits head,  dhead = dlogits^T hidden,  dbias = the sum of dlogits over rows
//
// A low-rank part of the head, hidden_r and head_r, adds sum_r hidden_r[i, r] head_r[v, r] and has its gradients likewise.
//
// It streams blocks of rows: a block's logits in double, from them (oracle.h, policy.h) the rows' dlogits, in double and not
// rounded, and their share in the gradients. The operands are the exact stored values; with compute type bfloat16 each is first
// rounded to bfloat16, to nearest even, because that is what the products are defined on.
//
// Beside each gradient stands what the ideal implementation gets wrong: it rounds each dlogit once to the compute type and is
// exact otherwise. Its error is the same product over the differences, which needs float only.
//
//   LinearOperands operands = make_operands(...);
//   LinearGradients gradients(operands, {true, true, true});  // dhidden, dhead, dbias
//   for each block of rows in use: linear_logits(operands, rows, logits); dlogits from them; gradients.add(rows, dlogits);
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "oracle/number_formats.h"
#include "oracle/products.h"

namespace tileloss::oracle {

// A matrix as stored, any strides (in elements, >= 0).
struct StoredMatrix {
  const void* data = nullptr;
  NumberFormat format = NumberFormat::kFloat32;
  std::int64_t rows = 0, cols = 0;
  std::int64_t row_stride = 0, col_stride = 1;

  double at(std::int64_t i, std::int64_t j) const { return decode_at(format, data, i * row_stride + j * col_stride); }
};

struct LinearOperands {
  std::int64_t rows = 0;                          // N
  std::int64_t vocab = 0;                         // valid columns
  std::int64_t hidden = 0;                        // H
  NumberFormat compute = NumberFormat::kFloat32;  // or kBfloat16
  int threads = 1;
  std::vector<float> hidden_values;                          // [N,H], float holds every storage's values
  std::vector<float> head_values;                            // [vocab,H]
  std::vector<double> bias;                                  // [vocab] or empty
  std::shared_ptr<const LinearOperands> low_rank = nullptr;  // R in place of H; null: none
};

// The first `vocab` rows of the head. Rows of `hidden` that are not `used` are not read and count as 0; `used` empty: all are.
LinearOperands make_operands(const StoredMatrix& hidden, const StoredMatrix& head, std::int64_t vocab,
                             std::span<const float> bias, NumberFormat compute, std::span<const std::uint8_t> used, int threads);

// logits [rows.size(), vocab].
void linear_logits(const LinearOperands& operands, std::span<const std::int64_t> rows, std::span<double> logits);

// spread[r, v] = sqrt(sum_h (hidden head)^2): the size of the terms of each logit, which float32 sums lose bits of.
void linear_spread(const LinearOperands& operands, std::span<const std::int64_t> rows, std::span<double> spread);

enum class LinearOutput { kDhidden, kDhead, kDbias, kDhiddenR, kDheadR };
constexpr std::size_t kLinearOutputs = 5;
// Of the tokens, in place of the classes.
constexpr bool is_by_token(LinearOutput output) { return output == LinearOutput::kDhidden || output == LinearOutput::kDhiddenR; }
constexpr bool is_low_rank(LinearOutput output) { return output == LinearOutput::kDhiddenR || output == LinearOutput::kDheadR; }

class LinearGradients {
 public:
  using NeedsGrad = std::array<bool, kLinearOutputs>;  // by LinearOutput
  LinearGradients(const LinearOperands& operands, const NeedsGrad& needs_grad);

  // dlogits [rows.size(), vocab], each row once. Rows that are not added have a gradient of 0.
  void add(std::span<const std::int64_t> rows, std::span<const double> dlogits);

  // [N,H], [vocab,H], [vocab], [N,R], [vocab,R]; empty where none is needed.
  std::span<const double> gradient(LinearOutput which) const;
  std::span<const float> ideal_error(LinearOutput which) const;

 private:
  void add_dhidden(std::span<const std::int64_t> rows, std::span<const double> dlogits);
  void add_dhead(std::span<const float> hidden_rows, std::span<const double> dlogits);
  void add_dbias(std::span<const double> dlogits);

  const LinearOperands& operands_;
  // Without those of the low-rank part.
  std::array<std::vector<double>, 3> gradients_;
  std::array<std::vector<float>, 3> errors_;
  std::vector<double> rounding_;  // of a block's dlogits
  std::unique_ptr<LinearGradients> low_rank_;
};

}  // namespace tileloss::oracle
