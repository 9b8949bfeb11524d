// From a problem to a plan, and the workspace's layout.
#ifndef TILELOSS_API_PLAN_H_
#define TILELOSS_API_PLAN_H_

#include <cstddef>
#include <vector>

#include "api/problem.h"
#include "backends/cpu/head/linear.h"

namespace tileloss::api {

struct WorkspaceLayout {
  std::int64_t targets = 0;  // int64 [rows]
  std::int64_t losses = 0;   // double [rows]
  std::int64_t states = 0;   // RowState [rows], when the row stage has to wait for the whole forward sweep
  std::int64_t stage = 0;    // the row stage's own
  std::int64_t scratch = 0;  // one piece a thread; with the LM head, all that cpu::LinearLayout says
  std::int64_t bytes = 0;
  std::vector<cpu::NamedBytes> buffers;  // all of them by name
};

// The states of a forward sweep are kept for a second visit: a backward sweep, or a row stage that couples rows.
bool keeps_states(const Problem& problem, const tileloss_plan& plan);
// Everything but the scratch.
std::int64_t fixed_bytes(const Problem& problem, const tileloss_plan& plan);
WorkspaceLayout workspace_layout(const Problem& problem, const tileloss_plan& plan);

Status make_plan(const Problem& problem, const tileloss_plan_options* options, const tileloss_executor* executor,
                 tileloss_plan* plan);

// The struct grew at its end: a caller that was built before isa_note or kept_columns was there has a shorter one, and gets no
// more than that.
inline bool is_plan_size(std::size_t size) { return size >= offsetof(tileloss_plan, isa_note) && size <= sizeof(tileloss_plan); }

// A plan is plain data: whether one that was stored, or written by hand, can be run.
Status check_plan(const tileloss_plan& plan);

Status check_executor(const tileloss_executor* executor);

}  // namespace tileloss::api

#endif  // TILELOSS_API_PLAN_H_
