#include "backends/cpu/run.h"

#include <cmath>
#include <memory>

#include "backends/cpu/head/linear_pairs.h"
#include "backends/cpu/isa/isa.h"
#include "backends/cpu/plan/head_plan.h"
#include "backends/cpu/plan/plan.h"
#include "backends/cpu/sweep/driver.h"
#include "backends/cpu/sweep/pair_driver.h"
#include "backends/cpu/threads/floating_point.h"
#include "backends/cpu/threads/scratch_memory.h"
#include "backends/host/checks.h"
#include "backends/host/loss.h"
#include "losses/row_arrays.h"
#include "losses/row_outputs.h"

namespace tileloss::impl::cpu {
namespace {

using std::to_string;

// Between a row's two sweeps: the row stage, and the outputs. With `states`, rows are visited twice: in the forward sweep, which
// keeps their states, and again once every row has been seen.
class Rows final : public RowVisitor {
 public:
  Rows(const Problem& problem, const LossContext& context, const RowStage& stage, const tileloss_run& run, double* losses,
       RowState* states)
      : problem_(problem),
        stage_(stage),
        run_(run),
        losses_(losses),
        states_(states),
        writes_(problem.pass != TILELOSS_BACKWARD),
        outputs_(problem.args, context) {}

  void ignored(std::int64_t i) override {
    if (!writes_ || is_second_visit_) return;
    losses_[i] = 0;
    outputs_.write_ignored(i);
    if (problem_.needs_forward) save_row(problem_.row_state, i, RowState{});
  }

  RowGradient visit(std::int64_t i, const RowState& swept) override {
    if (problem_.needs_forward && !is_second_visit_) {
      hand_over(i, swept);
      if (states_ != nullptr) return {};
    }
    const RowState& state = swept;
    RowGradient g;
    g.stats = make_row_stats(state);
    const RowResult result = stage_.row(i, g.stats);
    g.coefficients = result.coefficients;
    if (writes_) {
      losses_[i] = result.loss;
      outputs_.write(i, g.stats);
    }
    return g;
  }

  RowStates states() const { return {states_, problem_.row_state}; }
  RowState saved_state(std::int64_t i) const override { return states()[i]; }

  void hand_over(std::int64_t i, const RowState& swept) override {
    RowState state = swept;
    if (state.argmax >= 0) state.argmax += problem_.logit.vocab_start;
    save_row(problem_.row_state, i, state);
    if (states_ != nullptr) states_[i] = state;
  }
  bool merge_shards() override {
    merge_status_ = run_.merge(run_.merge_context);
    begin_second_visit();
    if (merge_status_ != TILELOSS_OK) return false;
    for (std::int64_t i = 0; states_ != nullptr && i < problem_.rows; ++i) states_[i] = load_row(problem_.row_state, i);
    return true;
  }
  tileloss_status merge_status() const { return merge_status_; }

  void begin_second_visit() { is_second_visit_ = true; }

 private:
  const Problem& problem_;
  const RowStage& stage_;
  const tileloss_run& run_;
  double* const losses_;
  RowState* const states_;
  const bool writes_;
  bool is_second_visit_ = false;
  tileloss_status merge_status_ = TILELOSS_OK;
  const RowOutputs outputs_;
};

// The same of pairs of rows, which keep no states.
class PairRows final : public PairVisitor {
 public:
  PairRows(const Problem& problem, const LossContext& context, const RowStage& stage, double* losses)
      : stage_(stage), losses_(losses), writes_(problem.pass != TILELOSS_BACKWARD), outputs_(problem.args, context) {}

  void ignored(std::int64_t i) override {
    if (!writes_) return;
    losses_[i] = 0;
    outputs_.write_ignored(i);
  }

  PairCoefficients coefficients(std::int64_t i) override { return stage_.pair_coefficients(i); }
  void visit(std::int64_t i, const PairStats& stats) override {
    if (!writes_) return;
    losses_[i] = stage_.pair_loss(i, stats);
    outputs_.write(i, stats);
  }

