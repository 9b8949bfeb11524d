// A call's arguments, validated once and put in the form that planning and running need.
#ifndef TILELOSS_API_PROBLEM_H_
#define TILELOSS_API_PROBLEM_H_

#include <tileloss/tileloss.h>

#include <cstdint>
#include <vector>

#include "api/status.h"
#include "backends/cpu/matmul/matmul.h"
#include "backends/cpu/sweep/row_kernel.h"
#include "losses/registry.h"

namespace tileloss::api {

struct Problem {
  const RegisteredLoss* loss = nullptr;
  tileloss_pass pass = TILELOSS_FORWARD;
  tileloss_args args{};  // as given, later members zero if the caller's struct is older
  std::vector<std::byte> options;
  tileloss_logit_options logit{};

  std::int64_t rows = 0;
  std::int64_t total_columns = 0;  // of the logits; 0 without logits
  std::int64_t columns = 0;        // valid ones
  std::int64_t classes = 0;        // of the whole vocabulary
  cpu::StorageType storage = cpu::kStorageFloat32;
  std::uint32_t sums = kNoSums;  // that the forward must gather: outputs, loss and row state together
  bool is_per_row = false;       // one loss per row
  bool needs_forward = false;    // sweeps the logits for the state
  bool needs_backward = false;
  bool is_shard = false;
  std::int64_t num_metrics = 0;                   // that the function reports
  bool couples_rows = false;                      // the row stage needs all rows' statistics before it can do any row
  cpu::Compute compute = cpu::Compute::kFloat32;  // of the products with the LM head
  bool is_multiple_of_p = false;                  // the row stage's gradient
  std::int64_t stage_bytes = 0;                   // the row stage's scratch
};

std::string shape(std::int64_t rows, std::int64_t cols);

// Looks at shapes, dtypes, strides, options and which tensors are there; touches no data. Pointers may be null.
Status make_problem(const char* function, tileloss_pass pass, const tileloss_args* args, const void* options, Problem* problem);
// What the row stage sees, as far as shapes tell: without the temperature, which may lie behind a pointer, and without scratch.
LossContext make_context(const Problem& problem);
// The transform of the softmax, once the temperature is known, and the class weight of column 0; null: 1.
LogitTransform make_transform(const Problem& problem, double temperature);
const float* class_weights(const Problem& problem);
// What can only be checked at the call: data pointers, overlap, numbers behind pointers.
Status check_data(const Problem& problem);

// The plan's identity: shapes, dtypes, strides, presence and options, but not the numbers that may change from step to step.
std::uint64_t fingerprint(const Problem& problem);

}  // namespace tileloss::api

#endif  // TILELOSS_API_PROBLEM_H_
