#include "backends/cpu/call.h"

#include <cmath>
#include <memory>
#include <numeric>

#include "backends/cpu/head/lm_head.h"
#include "backends/cpu/isa/isa.h"
#include "backends/cpu/plan/head_plan.h"
#include "backends/cpu/plan/plan.h"
#include "backends/cpu/sweep/driver.h"
#include "backends/cpu/threads/floating_point.h"
#include "backends/cpu/threads/scratch_memory.h"
#include "backends/host/checks.h"
#include "backends/label_columns.h"
#include "losses/row_arrays.h"
#include "losses/row_outputs.h"

namespace tileloss::impl::cpu {
namespace {

using std::to_string;

// The row stage and the outputs, with the stages that a sweep has.
class Rows final : public RowVisitor {
 public:
  // `states`: where the forward's are kept; null: in the problem's row state alone.
  Rows(const Problem& problem, const LossContext& context, const RowStage& stage, std::uint32_t stages, double* losses,
       RowState* states)
      : p_(problem),
        stage_(stage),
        losses_(losses),
        states_(states),
        pair_(pair_states(problem)),
        is_forward_((stages & kForward) != 0),
        has_pair_((stages & kPairState) != 0),
        gives_sums_((stages & kGiveSums) != 0),
        has_stage_((stages & kRowStage) != 0),
        writes_(has_stage_ && problem.pass != TILELOSS_BACKWARD),
        label_columns_(problem),
        context_(context),
        outputs_(problem.args, context) {
    if (!is_forward_ || p_.row_state.allowed_weight == nullptr || class_weights(p_) == nullptr) return;
    const float* const weights = class_weights(p_);
    all_.weight = std::accumulate(weights, weights + p_.columns, 0.0);
  }

  void ignored(std::int64_t i) override {
    if (is_forward_) empty_row(p_.row_state, i);
    if (gives_sums_) pair_.give(i, {});
    if (!writes_) return;
    losses_[i] = 0;
    outputs_.write_ignored(i);
  }

  std::optional<TargetStats> known(std::int64_t i) const override {
    if (is_forward_) return std::nullopt;
    if (has_pair_) return pair_.stats(i, !gives_sums_);
    TargetStats stats(RowStates{states_, p_.row_state}.stats(i));
    stats.labels = load_labels(p_.row_state, i, context_.labels);
    return stats;
  }

  void swept(std::int64_t i, const RowState& swept, const RowClasses& classes, const SeveralLabels& labels) override {
    RowState state = swept;
    if (state.argmax >= 0) state.argmax += p_.logit.vocab_start;
    save_row(p_.row_state, i, state);
    save_classes(p_.row_state, i, classes.count < 0 ? all_ : classes);
    save_labels(p_.row_state, i, labels);
    if (states_ != nullptr) states_[i] = state;
  }

  RowResult before_target_sweep(std::int64_t i, const TargetStats& stats) const override { return stage_.row(i, stats); }

  std::int64_t label_column(std::int64_t i, std::int64_t k) const override { return label_columns_.at(i, k); }
  double logp_grad(std::int64_t i, std::int64_t k) const override { return context_.logp_grad_at(i, k); }

  RowResult visit(std::int64_t i, const TargetStats& stats) override {
    if (gives_sums_) pair_.give(i, stats.sums);
    if (!has_stage_) return {};
    const RowResult result = stage_.row(i, stats);
    if (writes_) {
      losses_[i] = result.loss;
      outputs_.write(i, stats);
    }
    return result;
  }

 private:
  const Problem& p_;
  const RowStage& stage_;
  double* const losses_;
  RowState* const states_;
  const PairStates pair_;
  const bool is_forward_, has_pair_, gives_sums_, has_stage_, writes_;
  const LabelColumns label_columns_;
  const LossContext& context_;
  const RowOutputs outputs_;
  RowClasses all_ = {static_cast<double>(p_.columns), static_cast<double>(p_.columns)};
};

Operand operand(const tileloss_matrix& m) { return {m.data, storage_type(m.dtype), m.row_stride, m.col_stride}; }
Operand operand(const tileloss_vector& v) { return {v.data, storage_type(v.dtype), v.stride, 0}; }
OutputMatrix output(const tileloss_matrix& m) { return {m.data, storage_type(m.dtype), m.row_stride, m.col_stride}; }
OutputMatrix output(const tileloss_vector& v) { return {v.data, storage_type(v.dtype), v.stride}; }

// What rows are compared with but their labels; a teacher's logits, if they are there.
TargetInput make_target(const Problem& p, const RowStage& stage) {
  const tileloss_args& a = p.args;
  TargetInput target;
  target.kind = p.loss->target();
  target.options = stage.target_options();
  target.label_transform = make_label_transform(p);
  const auto set_matrix = [&](const tileloss_matrix& m) {
    target.data = m.data;
    target.stride = m.row_stride;
    target.storage = storage_type(m.dtype);
  };
  switch (target.kind) {
    case TargetKind::kLabels: break;
    case TargetKind::kLogits:
      set_matrix(a.teacher_logits);
      target.transform = make_teacher_transform(p);
      break;
    case TargetKind::kProbabilities:
      set_matrix(a.target_probs);
      target.classes = p.classes;
      break;
    case TargetKind::kColumns:
      target.columns = {a.teacher_ids.data,       a.teacher_ids.dtype == TILELOSS_INT64, a.teacher_ids.row_stride,
                        a.teacher_ids.col_stride, operand(a.teacher_logprobs),           a.teacher_ids.cols};
      break;
  }
  return target;
}

// args.loss: one value a row, or their sum in order of the rows, the same for any number of threads.
void write_loss(const Problem& p, const double* losses) {
  const tileloss_vector& v = p.args.loss;
  if (v.data == nullptr || p.pass == TILELOSS_BACKWARD) return;
  const RowOutput<float> out(v);
  double sum = 0;
  for (std::int64_t i = 0; i < p.rows; ++i) {
    if (p.is_per_row) out.set(i, static_cast<float>(losses[i]));
    sum += losses[i];
  }
  if (!p.is_per_row) out.set(0, static_cast<float>(sum));
}

class CpuCall final : public Call {
 public:
  CpuCall(const Problem& problem, const tileloss_plan& plan, const tileloss_run& run)
      : p_(problem), plan_(plan), run_(run), layout_(workspace_layout(problem, plan)), context_(make_context(problem)) {}

