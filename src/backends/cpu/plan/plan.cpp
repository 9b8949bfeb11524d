#include "backends/cpu/plan/plan.h"

#include <algorithm>
#include <cstring>

#include "backends/cpu/isa/isa.h"
#include "backends/cpu/plan/head_plan.h"
#include "backends/cpu/sweep/driver.h"
#include "backends/cpu/sweep/row_blocks.h"
#include "backends/cpu/threads/executor.h"

namespace tileloss::impl::cpu {
namespace {

using std::to_string;

// Below this many logits a call takes some 30 microseconds: waking threads costs more than it gains.
constexpr std::int64_t kInlineElements = 1 << 17;
constexpr std::int64_t kInlineProducts = 1 << 21;  // multiply-adds with the LM head
// A thread's share of work between two looks at the counter: about a quarter of a millisecond at 150k columns.
constexpr std::int64_t kMaxRowBlock = 8;
// Each look at the running maximum costs as much as a few hundred columns. Soft-capped blocks are shorter where their tanh waits
// in L1, as it does but for 16-bit logits on AVX-512 (see SmallSoftcap). With float32 logits what tanh's rounding lost waits
// there too. Timed: docs/measurements/amd-zen4-2-cores.md.
constexpr std::int64_t kVocabBlock = 8192;
constexpr std::int64_t kCappedVocabBlock = 2048, kFineCappedVocabBlock = 1024;
// 786,432 classes. Within a core's L2 cache (1 MB of 32-bit exps: 262,144 classes) or in its share of a large L3, reading the
// stash costs less than a second exp. Timed there too.
constexpr std::int64_t kMaxStashBytes = std::int64_t{3} << 20;
constexpr std::int32_t kMaxThreads = 1024;
// Of logits; so that no size of a workspace leaves 64 bits.
constexpr double kMaxElements = 0x1p56;

bool is_both(const Problem& p) { return p.needs_forward && p.needs_backward; }

// Rough: bandwidth and exp rate of a current server core. An orientation, and what schedules are compared by.
double predict_ms(const Problem& p, const tileloss_plan& plan) {
  if (p.loss->is_linear) return predict_linear_ms(p, plan);
  constexpr double kBytesPerSecond = 25e9, kExpsPerSecond = 8e9;
  // A teacher's row costs as much as a student's, and their divergence as much again.
  const double elements = static_cast<double>(p.rows) * static_cast<double>(p.columns) * (p.loss->needs_target_sweep() ? 3 : 1);
  const double width = p.storage == TILELOSS_FLOAT32 ? 4 : 2;
  const bool two_exps = is_both(p) && plan.cpu.schedule != TILELOSS_SCHEDULE_STASH;
  const double passes = (p.needs_forward || p.gives_sums ? 1.0 : 0.0) + (p.needs_backward ? 1.0 : 0.0) +
                        (p.needs_backward && !p.needs_forward ? 1.0 : 0.0);
  const double memory = elements * width * passes / kBytesPerSecond;
  const double exps = elements * (two_exps ? 2 : 1) / (kExpsPerSecond * plan.cpu.threads);
  return 1e3 * std::max(memory, exps);
}

Status check_hints(const tileloss_cpu_plan_options& o) {
  if (o.schedule < TILELOSS_SCHEDULE_AUTO || o.schedule > TILELOSS_SCHEDULE_SWEEPS)
    return expected("schedule", "auto, stash, recompute or sweeps (0 to 3)", to_string(o.schedule));
  if (o.threads < 0 || o.threads > kMaxThreads) return expected("threads", "0 to 1024", to_string(o.threads));
  if (o.row_block < 0) return expected("row_block", ">= 0", to_string(o.row_block));
  if (o.vocab_block < 0 || o.vocab_block % 64 != 0 || o.vocab_block > kMaxVocabBlock) {
    return expected("vocab_block", "a multiple of 64 up to " + to_string(kMaxVocabBlock), to_string(o.vocab_block));
  }
  if (o.reserved != 0) return expected("plan_options.cpu.reserved", "0", to_string(o.reserved));
  if (o.chunk_columns < 0) return expected("chunk_columns", ">= 0", to_string(o.chunk_columns));
  return {};
}

// Of the student or the teacher.
bool has_softcap(const Problem& p) {
  return p.logit.softcap > 0 ||
         (p.loss->target() == TargetKind::kLogits && p.loss->info.teacher_options(p.options.data()).softcap > 0);
}

tileloss_schedule choose_schedule(const Problem& p, tileloss_schedule asked) {
  // Both rows' exps wait for their divergence, whether there is a gradient or not.
  if (p.loss->needs_target_sweep()) return TILELOSS_SCHEDULE_STASH;
  if (!is_both(p) || p.couples_rows || p.is_shard) return TILELOSS_SCHEDULE_SWEEPS;
  if (asked != TILELOSS_SCHEDULE_AUTO) return asked;
  return p.columns * 4 <= kMaxStashBytes ? TILELOSS_SCHEDULE_STASH : TILELOSS_SCHEDULE_RECOMPUTE;
}

}  // namespace

std::int64_t default_vocab_block(const Problem& p, tileloss_isa isa) {
  const bool is_fused = isa >= TILELOSS_ISA_AVX512 && isa <= TILELOSS_ISA_AVX512_AMX && p.storage != TILELOSS_FLOAT32;
  if (!has_softcap(p) || (is_fused && !p.loss->needs_target_sweep())) return kVocabBlock;
  return p.storage == TILELOSS_FLOAT32 ? kFineCappedVocabBlock : kCappedVocabBlock;
}

std::int64_t several_labels(const Problem& p) { return p.has_several_labels() ? p.args.labels_per_row : 0; }

ScratchShape scratch_shape(const Problem& p, tileloss_schedule schedule, std::int64_t vocab_block) {
  ScratchShape s = {
      p.loss->target(), schedule == TILELOSS_SCHEDULE_STASH, p.columns, vocab_block, has_softcap(p), p.args.teacher_ids.cols,
      several_labels(p)};
  s.has_allowed = present(p.args.allowed);
  s.has_class_weights = present(p.args.class_weights);
  s.element_bytes = element_bytes(p.storage);
  if (s.target == TargetKind::kLogits) s.target_bytes = s.element_bytes;
  if (s.target == TargetKind::kProbabilities) s.target_bytes = element_bytes(p.args.target_probs.dtype);
  return s;
}

bool keeps_states(const Problem& p, const tileloss_plan& plan) {
  return p.needs_forward && !p.loss->needs_target_sweep() &&
         (p.couples_rows || (p.needs_backward && plan.cpu.schedule == TILELOSS_SCHEDULE_SWEEPS));
}

WorkspaceLayout lay_out(const Problem& p, const tileloss_plan& plan, bool with_scratch) {
  WorkspaceLayout w;
  std::int64_t at = 0;
  const auto take = [&](const char* name, std::int64_t bytes) {
    const std::int64_t begin = at;
    at = round_up(at + bytes, 64);
    if (bytes > 0) w.buffers.push_back({name, at - begin});
    return begin;
  };
  w.label_columns = take("labels", p.rows * 8);
  w.losses = take("losses", p.rows * 8);
  w.states = take("row states", keeps_states(p, plan) ? p.rows * static_cast<std::int64_t>(sizeof(RowState)) : 0);
  w.stage = take("row stage", p.stage_bytes);
  w.scratch = at;
  if (with_scratch && p.loss->is_linear) {
    const LinearLayout linear = linear_layout(linear_shape(p, plan), kernels(plan.cpu.isa).matmul);
    w.buffers.insert(w.buffers.end(), linear.buffers.begin(), linear.buffers.end());
    at += linear.bytes;
  } else if (with_scratch) {
    take("scratch of threads", plan.cpu.threads * scratch_shape(p, plan.cpu.schedule, plan.cpu.vocab_block).bytes());
  }
  w.bytes = at;
  return w;
}

WorkspaceLayout workspace_layout(const Problem& p, const tileloss_plan& plan) { return lay_out(p, plan, true); }
std::int64_t fixed_bytes(const Problem& p, const tileloss_plan& plan) { return lay_out(p, plan, false).bytes; }

Status check_plan(const tileloss_plan& plan) {
  if (!isa_supported(plan.cpu.isa))
    return {TILELOSS_UNSUPPORTED, std::string("plan.cpu.isa: expected one that this machine has, got ") + isa_name(plan.cpu.isa)};
  if (plan.cpu.schedule <= TILELOSS_SCHEDULE_AUTO || plan.cpu.schedule > TILELOSS_SCHEDULE_SWEEPS)
    return expected("plan.cpu.schedule", "stash, recompute or sweeps (1 to 3)", to_string(plan.cpu.schedule));
  if (plan.cpu.threads < 1 || plan.cpu.threads > kMaxThreads)
    return expected("plan.cpu.threads", "1 to 1024", to_string(plan.cpu.threads));
  if (plan.cpu.row_block < 1) return expected("plan.cpu.row_block", ">= 1", to_string(plan.cpu.row_block));
  if (plan.cpu.vocab_block < 1 || plan.cpu.vocab_block % 64 != 0 || plan.cpu.vocab_block > kMaxVocabBlock)
    return expected("plan.cpu.vocab_block", "a multiple of 64 up to " + to_string(kMaxVocabBlock),
                    to_string(plan.cpu.vocab_block));
  if (plan.workspace_bytes < 0) return expected("plan.workspace_bytes", ">= 0", to_string(plan.workspace_bytes));
  if (plan.cpu.chunk_columns < 0) return expected("plan.cpu.chunk_columns", ">= 0", to_string(plan.cpu.chunk_columns));
  return {};
}

namespace {

// Schedule, blocks, threads and bytes of a call on logits.
Status cut_logits(const Problem& p, const tileloss_plan_options& hints, std::int64_t available, tileloss_plan* out) {
  tileloss_plan& plan = *out;
  plan.cpu.vocab_block = hints.cpu.vocab_block > 0 ? hints.cpu.vocab_block : default_vocab_block(p, plan.cpu.isa);
  plan.cpu.schedule = choose_schedule(p, hints.cpu.schedule);
  const bool is_small = hints.cpu.threads == 0 && p.rows * std::max<std::int64_t>(p.columns, 1) <= kInlineElements;
  const std::int64_t usable = is_small ? 1 : std::clamp<std::int64_t>(p.rows, 1, available);
  plan.cpu.row_block = hints.cpu.row_block > 0 ? std::min(hints.cpu.row_block, std::max<std::int64_t>(p.rows, 1))
                                               : std::clamp<std::int64_t>(p.rows / (4 * usable), 1, kMaxRowBlock);
  const std::int64_t blocks = (p.rows + plan.cpu.row_block - 1) / plan.cpu.row_block;
  plan.cpu.threads = static_cast<std::int32_t>(std::clamp<std::int64_t>(blocks, 1, usable));
  plan.workspace_bytes = workspace_layout(p, plan).bytes;
  if (hints.workspace_bytes > 0 && plan.workspace_bytes > hints.workspace_bytes) {
    if (plan.cpu.schedule == TILELOSS_SCHEDULE_STASH && !p.loss->needs_target_sweep())
      plan.cpu.schedule = TILELOSS_SCHEDULE_RECOMPUTE;
    plan.workspace_bytes = workspace_layout(p, plan).bytes;
    if (plan.workspace_bytes > hints.workspace_bytes) {
      return {TILELOSS_WORKSPACE_TOO_SMALL, "workspace_bytes: expected at least " + to_string(plan.workspace_bytes) +
                                                ", got a budget of " + to_string(hints.workspace_bytes)};
    }
  }
  return {};
}

// The same with the LM head. Work is cut along the vocabulary too, so that few rows still keep all threads busy.
Status cut_linear(const Problem& p, const tileloss_plan_options& hints, std::int64_t available, tileloss_plan* plan) {
  const std::int64_t own = std::max<std::int64_t>(p.args.hidden.cols, 1);
  const std::int64_t width = std::max(own, p.args.teacher_hidden.cols);
  plan->cpu.vocab_block =
      hints.cpu.vocab_block > 0 ? hints.cpu.vocab_block : linear_tile(kernels(plan->cpu.isa).matmul, compute_of(p), width);
  plan->cpu.chunk_columns = hints.cpu.chunk_columns;
  const bool is_small = hints.cpu.threads == 0 && p.rows * p.columns * width <= kInlineProducts;
  plan->cpu.threads = static_cast<std::int32_t>(is_small ? 1 : std::max<std::int64_t>(available, 1));
  return plan_linear(p, hints.cpu.schedule, hints.cpu.row_block, hints.workspace_bytes, plan);
}

}  // namespace

StorageType storage_type(tileloss_dtype dtype) {
  return dtype == TILELOSS_BFLOAT16 ? kStorageBfloat16 : dtype == TILELOSS_FLOAT16 ? kStorageFloat16 : kStorageFloat32;
}

Status make_plan(const Problem& p, const tileloss_plan_options& hints, const tileloss_executor* executor, tileloss_plan* out) {
  if (Status s = check_hints(hints.cpu); !s.ok()) return s;
  if (p.loss->needs_target_sweep() && hints.cpu.schedule != TILELOSS_SCHEDULE_AUTO &&
      hints.cpu.schedule != TILELOSS_SCHEDULE_STASH) {
    return expected("schedule", "auto or stash, as " + p.loss->name + " has no other",
                    tileloss_schedule_name(hints.cpu.schedule));
  }
  if (is_both(p) && p.couples_rows && hints.cpu.schedule != TILELOSS_SCHEDULE_AUTO &&
      hints.cpu.schedule != TILELOSS_SCHEDULE_SWEEPS) {
    return expected("schedule", "auto or sweeps, as these options of " + p.loss->name + " couple the rows",
                    tileloss_schedule_name(hints.cpu.schedule));
  }
  if (static_cast<double>(p.rows) * static_cast<double>(std::max<std::int64_t>(p.total_columns, 1)) > kMaxElements) {
    return expected(p.loss->is_linear ? "hidden.rows" : "logits.rows", "at most 2^56 logits in all",
                    shape(p.rows, p.total_columns));
  }
  const IsaChoice isa = choose_isa(hints.cpu.isa);
  if (!isa.error.empty()) return {TILELOSS_UNSUPPORTED, isa.error};

  tileloss_plan& plan = *out;
  plan.cpu.isa = isa.isa;
  std::strncpy(plan.cpu.isa_note, isa.note.c_str(), sizeof plan.cpu.isa_note - 1);
  const std::int64_t available = hints.cpu.threads > 0 ? hints.cpu.threads
                                 : executor != nullptr ? std::min(executor->threads, kMaxThreads)
                                                       : default_threads();
  Status cut = p.loss->is_linear ? cut_linear(p, hints, available, &plan) : cut_logits(p, hints, available, &plan);
  if (!cut.ok()) return cut;
  for (const NamedBytes& buffer : workspace_layout(p, plan).buffers) {
    if (plan.buffer_count == TILELOSS_MAX_PLAN_BUFFERS) break;
    tileloss_plan_buffer& b = plan.buffers[plan.buffer_count++];
    std::strncpy(b.name, buffer.name, sizeof b.name - 1);
    b.bytes = buffer.bytes;
  }
  plan.predicted_ms = predict_ms(p, plan);
  if (p.loss->is_linear) {
    const LinearShape shape = linear_shape(p, plan);
    plan.cpu.kept_rows = shape.kept_in_dhead.rows;
    plan.cpu.kept_columns = plan.cpu.kept_rows > 0 && plan.cpu.kept_rows == shape.rows ? shape.columns : shape.kept;
  }
  return {};
}

}  // namespace tileloss::impl::cpu
