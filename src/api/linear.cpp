#include "api/linear.h"

#include <algorithm>
#include <string>

#include "api/arguments.h"
#include "cpu/isa.h"

namespace tileloss::api {
namespace {

using std::to_string;

// Fewer rows than this at a time re-read the head too often for the product that they save.
constexpr std::int64_t kLeastStashedRows = 256;
// Few rows have small logits: half of those would never hold a stash, and no machine with an LM head misses this much.
constexpr std::int64_t kLeastDefaultBudget = std::int64_t{128} << 20;
constexpr std::int64_t kChunks[] = {2048, 1024, 512, 0};  // columns of a backward's chunk, from the fastest; 0: one tile

std::int64_t bytes_of(const Problem& p, tileloss_plan plan) {
  plan.workspace_bytes = 0;
  return workspace_layout(p, plan).bytes;
}

Status check_like(const char* name, const tileloss_matrix& gradient, const char* of_name, const tileloss_matrix& of) {
  if (!present(gradient)) return {};
  if (Status s = check_matrix(name, gradient, Layout::kAnyStrides); !s.ok()) return s;
  if (gradient.dtype != TILELOSS_FLOAT32 && gradient.dtype != of.dtype) {
    return expected(std::string(name) + ".dtype", std::string("float32 or ") + of_name + "'s, " + dtype_name(of.dtype),
                    dtype_name(gradient.dtype));
  }
  if (gradient.rows != of.rows || gradient.cols != of.cols)
    return expected(name, std::string(of_name) + "'s shape " + shape(of.rows, of.cols), shape(gradient.rows, gradient.cols));
  return {};
}

cpu::Operand operand(const tileloss_matrix& m) { return {m.data, storage_type(m.dtype), m.row_stride, m.col_stride}; }
cpu::Operand operand(const tileloss_vector& v) { return {v.data, storage_type(v.dtype), v.stride, 0}; }
cpu::OutputMatrix output(const tileloss_matrix& m) { return {m.data, storage_type(m.dtype), m.row_stride, m.col_stride}; }
cpu::OutputMatrix output(const tileloss_vector& v) { return {v.data, storage_type(v.dtype), v.stride}; }

}  // namespace

Status resolve_linear(Problem& p) {
  const tileloss_args& a = p.args;
  if (present(a.logits)) return expected("logits", "none: " + p.loss->name + " makes them of hidden and head", "a matrix");
  if (present(a.dlogits)) return expected("dlogits", "none: " + p.loss->name + " never holds them", "a matrix");
  const std::pair<const char*, bool> gradients[] = {
      {"dhidden", present(a.dhidden)}, {"dhead", present(a.dhead)}, {"dbias", present(a.dbias)}};
  const bool is_backward = p.pass == TILELOSS_BACKWARD || p.pass == TILELOSS_VALUE_AND_GRAD;
  for (const auto& [name, is_present] : gradients) {
    if (is_present && !is_backward) return expected(name, "none in this pass", "a tensor");
  }
  if (!present(a.hidden)) return expected("hidden", "a float32, bfloat16 or float16 matrix [N,H]", "none");
  if (!present(a.head)) return expected("head", "a float32, bfloat16 or float16 matrix [V,H]", "none");
  if (Status s = check_matrix("hidden", a.hidden, Layout::kAnyStrides); !s.ok()) return s;
  if (Status s = check_matrix("head", a.head, Layout::kAnyStrides); !s.ok()) return s;
  if (a.head.rows < 1) return expected("head.rows", ">= 1", to_string(a.head.rows));
  if (a.head.cols != a.hidden.cols) return expected("head.cols", "hidden's, " + to_string(a.hidden.cols), to_string(a.head.cols));
  if (Status s = check_like("dhidden", a.dhidden, "hidden", a.hidden); !s.ok()) return s;
  if (Status s = check_like("dhead", a.dhead, "head", a.head); !s.ok()) return s;
  if (present(a.dbias) && a.dbias.dtype != TILELOSS_FLOAT32 && a.dbias.dtype != a.bias.dtype) {
    return expected("dbias.dtype",
                    present(a.bias) ? std::string("float32 or bias's, ") + dtype_name(a.bias.dtype) : "float32 without a bias",
                    dtype_name(a.dbias.dtype));
  }
  if (is_backward && !gradients[0].second && !gradients[1].second && !gradients[2].second)
    return expected("dhidden", "it, dhead or dbias in a backward", "none of them");
  if (a.compute_dtype != TILELOSS_NONE && a.compute_dtype != TILELOSS_FLOAT32 && a.compute_dtype != TILELOSS_BFLOAT16)
    return expected("compute_dtype", "none, float32 or bfloat16", dtype_name(a.compute_dtype));
  if (a.accumulate != 0 && a.accumulate != 1) return expected("accumulate", "0 or 1", to_string(a.accumulate));
  p.rows = a.hidden.rows;
  p.total_columns = a.head.rows;
  p.storage = cpu::kStorageFloat32;
  const bool both_bfloat16 = a.hidden.dtype == TILELOSS_BFLOAT16 && a.head.dtype == TILELOSS_BFLOAT16;
  const bool bfloat16 = a.compute_dtype == TILELOSS_BFLOAT16 || (a.compute_dtype == TILELOSS_NONE && both_bfloat16);
  p.compute = bfloat16 ? cpu::Compute::kBfloat16 : cpu::Compute::kFloat32;
  return {};
}

Status check_linear_pointers(const Problem& p) {
  const tileloss_args& a = p.args;
  const std::pair<const char*, const tileloss_matrix*> matrices[] = {
      {"hidden", &a.hidden}, {"head", &a.head}, {"dhidden", &a.dhidden}, {"dhead", &a.dhead}};
  for (const auto& [name, m] : matrices) {
    if (present(*m) && m->rows > 0 && m->data == nullptr) return expected(std::string(name) + ".data", "a pointer", "null");
  }
  for (const auto& [name, gradient] : {std::pair{"dhidden", &a.dhidden}, {"dhead", &a.dhead}}) {
    for (const auto& [other_name, other] : {std::pair{"hidden", &a.hidden}, {"head", &a.head}}) {
      if (present(*gradient) && present(*other) && overlap(*gradient, *other))
        return expected(std::string(name) + ".data", std::string("a buffer apart from ") + other_name, "one that overlaps it");
    }
  }
  if (present(a.dhidden) && present(a.dhead) && overlap(a.dhidden, a.dhead))
    return expected("dhead.data", "a buffer apart from dhidden", "one that overlaps it");
  return {};
}

cpu::LinearShape linear_shape(const Problem& p, const tileloss_plan& plan) {
  cpu::LinearShape s;
  s.rows = p.rows;
  s.columns = p.columns;
  s.total_columns = p.total_columns;
  s.width = p.args.hidden.cols;
  s.hidden_bytes = present(p.args.hidden) ? element_bytes(p.args.hidden.dtype) : 0;
  s.compute = p.compute;
  s.forward = p.needs_forward && p.total_columns > 0;
  s.dhidden = p.needs_backward && present(p.args.dhidden);
  s.dhead = p.needs_backward && present(p.args.dhead);
  s.dbias = p.needs_backward && present(p.args.dbias);
  const bool adds_in_place = s.dhead && p.args.dhead.dtype == TILELOSS_FLOAT32;
  s.dhead_across = adds_in_place && p.args.dhead.col_stride != 1 && p.args.dhead.row_stride == 1;
  s.dhead_in_place = adds_in_place && (p.args.dhead.col_stride == 1 || s.dhead_across);
  s.bias = present(p.args.bias);
  s.threads = plan.threads;
  s.tile = plan.vocab_block;
  s.is_stash = plan.schedule == TILELOSS_SCHEDULE_STASH;
  s.row_chunk = s.is_stash ? std::min(plan.row_block, p.rows) : p.rows;
  s.chunk = s.tile;
  const cpu::MatmulTable& matmul = cpu::kernels(plan.isa).matmul;
  for (const std::int64_t chunk : kChunks) {
    s.chunk = std::max<std::int64_t>(chunk / s.tile, 1) * s.tile;
    if (plan.workspace_bytes == 0 || cpu::linear_layout(s, matmul).bytes + fixed_bytes(p, plan) <= plan.workspace_bytes) break;
  }
  return s;
}

Status plan_linear(const Problem& p, tileloss_schedule wish, std::int64_t row_block, std::int64_t budget, tileloss_plan* plan) {
  const bool is_both = p.needs_forward && p.needs_backward;
  const bool may_stash = is_both && !p.couples_rows;
  const std::int64_t logits = p.rows * p.columns * (present(p.args.hidden) ? element_bytes(p.args.hidden.dtype) : 0);
  tileloss_plan lean = *plan;
  lean.schedule = may_stash ? TILELOSS_SCHEDULE_RECOMPUTE : TILELOSS_SCHEDULE_SWEEPS;
  lean.row_block = std::max<std::int64_t>(p.rows, 1);
  lean.workspace_bytes = 1;  // so small that the narrowest chunk is taken
  const std::int64_t least = workspace_layout(p, lean).bytes;
  const std::int64_t cap = budget > 0 ? budget : std::max({logits / 2, kLeastDefaultBudget, bytes_of(p, lean)});
  if (may_stash && wish != TILELOSS_SCHEDULE_RECOMPUTE && wish != TILELOSS_SCHEDULE_SWEEPS) {
    tileloss_plan stash = *plan;
    stash.schedule = TILELOSS_SCHEDULE_STASH;
    const std::int64_t panel = cpu::kernels(plan->isa).matmul.a_panel;
    const auto whole_panels = [&](std::int64_t rows) { return std::max<std::int64_t>((rows + panel - 1) / panel, 1) * panel; };
    const std::int64_t most = whole_panels(row_block > 0 ? std::min(row_block, p.rows) : p.rows);
    const bool is_wished = wish == TILELOSS_SCHEDULE_STASH;
    const std::int64_t fewest = is_wished && budget > 0 ? panel : std::min(most, whole_panels(kLeastStashedRows));
    for (std::int64_t rows = most;; rows = std::max(fewest, whole_panels(rows - std::max(panel, std::int64_t{64})))) {
      stash.row_block = rows;
      stash.workspace_bytes = bytes_of(p, stash);
      if (stash.workspace_bytes <= cap || (rows == fewest && is_wished && budget == 0)) {
        *plan = stash;
        return {};
      }
      if (rows == fewest) break;
    }
    if (is_wished) {
      return {TILELOSS_WORKSPACE_TOO_SMALL, "workspace_bytes: expected at least " + to_string(stash.workspace_bytes) +
                                                " for schedule stash, got a budget of " + to_string(cap)};
    }
  }
  if (budget > 0 && least > budget) {
    return {TILELOSS_WORKSPACE_TOO_SMALL,
            "workspace_bytes: expected at least " + to_string(least) + ", got a budget of " + to_string(budget)};
  }
  lean.workspace_bytes = std::max(least, cap);
  lean.workspace_bytes = workspace_layout(p, lean).bytes;
  *plan = lean;
  return {};
}

cpu::LinearJob linear_job(const Problem& p, const tileloss_plan& plan, const LossContext& context, const std::int64_t* targets,
                          std::byte* workspace) {
  const tileloss_args& a = p.args;
  cpu::LinearJob job;
  job.kernels = &cpu::kernels(plan.isa);
  job.shape = linear_shape(p, plan);
  job.layout = cpu::linear_layout(job.shape, job.kernels->matmul);
  if (present(a.hidden)) job.hidden = operand(a.hidden);
  if (present(a.head)) job.head = operand(a.head);
  if (present(a.bias)) job.bias = operand(a.bias);
  job.transform = make_transform(p, context.temperature);
  job.sums = p.sums;
  job.class_weights = class_weights(p);
  job.targets = targets;
  job.from_saved_state = !p.needs_forward;
  job.wants_gradients = p.needs_backward;
  job.dhidden = output(a.dhidden);
  job.dhead = output(a.dhead);
  job.dbias = output(a.dbias);
  job.accumulate = a.accumulate != 0;
  job.workspace = workspace;
  return job;
}

}  // namespace tileloss::api