  Status begin() {
    if (Status s = refuse_stream("run.stream", run_.stream); !s.ok()) return s;
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
    host::find_label_columns(p_, label_columns());
    if (Status s = host::check_labels(p_, label_columns()); !s.ok()) return s;
    const AllowedSets allowed = allowed_sets();
    for (std::int64_t i = 0; allowed && i < p_.rows; ++i) {
      std::int64_t& column = label_columns()[i];
      if (column >= 0 && !allowed(i, 0, p_.columns).has(column)) column = kLabelElsewhere;
    }
    return host::check_target(p_, label_columns());
  }
  void prepare() override { stage_->prepare(); }
  void couple() override { stage_->couple({states(), p_.row_state}); }
  // Other shards have their share in them between the sweeps.
  bool keeps_states() const override { return cpu::keeps_states(p_, plan_) || p_.merges_shards(); }

  Status sweep(std::uint32_t stages) override {
    Rows rows(p_, context_, *stage_, stages, losses(), states());
    p_.loss->is_linear ? run_linear(linear_job(stages), rows, run_.executor) : run_sweeps(sweep_job(stages), rows, run_.executor);
    return {};
  }

  Status finish() override {
    if (p_.pass != TILELOSS_BACKWARD) stage_->finish();
    write_loss(p_, losses());
    return {};
  }

 private:
  std::int64_t* label_columns() const { return reinterpret_cast<std::int64_t*>(workspace_ + layout_.label_columns); }
  double* losses() const { return reinterpret_cast<double*>(workspace_ + layout_.losses); }
  // Null where they are the row state's, which others have a share in.
  RowState* states() const {
    const bool has_own = keeps_states() && !p_.merges_shards();
    return has_own ? reinterpret_cast<RowState*>(workspace_ + layout_.states) : nullptr;
  }

  AllowedSets allowed_sets() const {
    const tileloss_matrix& m = p_.args.allowed;
    return {static_cast<const std::uint32_t*>(m.data), m.row_stride, present(p_.args.labels)};
  }

  SweepJob sweep_job(std::uint32_t stages) const {
    SweepJob job;
    job.kernels = &kernels(plan_.cpu.isa);
    job.storage = storage_type(p_.storage);
    job.rows = p_.rows;
    job.columns = p_.columns;
    job.total_columns = p_.total_columns;
    job.logits = p_.args.logits.data;
    job.logits_stride = p_.args.logits.row_stride;
    job.dlogits = (stages & kBackward) != 0 ? p_.args.dlogits.data : nullptr;
    job.dlogits_stride = p_.args.dlogits.row_stride;
    job.groups = p_.args.row_groups;
    job.transform = make_transform(p_);
    job.sums = p_.sums;
    job.class_weights = class_weights(p_);
    job.label_columns = label_columns();
    job.allowed = allowed_sets();
    job.labels_per_row = several_labels(p_);
    job.target = make_target(p_, *stage_);
    job.threads = plan_.cpu.threads;
    job.row_block = plan_.cpu.row_block;
    job.shape = scratch_shape(p_, plan_.cpu.schedule, plan_.cpu.vocab_block);
    job.scratch = workspace_ + layout_.scratch;
    return job;
  }

  LinearJob linear_job(std::uint32_t stages) const {
    const tileloss_args& a = p_.args;
    LinearJob job;
    job.kernels = &kernels(plan_.cpu.isa);
    job.shape = linear_shape(p_, plan_);
    job.layout = linear_layout(job.shape, job.kernels->matmul);
    const auto set = [](Operand& to, const auto& from) {
      if (present(from)) to = operand(from);
    };
    set(job.own.hidden, a.hidden);
    set(job.own.head, a.head);
    set(job.low_rank.hidden, a.hidden_r);
    set(job.low_rank.head, a.head_r);
    set(job.bias, a.bias);
    set(job.teacher_hidden, a.teacher_hidden);
    set(job.teacher_head, a.teacher_head);
    set(job.teacher_bias, a.teacher_bias);
    job.transform = make_transform(p_);
    job.sums = p_.sums;
    job.class_weights = class_weights(p_);
    job.label_columns = label_columns();
    job.allowed = allowed_sets();
    job.target = make_target(p_, *stage_);
    job.sweeps_forward = (stages & kForward) != 0;
    job.wants_gradients = (stages & kBackward) != 0;
    job.is_packed = p_.needs_forward && !job.sweeps_forward;
    job.own.dhidden = output(a.dhidden);
    job.own.dhead = output(a.dhead);
    job.low_rank.dhidden = output(a.dhidden_r);
    job.low_rank.dhead = output(a.dhead_r);
    job.dbias = output(a.dbias);
    job.accumulate = p_.linear.accumulate != 0;
    job.workspace = workspace_ + layout_.scratch;
    return job;
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
