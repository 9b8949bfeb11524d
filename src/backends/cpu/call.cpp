#include "backends/cpu/call.h"

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
#include "backends/driver.h"
#include "backends/host/checks.h"
#include "backends/host/loss.h"
#include "losses/row_arrays.h"
#include "losses/row_outputs.h"

namespace tileloss::impl::cpu {
namespace {

using std::to_string;

// Between a row's two sweeps: the row stage, and the outputs; or a part of it.
class Rows final : public RowVisitor {
 public:
  // `states`: where the forward's are kept; null: in the problem's row state alone.
  Rows(const Problem& problem, const LossContext& context, const RowStage& stage, const tileloss_run& run, std::uint32_t stages,
       double* losses, RowState* states)
      : problem_(problem),
        stage_(stage),
        run_(run),
        losses_(losses),
        states_(states),
        is_forward_((stages & kForward) != 0),
        has_stage_((stages & kRowStage) != 0),
        writes_(has_stage_ && problem.pass != TILELOSS_BACKWARD),
        outputs_(problem.args, context) {}

  void ignored(std::int64_t i) override {
    if (is_forward_) save_row(problem_.row_state, i, RowState{});
    if (!writes_) return;
    losses_[i] = 0;
    outputs_.write_ignored(i);
  }

  RowGradient visit(std::int64_t i, const RowState& state) override {
    if (is_forward_) hand_over(i, state);
    if (!has_stage_) return {};
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

  RowState saved_state(std::int64_t i) const override { return RowStates{states_, problem_.row_state}[i]; }

  void hand_over(std::int64_t i, const RowState& swept) override {
    RowState state = swept;
    if (state.argmax >= 0) state.argmax += problem_.logit.vocab_start;
    save_row(problem_.row_state, i, state);
    if (states_ != nullptr) states_[i] = state;
  }
  bool merge_shards() override {
    merged_ = impl::merge_shards(run_);
    is_forward_ = false;
    return merged_.ok();
  }
  Status merged() const { return merged_; }

 private:
  const Problem& problem_;
  const RowStage& stage_;
  const tileloss_run& run_;
  double* const losses_;
  RowState* const states_;
  bool is_forward_;
  const bool has_stage_, writes_;
  Status merged_;
  const RowOutputs outputs_;
};

// The same of pairs of rows, which keep no states. Of a shard a forward gives the sums alone.
class PairRows final : public PairVisitor {
 public:
  PairRows(const Problem& problem, const LossContext& context, const RowStage& stage, double* losses)
      : p_(problem),
        stage_(stage),
        losses_(losses),
        gives_sums_(problem.has_pair_state && problem.pass == TILELOSS_FORWARD),
        writes_(problem.pass != TILELOSS_BACKWARD && !gives_sums_),
        outputs_(problem.args, context) {}

  void ignored(std::int64_t i) override {
    if (gives_sums_) give(i, {});
    if (!writes_) return;
    losses_[i] = 0;
    outputs_.write_ignored(i);
  }

  PairCoefficients coefficients(std::int64_t i) override { return stage_.pair_coefficients(i); }
  std::optional<PairStats> whole(std::int64_t i) const override {
    if (!p_.has_pair_state) return std::nullopt;
    const tileloss_pair_state& s = p_.pair_state;
    PairStats stats;
    stats.student = stats.label = make_row_stats(load_row(p_.row_state, i));
    if (s.teacher != nullptr) stats.teacher = make_row_stats(load_row(p_.teacher_state, i));
    if (s.label != nullptr) stats.label = make_row_stats(load_row(p_.label_state, i));
    if (!gives_sums_) stats.sums = {s.divergence[i], s.mean[i]};
    return stats;
  }
  void visit(std::int64_t i, const PairStats& stats) override {
    if (gives_sums_) give(i, stats.sums);
    if (!writes_) return;
    losses_[i] = stage_.pair_loss(i, stats);
    outputs_.write(i, stats);
  }

 private:
  void give(std::int64_t i, const PairSums& sums) const {
    p_.pair_state.divergence[i] = sums.divergence;
    p_.pair_state.mean[i] = sums.mean;
  }

