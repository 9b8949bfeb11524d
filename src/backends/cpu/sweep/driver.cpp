#include "backends/cpu/sweep/driver.h"

#include "backends/cpu/sweep/allowed_rows.h"
#include "backends/cpu/sweep/column_rows.h"
#include "backends/cpu/sweep/label_rows.h"
#include "backends/cpu/sweep/logits_rows.h"
#include "backends/cpu/sweep/probability_rows.h"

namespace tileloss::impl::cpu {
namespace {

template <class Worker>
void walk(const SweepJob& job, RowVisitor& visitor, const tileloss_executor* executor) {
  walk_row_blocks(executor, job.threads, job.rows, job.row_block,
                  [&](std::int64_t slot) { return AllowedRows<Worker>(job, visitor, job.scratch + slot * job.shape.bytes()); });
}

}  // namespace

std::int64_t ScratchShape::bytes() const { return SweepScratch::bytes(*this) + AllowedScratch::bytes(*this); }

void run_sweeps(const SweepJob& job, RowVisitor& visitor, const tileloss_executor* executor) {
  switch (job.target.kind) {
    case TargetKind::kLabels: return walk<LabelRows>(job, visitor, executor);
    case TargetKind::kLogits: return walk<LogitsRows>(job, visitor, executor);
    case TargetKind::kColumns: return walk<ColumnRows>(job, visitor, executor);
    case TargetKind::kProbabilities: return walk<ProbabilityRows>(job, visitor, executor);
  }
}

}  // namespace tileloss::impl::cpu
