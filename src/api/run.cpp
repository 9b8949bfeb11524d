#include "api/run.h"

#include <cmath>
#include <memory>

#include "api/linear.h"
#include "api/plan.h"
#include "api/row_arrays.h"
#include "backends/cpu/isa/isa.h"
#include "backends/cpu/sweep/driver.h"
#include "backends/cpu/threads/floating_point.h"
#include "backends/cpu/threads/scratch_memory.h"

namespace tileloss::api {
namespace {

using std::to_string;

// An output with its stride; writes nothing if it is absent.
template <class T>
class RowOutput {
 public:
  explicit RowOutput(const tileloss_vector& v) : data_(static_cast<T*>(v.data)), stride_(v.stride) {}
  void set(std::int64_t i, T value) const {
    if (data_ != nullptr) data_[i * stride_] = value;
  }

 private:
  T* data_;
  std::int64_t stride_;
};

// Between a row's two sweeps: the row stage, and the outputs. With `states`, rows are visited twice: in the forward sweep, which
// keeps their states, and again once every row has been seen.
class Rows final : public cpu::RowVisitor, public AllRows {
 public:
  Rows(const Problem& problem, const LossContext& context, const RowStage& stage, double* losses, RowState* states)
      : problem_(problem),
        context_(context),
        stage_(stage),
        losses_(losses),
        states_(states),
        writes_(problem.pass != TILELOSS_BACKWARD),
        logp_(problem.args.logp),
        lse_(problem.args.lse),
        entropy_(problem.args.entropy),
        log_sum_sq_probs_(problem.args.log_sum_sq_probs),
        mean_logit_(problem.args.mean_logit),
        argmax_(problem.args.argmax),
        correct_(problem.args.correct) {}

  void ignored(std::int64_t i) override {
    if (!writes_ || is_second_visit_) return;
    losses_[i] = 0;
    for (const RowOutput<float>* out : {&logp_, &lse_, &entropy_, &log_sum_sq_probs_, &mean_logit_}) out->set(i, 0);
    argmax_.set(i, -1);
    correct_.set(i, 0);
    if (problem_.needs_forward) save_row(problem_.args.row_state, i, RowState{});
  }

  cpu::RowGradient visit(std::int64_t i, const RowState& swept) override {
    RowState state = swept;
    if (problem_.needs_forward && !is_second_visit_) {
      if (state.argmax >= 0) state.argmax += problem_.logit.vocab_start;
      save_row(problem_.args.row_state, i, state);
      if (states_ != nullptr) {
        states_[i] = state;
        return {};
      }
    }
    cpu::RowGradient g;
    g.stats = make_row_stats(state);
    const RowResult result = stage_.row(i, g.stats);
    g.coefficients = result.coefficients;
    if (writes_) write(i, g.stats, result.loss);
    return g;
  }

  RowState saved_state(std::int64_t i) const override {
    return states_ != nullptr ? states_[i] : load_row(problem_.args.row_state, i);
  }
  RowStats stats(std::int64_t i) const override { return make_row_stats(saved_state(i)); }

  void begin_second_visit() { is_second_visit_ = true; }

 private:
  void write(std::int64_t i, const RowStats& s, double loss) const {
    losses_[i] = loss;
    logp_.set(i, static_cast<float>(context_.temperature_on_logprob ? s.logp / context_.temperature : s.logp));
    lse_.set(i, static_cast<float>(s.lse));
    entropy_.set(i, static_cast<float>(s.entropy));
    log_sum_sq_probs_.set(i, static_cast<float>(s.log_sum_sq_probs));
    const double mean = s.smoothing_sum / static_cast<double>(problem_.classes);
    mean_logit_.set(i, static_cast<float>(std::isinf(s.max) ? mean : s.max + mean));
    argmax_.set(i, s.argmax);
    correct_.set(i, s.argmax == context_.labels[i] ? 1 : 0);
  }