 private:
  const RowStage& stage_;
  double* const losses_;
  const bool writes_;
  const RowOutputs outputs_;
};

Operand operand(const tileloss_matrix& m) { return {m.data, storage_type(m.dtype), m.row_stride, m.col_stride}; }
Operand operand(const tileloss_vector& v) { return {v.data, storage_type(v.dtype), v.stride, 0}; }
OutputMatrix output(const tileloss_matrix& m) { return {m.data, storage_type(m.dtype), m.row_stride, m.col_stride}; }
OutputMatrix output(const tileloss_vector& v) { return {v.data, storage_type(v.dtype), v.stride}; }

LinearJob linear_job(const Problem& p, const tileloss_plan& plan, const std::int64_t* targets, std::byte* workspace) {
  const tileloss_args& a = p.args;
  LinearJob job;
  job.kernels = &kernels(plan.cpu.isa);
  job.shape = linear_shape(p, plan);
  job.layout = linear_layout(job.shape, job.kernels->matmul);
  if (present(a.hidden)) job.hidden = operand(a.hidden);
  if (present(a.head)) job.head = operand(a.head);
  if (present(a.bias)) job.bias = operand(a.bias);
  job.transform = make_transform(p);
  job.sums = p.sums;
  job.class_weights = class_weights(p);
  job.targets = targets;
  job.from_saved_state = !p.needs_forward;
  job.wants_gradients = p.needs_backward;
  job.dhidden = output(a.dhidden);
  job.dhead = output(a.dhead);
  job.dbias = output(a.dbias);
  job.accumulate = p.linear.accumulate != 0;
  job.workspace = workspace;
  return job;
}

SweepJob make_job(const Problem& p, const tileloss_plan& plan, const std::int64_t* targets, std::byte* scratch) {
  SweepJob job;
  job.kernels = &kernels(plan.cpu.isa);
  job.storage = storage_type(p.storage);
  job.rows = p.rows;
  job.columns = p.columns;
  job.total_columns = p.total_columns;
  job.logits = p.args.logits.data;
  job.logits_stride = p.args.logits.row_stride;
  job.dlogits = p.needs_backward ? p.args.dlogits.data : nullptr;
  job.dlogits_stride = p.args.dlogits.row_stride;
  job.groups = p.args.row_groups;
  job.from_saved_state = !p.needs_forward;
  job.transform = make_transform(p);
  job.sums = p.sums;
  job.class_weights = class_weights(p);
  job.targets = targets;
  job.schedule = plan.cpu.schedule;
  job.threads = plan.cpu.threads;
  job.row_block = plan.cpu.row_block;
  job.vocab_block = plan.cpu.vocab_block;
  job.scratch = scratch;
  return job;
}

// What the teacher has to say of the rows; which rows is the caller's.
PairJob make_pair_job(const Problem& p, const RowStage& stage) {
  const tileloss_args& a = p.args;
  PairJob job;
  job.divergence = stage.divergence();
  job.label_transform = make_label_transform(p);
  job.teacher = p.loss->info.teacher;
  switch (job.teacher) {
    case Teacher::kNone: break;
    case Teacher::kLogits:
      job.teacher_logits = a.teacher_logits.data;
      job.teacher_stride = a.teacher_logits.row_stride;
      job.teacher_transform = make_teacher_transform(p);
      break;
    case Teacher::kProbabilities:
      job.target_probs = a.target_probs.data;
      job.teacher_stride = a.target_probs.row_stride;
      job.probs_storage = storage_type(a.target_probs.dtype);
      job.label_smoothing = stage.label_smoothing();
      break;
    case Teacher::kColumns:
      job.known = {a.teacher_ids.data,
                   a.teacher_ids.dtype == TILELOSS_INT64,
                   a.teacher_ids.row_stride,
                   a.teacher_ids.col_stride,
                   operand(a.teacher_logprobs),
                   a.teacher_ids.cols,
                   stage.tail()};
      break;
  }
  return job;
}

LinearPairJob make_linear_pair_job(const Problem& p, const LinearJob& student, const RowStage& stage) {
  LinearPairJob job;
  job.student = student;
  job.pairs = make_pair_job(p, stage);
  if (!p.loss->has_teacher_logits()) return job;
  job.teacher_hidden = operand(p.args.teacher_hidden);
  job.teacher_head = operand(p.args.teacher_head);
  if (present(p.args.teacher_bias)) job.teacher_bias = operand(p.args.teacher_bias);
  return job;
}

Status check_workspace(const tileloss_run& run, const tileloss_plan& plan) {
  if (run.workspace == nullptr) return {};
  if (reinterpret_cast<std::uintptr_t>(run.workspace) % 64 != 0)
    return expected("workspace", "64-byte alignment", "a pointer without it");
  if (run.workspace_bytes < static_cast<std::size_t>(plan.workspace_bytes)) {
    return {TILELOSS_WORKSPACE_TOO_SMALL, "workspace_bytes: expected at least the plan's " + to_string(plan.workspace_bytes) +
                                              ", got " + to_string(run.workspace_bytes)};
  }
  return {};
}

// Once, or forward and then the rest, what the row stage couples in between. `gradients` is the job's member that asks for them.
template <class Job, class Member, class Walk>
void run_visits(Job& job, Member Job::*gradients, const Problem& p, bool keeps, Rows& rows, RowStage& stage, Walk&& walk) {
  if (keeps) {
    const Member wanted = job.*gradients;
    job.*gradients = {};
    walk();
    if (p.merges_shards() && !rows.merge_shards()) return;
    rows.begin_second_visit();
    job.*gradients = wanted;
    job.from_saved_state = true;
  }
  if (p.couples_rows) stage.couple(rows.states());
  walk();
}

}  // namespace

Status run(const Problem& p, const tileloss_plan& plan, const tileloss_run& given) {
  const FloatingPointScope scope;  // denominators and sums too, whatever mode the host's thread is in
  if (given.stream != nullptr) return expected("run.stream", "null: the CPU has no streams", "a pointer");
  if (Status s = host::check_numbers(p); !s.ok()) return s;
  if (Status s = check_workspace(given, plan); !s.ok()) return s;
  const WorkspaceLayout layout = workspace_layout(p, plan);
  if (layout.bytes > plan.workspace_bytes) {
    return expected("plan.workspace_bytes", "at least the " + to_string(layout.bytes) + " that its blocks and threads need",
                    to_string(plan.workspace_bytes));
  }
  std::unique_ptr<ScratchMemory> own;
  auto* workspace = static_cast<std::byte*>(given.workspace);
  if (workspace == nullptr) {
    own = std::make_unique<ScratchMemory>(static_cast<std::size_t>(layout.bytes));
    if (!own->ok()) return {TILELOSS_OUT_OF_MEMORY, "workspace: could not allocate " + to_string(layout.bytes) + " bytes"};
    workspace = own->data();
  }
  auto* targets = reinterpret_cast<std::int64_t*>(workspace + layout.targets);
  auto* losses = reinterpret_cast<double*>(workspace + layout.losses);
  LossContext context = make_context(p);
  context.scratch = p.stage_bytes > 0 ? workspace + layout.stage : nullptr;
  if (Status s = host::resolve_targets(p, context.labels, targets); !s.ok()) return s;
  if (p.loss->info.teacher == Teacher::kColumns) {
    if (Status s = host::check_teacher_columns(p, targets); !s.ok()) return s;
  }
  const std::unique_ptr<RowStage> stage = p.loss->info.make(context);
  stage->prepare();

  if (p.loss->has_teacher()) {
    PairRows pairs(p, context, *stage, losses);
    if (p.loss->is_linear) {
      const LinearJob student = linear_job(p, plan, targets, workspace + layout.scratch);
      run_linear_pairs(make_linear_pair_job(p, student, *stage), pairs, given.executor);
    } else {
      PairJob job = make_pair_job(p, *stage);
      job.student = make_job(p, plan, targets, workspace + layout.scratch);
      run_pairs(job, pairs, given.executor);
    }
    host::write_loss(p, losses);
    return {};
  }
  const bool keeps = keeps_states(p, plan);
  auto* states = keeps ? reinterpret_cast<RowState*>(workspace + layout.states) : nullptr;
  Rows rows(p, context, *stage, given, losses, states);
  if (p.loss->is_linear) {
    LinearJob job = linear_job(p, plan, targets, workspace + layout.scratch);
    job.merges_shards = p.merges_shards() && !keeps;
    run_visits(job, &LinearJob::wants_gradients, p, keeps, rows, *stage, [&] { run_linear(job, rows, given.executor); });
  } else {
    SweepJob job = make_job(p, plan, targets, workspace + layout.scratch);
    run_visits(job, &SweepJob::dlogits, p, keeps, rows, *stage, [&] { run_sweeps(job, rows, given.executor); });
  }
  if (rows.merge_status() != TILELOSS_OK)
    return {rows.merge_status(), "run.merge: expected TILELOSS_OK, got " + to_string(rows.merge_status())};
  if (p.pass != TILELOSS_BACKWARD) stage->finish();
  host::write_loss(p, losses);
  return {};
}

}  // namespace tileloss::impl::cpu