  const Problem& p_;
  const RowStage& stage_;
  double* const losses_;
  const bool gives_sums_, writes_;
  const RowOutputs outputs_;
};

Operand operand(const tileloss_matrix& m) { return {m.data, storage_type(m.dtype), m.row_stride, m.col_stride}; }
Operand operand(const tileloss_vector& v) { return {v.data, storage_type(v.dtype), v.stride, 0}; }
OutputMatrix output(const tileloss_matrix& m) { return {m.data, storage_type(m.dtype), m.row_stride, m.col_stride}; }
OutputMatrix output(const tileloss_vector& v) { return {v.data, storage_type(v.dtype), v.stride}; }

LinearJob linear_job(const Problem& p, const tileloss_plan& plan, std::uint32_t stages, const std::int64_t* targets,
                     std::byte* workspace) {
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
  job.from_saved_state = (stages & kForward) == 0;
  job.wants_gradients = (stages & kBackward) != 0;
  job.dhidden = output(a.dhidden);
  job.dhead = output(a.dhead);
  job.dbias = output(a.dbias);
  job.accumulate = p.linear.accumulate != 0;
  job.workspace = workspace;
  return job;
}

SweepJob make_job(const Problem& p, const tileloss_plan& plan, std::uint32_t stages, const std::int64_t* targets,
                  std::byte* scratch) {
  SweepJob job;
  job.kernels = &kernels(plan.cpu.isa);
  job.storage = storage_type(p.storage);
  job.rows = p.rows;
  job.columns = p.columns;
  job.total_columns = p.total_columns;
  job.logits = p.args.logits.data;
  job.logits_stride = p.args.logits.row_stride;
  job.dlogits = (stages & kBackward) != 0 ? p.args.dlogits.data : nullptr;
  job.dlogits_stride = p.args.dlogits.row_stride;
  job.groups = p.args.row_groups;
  job.from_saved_state = (stages & kForward) == 0;
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
      job.classes = p.classes;
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

class CpuCall final : public Call {
 public:
  CpuCall(const Problem& problem, const tileloss_plan& plan, const tileloss_run& run)
      : p_(problem), plan_(plan), run_(run), layout_(workspace_layout(problem, plan)), context_(make_context(problem)) {}

  Status begin() {
    if (run_.stream != nullptr) return expected("run.stream", "null: the CPU has no streams", "a pointer");
    if (Status s = check_workspace(run_, plan_); !s.ok()) return s;
    if (layout_.bytes > plan_.workspace_bytes) {
      return expected("plan.workspace_bytes", "at least the " + to_string(layout_.bytes) + " that its blocks and threads need",
                      to_string(plan_.workspace_bytes));
    }
    workspace_ = static_cast<std::byte*>(run_.workspace);
    if (workspace_ == nullptr) {
      own_ = std::make_unique<ScratchMemory>(static_cast<std::size_t>(layout_.bytes));
      if (!own_->ok()) return {TILELOSS_OUT_OF_MEMORY, "workspace: could not allocate " + to_string(layout_.bytes) + " bytes"};
      workspace_ = own_->data();
    }
    if (p_.stage_bytes > 0) context_.scratch = workspace_ + layout_.stage;
    stage_ = p_.loss->info.make(context_);
    return {};
  }

  Status check() override {
    if (Status s = host::check_numbers(p_); !s.ok()) return s;
    if (Status s = host::resolve_targets(p_, targets()); !s.ok()) return s;
    return p_.loss->info.teacher == Teacher::kColumns ? host::check_teacher_columns(p_, targets()) : Status{};
  }
  void prepare() override { stage_->prepare(); }
  void couple() override { stage_->couple({states(), p_.row_state}); }
  bool keeps_states() const override { return cpu::keeps_states(p_, plan_); }

  Status sweep(std::uint32_t stages) override {
    if (p_.loss->has_teacher()) return sweep_pairs();
    Rows rows(p_, context_, *stage_, run_, stages, losses(), states());
    if (p_.loss->is_linear) {
      LinearJob job = linear_job(p_, plan_, stages, targets(), workspace_ + layout_.scratch);
      job.merges_shards = p_.merges_shards() && !keeps_states();
      run_linear(job, rows, run_.executor);
    } else {
      run_sweeps(make_job(p_, plan_, stages, targets(), workspace_ + layout_.scratch), rows, run_.executor);
    }
    return rows.merged();
  }

  Status finish() override {
    if (p_.pass != TILELOSS_BACKWARD) stage_->finish();
    host::write_loss(p_, losses());
    return {};
  }

 private:
  std::int64_t* targets() const { return reinterpret_cast<std::int64_t*>(workspace_ + layout_.targets); }
  double* losses() const { return reinterpret_cast<double*>(workspace_ + layout_.losses); }
  // Null where they are the row state's, which others have a share in.
  RowState* states() const {
    const bool has_own = keeps_states() && !p_.merges_shards();
    return has_own ? reinterpret_cast<RowState*>(workspace_ + layout_.states) : nullptr;
  }

  Status sweep_pairs() {
    PairRows pairs(p_, context_, *stage_, losses());
    const std::uint32_t stages = kForward | (p_.needs_backward ? kBackward : 0u);
    if (!p_.needs_forward) {
      for (std::int64_t i = 0; i < p_.rows; ++i) {
        targets()[i] == kIgnoredRow ? pairs.ignored(i) : pairs.visit(i, *pairs.whole(i));
      }
      return {};
    }
    if (p_.loss->is_linear) {
      const LinearJob student = linear_job(p_, plan_, stages, targets(), workspace_ + layout_.scratch);
      run_linear_pairs(make_linear_pair_job(p_, student, *stage_), pairs, run_.executor);
    } else {
      PairJob job = make_pair_job(p_, *stage_);
      job.student = make_job(p_, plan_, stages, targets(), workspace_ + layout_.scratch);
      run_pairs(job, pairs, run_.executor);
    }
    return {};
  }

  const FloatingPointScope scope_;  // denominators and sums too, whatever mode the host's thread is in
  const Problem& p_;
  const tileloss_plan& plan_;
  const tileloss_run& run_;
  const WorkspaceLayout layout_;
  LossContext context_;
  std::unique_ptr<ScratchMemory> own_;
  std::byte* workspace_ = nullptr;
  std::unique_ptr<RowStage> stage_;
};

}  // namespace

Status begin_call(const Problem& problem, const tileloss_plan& plan, const tileloss_run& run, std::unique_ptr<Call>* call) {
  auto own = std::make_unique<CpuCall>(problem, plan, run);
  if (Status s = own->begin(); !s.ok()) return s;
  *call = std::move(own);
  return {};
}

}  // namespace tileloss::impl::cpu