  const Problem& problem_;
  const LossContext& context_;
  const RowStage& stage_;
  double* const losses_;
  RowState* const states_;
  const bool writes_;
  bool is_second_visit_ = false;
  const RowOutput<float> logp_, lse_, entropy_, log_sum_sq_probs_, mean_logit_;
  const RowOutput<std::int64_t> argmax_;
  const RowOutput<std::uint8_t> correct_;
};

// Checks every used label before anything is written.
Status resolve_targets(const Problem& p, const Labels& labels, std::int64_t* targets) {
  for (std::int64_t i = 0; i < p.rows; ++i) {
    if (!labels.is_used(i)) {
      targets[i] = cpu::kIgnoredRow;
      continue;
    }
    const std::int64_t label = labels[i];
    if (label < 0 || label >= p.classes) {
      return {TILELOSS_LABEL_OUT_OF_RANGE, "labels[" + to_string(i) + "]: expected 0 <= label < " + to_string(p.classes) +
                                               " or ignore_index " + to_string(p.logit.ignore_index) + ", got " +
                                               to_string(label)};
    }
    const std::int64_t column = label - p.logit.vocab_start;
    targets[i] = column >= 0 && column < p.columns ? column : cpu::kTargetElsewhere;
  }
  return {};
}

cpu::SweepJob make_job(const Problem& p, const tileloss_plan& plan, const LossContext& context, const std::int64_t* targets,
                       std::byte* scratch) {
  cpu::SweepJob job;
  job.kernels = &cpu::kernels(plan.isa);
  job.storage = p.storage;
  job.rows = p.rows;
  job.columns = p.columns;
  job.total_columns = p.total_columns;
  job.logits = p.args.logits.data;
  job.logits_stride = p.args.logits.row_stride;
  job.dlogits = p.needs_backward ? p.args.dlogits.data : nullptr;
  job.dlogits_stride = p.args.dlogits.row_stride;
  job.groups = p.args.row_groups;
  job.from_saved_state = !p.needs_forward;
  job.transform = make_transform(p, context.temperature);
  job.sums = p.sums;
  job.class_weights = class_weights(p);
  job.targets = targets;
  job.schedule = plan.schedule;
  job.threads = plan.threads;
  job.row_block = plan.row_block;
  job.vocab_block = plan.vocab_block;
  job.scratch = scratch;
  return job;
}

// One value a row, or their sum in order of the rows: the same for any number of threads.
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

Status check_workspace(const tileloss_run* given, const tileloss_plan& plan) {
  if (given == nullptr) return {};
  if (given->struct_size != sizeof *given)
    return expected("run.struct_size", to_string(sizeof *given), to_string(given->struct_size));
  if (Status s = check_executor(given->executor); !s.ok()) return s;
  if (given->workspace == nullptr) return {};
  if (reinterpret_cast<std::uintptr_t>(given->workspace) % 64 != 0)
    return expected("workspace", "64-byte alignment", "a pointer without it");
  if (given->workspace_bytes < static_cast<std::size_t>(plan.workspace_bytes)) {
    return {TILELOSS_WORKSPACE_TOO_SMALL, "workspace_bytes: expected at least the plan's " + to_string(plan.workspace_bytes) +
                                              ", got " + to_string(given->workspace_bytes)};
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
    rows.begin_second_visit();
    job.*gradients = wanted;
    job.from_saved_state = true;
  }
  if (p.couples_rows) stage.couple(rows);
  walk();
}

}  // namespace

Status run(const Problem& p, const tileloss_plan& plan, const tileloss_run* given) {
  const cpu::FloatingPointScope scope;  // denominators and sums too, whatever mode the host's thread is in
  if (Status s = check_data(p); !s.ok()) return s;
  if (Status s = check_workspace(given, plan); !s.ok()) return s;
  const WorkspaceLayout layout = workspace_layout(p, plan);
  if (layout.bytes > plan.workspace_bytes) {
    return expected("plan.workspace_bytes", "at least the " + to_string(layout.bytes) + " that its blocks and threads need",
                    to_string(plan.workspace_bytes));
  }
  std::unique_ptr<cpu::ScratchMemory> own;
  auto* workspace = given == nullptr ? nullptr : static_cast<std::byte*>(given->workspace);
  if (workspace == nullptr) {
    own = std::make_unique<cpu::ScratchMemory>(static_cast<std::size_t>(layout.bytes));
    if (!own->ok()) return {TILELOSS_OUT_OF_MEMORY, "workspace: could not allocate " + to_string(layout.bytes) + " bytes"};
    workspace = own->data();
  }
  auto* targets = reinterpret_cast<std::int64_t*>(workspace + layout.targets);
  auto* losses = reinterpret_cast<double*>(workspace + layout.losses);
  LossContext context = make_context(p);
  context.temperature = scalar_value(p.logit.temperature);
  context.scratch = p.stage_bytes > 0 ? workspace + layout.stage : nullptr;
  if (Status s = resolve_targets(p, context.labels, targets); !s.ok()) return s;
  const std::unique_ptr<RowStage> stage = p.loss->info.make(context);
  stage->prepare();

  const bool keeps = keeps_states(p, plan);
  auto* states = keeps ? reinterpret_cast<RowState*>(workspace + layout.states) : nullptr;
  Rows rows(p, context, *stage, losses, states);
  const tileloss_executor* executor = given == nullptr ? nullptr : given->executor;
  if (p.loss->is_linear) {
    cpu::LinearJob job = linear_job(p, plan, context, targets, workspace + layout.scratch);
    run_visits(job, &cpu::LinearJob::wants_gradients, p, keeps, rows, *stage, [&] { cpu::run_linear(job, rows, executor); });
  } else {
    cpu::SweepJob job = make_job(p, plan, context, targets, workspace + layout.scratch);
    run_visits(job, &cpu::SweepJob::dlogits, p, keeps, rows, *stage, [&] { cpu::run_sweeps(job, rows, executor); });
  }
  if (p.pass != TILELOSS_BACKWARD) stage->finish();
  write_loss(p, losses);
  return {};
}

}  // namespace tileloss::api
