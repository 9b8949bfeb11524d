// From a problem to a plan, and the workspace's layout.
#pragma once

#include <cstddef>
#include <vector>

#include "backends/cpu/head/lm_head.h"
#include "backends/cpu/sweep/driver.h"
#include "backends/problem.h"

namespace tileloss::impl::cpu {

struct WorkspaceLayout {
  std::int64_t label_columns = 0;  // int64 [rows]
  std::int64_t losses = 0;         // double [rows]
  std::int64_t states = 0;         // RowState [rows], when the row stage has to wait for the whole forward sweep
  std::int64_t stage = 0;          // the row stage's own
  std::int64_t scratch = 0;        // one piece a thread; with the LM head, all that LinearLayout says
  std::int64_t bytes = 0;
  std::vector<NamedBytes> buffers;  // all of them by name
};

// The states of a forward sweep are kept for a second visit: a backward sweep, or a row stage that couples rows.
bool keeps_states(const Problem& problem, const tileloss_plan& plan);
// Everything but the scratch.
std::int64_t fixed_bytes(const Problem& problem, const tileloss_plan& plan);
WorkspaceLayout workspace_layout(const Problem& problem, const tileloss_plan& plan);

// Labels that each row has, where these are several; else 0.
std::int64_t several_labels(const Problem& problem);
ScratchShape scratch_shape(const Problem& problem, tileloss_schedule schedule, std::int64_t vocab_block);
// Columns between two looks at a row's maximum, where the caller does not say.
std::int64_t default_vocab_block(const Problem& problem, tileloss_isa isa);

StorageType storage_type(tileloss_dtype dtype);  // of float32, bfloat16 and float16

Status make_plan(const Problem& problem, const tileloss_plan_options& hints, const tileloss_executor* executor,
                 tileloss_plan* plan);

// A plan is plain data: whether one that was stored, or written by hand, can be run.
Status check_plan(const tileloss_plan& plan);

}  // namespace tileloss::impl::cpu
