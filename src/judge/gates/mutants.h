// Wrong kernels, made from right ones: each mutant alters the kernel's outputs, row by row, as a plausible bug would. A check
// that lets one pass is no check. Adding a mutant is one entry in the table of mutants.cpp.
//
//   for (const Mutant& mutant : all_mutants()) {
//     if (!mutant.applies(context)) continue;
//     for each used row: copy the kernel's row, planted |= mutant.apply_row(context, oracle, copy), feed the metric;
//     of a scalar loss planted |= mutant.apply_loss(&loss_copy);
//     planted and not rejected by any gate: the check has failed.
//   }
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "judge/oracles/oracle.h"
#include "oracle/number_formats.h"
#include "oracle/oracle.h"

namespace tileloss::tools {

// What was run: which outputs there are to alter, and where tiles end.
struct MutantContext {
  std::int64_t rows = 0;
  std::int64_t cols = 0;  // valid columns
  std::int64_t tile = 0;  // columns of a vocabulary tile (the plan's vocab_block)
  bool has_dlogits = false;
  bool has_loss = false;  // one scalar, or one per row if per_row_loss
  bool per_row_loss = false;
  bool has_logp = false;
  bool has_argmax = false;
  bool entropy_upstream = false;        // some row's upstream entropy gradient is not 0
  bool nonuniform_upstream = false;     // some used row's upstream gradient differs from the first used row's
  std::span<const double> kernel_logp;  // [rows], for the mutant that takes a neighbour's
  std::int64_t group_rows = 0;          // of logits whose rows come in groups, 0 for others
  // The kernel's dlogits of a row, for the mutant that takes those of the row before.
  std::function<const void*(std::int64_t row)> kernel_dlogits = nullptr;
  bool has_agreement = false;
};

// The oracle's data of a row, and its upstream gradients: `loss` for a loss, `row` for logprobs; `first_*` are those of the first
// used row.
struct MutantRowOracle {
  const oracle::SoftmaxRow* softmax = nullptr;
  const oracle::GradientRow* gradient = nullptr;
  double loss_upstream = 1.0;
  double first_loss_upstream = 1.0;
  oracle::RowUpstream upstream;
  oracle::RowUpstream first_upstream;
};

// A copy of the kernel's outputs of one row; null or absent where there is none.
struct MutantRow {
  std::int64_t row = 0;
  oracle::NumberFormat format = oracle::NumberFormat::kFloat32;
  void* dlogits = nullptr;
  float* loss = nullptr;
  RowOutputValues outputs{};
  std::vector<double> logps = {};  // of several labels
};

struct Mutant {
  const char* name;
  const char* description;
  bool (*applies)(const MutantContext& context);
  // What it makes of a row, true if any bit changed; of a loss, of each row or the scalar. Null: they stay as they are.
  bool (*change_row)(const MutantContext& context, const MutantRowOracle& oracle, MutantRow& row);
  double (*change_loss)(double loss) = nullptr;

  // True if any bit changed.
  bool apply_row(const MutantContext& context, const MutantRowOracle& oracle, MutantRow& row) const;
  bool apply_loss(float* loss, bool transformed = true) const;
};

std::span<const Mutant> all_mutants();

// A wrong kernel of one function (judge/oracles/wrong_kernel.h): its gradient, or its loss and row outputs.
// `cols`: valid columns. True if any bit changed.
bool plant_gradient(const WrongRow& difference, std::int64_t cols, MutantRow& row);
bool plant_values(const WrongRow& difference, MutantRow& row);

}  // namespace tileloss::tools
