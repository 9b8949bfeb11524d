#include "backends/cpu/plan/head_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "backends/cpu/head/linear_blocks.h"
#include "backends/cpu/isa/isa.h"

namespace tileloss::impl::cpu {
namespace {

using std::to_string;

// Few rows have small logits: half of those would hold too few of them, and no machine with an LM head misses this much. It is
// what 256 rows in float32 take at 151,936 classes. Timed, as what follows: docs/measurements/amd-zen4-2-cores.md.
constexpr std::int64_t kLeastDefaultBudget = std::int64_t{192} << 20;
// Fewer rows at a time leave threads without work while dhidden is made.
constexpr std::int64_t kLeastRowsAtOnce = 256;
// Rows at a time and chunks decide in which order gradients are added up. So they are chosen as if these were the threads, the
// most whose scratch a budget has room for: results are then the same for any number of threads.
constexpr std::int32_t kPlannedThreads[] = {8, 4, 2, 1};
constexpr std::int64_t kChunks[] = {2048, 1024, 512, 0};  // columns of a backward's chunk, from the fastest; 0: one tile
// Of targets other than labels, rows whose logits are there at once: more save little.
constexpr std::int64_t kMostTargetRows = 512;
constexpr std::int64_t kWidestAmxChunk = 1536;  // with products in tile registers: wider ones are no faster

std::int64_t layout_bytes(const Problem& p, const tileloss_plan& plan, const LinearShape& s) {
  return linear_layout(s, kernels(plan.cpu.isa).matmul).bytes + fixed_bytes(p, plan);
}

// The chunk of at most so many columns: whole tiles, one at least.
std::int64_t chunk_of(const LinearShape& s, const tileloss_plan& plan, std::int64_t columns) {
  if (kernels(plan.cpu.isa).matmul.uses_amx(s.compute)) columns = std::min(columns, kWidestAmxChunk);
  return std::max<std::int64_t>(columns / s.tile, 1) * s.tile;
}

std::int64_t bytes_within(const Problem& p, tileloss_plan plan, std::int64_t budget) {
  plan.workspace_bytes = budget;
  return workspace_layout(p, plan).bytes;
}

// The largest n in [0, most] with fits(n), which is true up to some n and false beyond; 0 if there is none.
template <class Fits>
std::int64_t largest(std::int64_t most, const Fits& fits) {
  if (most <= 0 || fits(most)) return std::max<std::int64_t>(most, 0);
  std::int64_t low = 0, high = most;  // high does not fit
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (fits(middle) ? low : high) = middle;
  }
  return low;
}

std::int64_t whole_panels(const tileloss_plan& plan, std::int64_t rows) {
  const std::int64_t panel = kernels(plan.cpu.isa).matmul.a_panel;
  return std::max<std::int64_t>((rows + panel - 1) / panel, 1) * panel;
}

// Where dhead can hold z (or gradients) of all rows' tiles before it is written: [V,H] without gaps, or [H,V].
KeptInDhead kept_in_dhead(const Problem& p, const tileloss_plan& plan, const LinearShape& s) {
  KeptInDhead kept;
  if (!s.own.dhead || p.linear.accumulate != 0 || (!s.needs_target_sweep() && s.columns < s.tile)) return kept;
  const tileloss_matrix& dhead = p.args.dhead;
  const std::int64_t kept_bytes = s.needs_target_sweep() ? s.dz_bytes() : s.kept_in_words ? 2 : 4;
  const std::int64_t bytes = element_bytes(dhead.dtype), elements = bytes / kept_bytes;  // in one of dhead's
  std::int64_t lines = 1;
  if (dhead.col_stride == 1 && dhead.row_stride == s.own.width) {
    kept.rows_of_line = s.own.width * elements;
    kept.column_bytes = s.own.width * bytes;
  } else if (dhead.row_stride == 1 && dhead.col_stride >= s.total_columns) {
    kept.rows_of_line = elements;
    kept.line_bytes = dhead.col_stride * bytes;
    kept.column_bytes = bytes;
    lines = s.own.width;
  } else {
    return kept;
  }
  const std::int64_t most = kept.rows_of_line * lines, tile_rows = row_tile(kernels(plan.cpu.isa).matmul);
  kept.rows = most >= s.rows ? s.rows : most / tile_rows * tile_rows;
  return kept.rows > 0 ? kept : KeptInDhead{};
}

// Of the logits, in [0, 1].
double share_kept(const LinearShape& s) {
  const auto in_dhead = static_cast<double>(s.kept_in_dhead.rows) * static_cast<double>(s.whole_tiles() * s.tile);
  const auto others = static_cast<double>(s.row_chunk - s.kept_in_dhead.rows) * static_cast<double>(s.kept);
  return (in_dhead + others) / (static_cast<double>(s.row_chunk) * static_cast<double>(s.columns));
}

// The teacher's side, and as many rows at a time as fit.
void set_target(const Problem& p, const tileloss_plan& plan, LinearShape& s) {
  if (p.loss->target() == TargetKind::kLogits) {
    s.target.width = p.args.teacher_hidden.cols;
    s.target.hidden_bytes = element_bytes(p.args.teacher_hidden.dtype);
    s.target.bias = present(p.args.teacher_bias);
  }
  s.target.scratch = scratch_shape(p, plan.cpu.schedule, default_vocab_block(p, plan.cpu.isa));
  s.target.rows = whole_panels(plan, 1);
  if (p.linear.accumulate == 0 && s.row_chunk == p.rows) s.kept_in_dhead = kept_in_dhead(p, plan, s);
}

PartShape part_shape(const Problem& p, const tileloss_matrix& hidden, const tileloss_matrix& dhidden,
                     const tileloss_matrix& dhead) {
  PartShape part;
  if (!present(hidden)) return part;
  part.width = hidden.cols;
  part.hidden_bytes = element_bytes(hidden.dtype);
  part.dhidden = p.needs_backward && present(dhidden);
  part.dhead = p.needs_backward && present(dhead);
  const bool adds_in_place = part.dhead && dhead.dtype == TILELOSS_FLOAT32;
  part.dhead_across = adds_in_place && dhead.col_stride != 1 && dhead.row_stride == 1;
  part.dhead_in_place = adds_in_place && (dhead.col_stride == 1 || part.dhead_across);
  return part;
}

}  // namespace

Compute compute_of(const Problem& p) { return p.compute == TILELOSS_BFLOAT16 ? Compute::kBfloat16 : Compute::kFloat32; }

// What fits in plan.workspace_bytes (0: anything): the widest chunk where the plan has none, then the most columns.
LinearShape linear_shape(const Problem& p, const tileloss_plan& plan) {
  LinearShape s;
  s.rows = p.rows;
  s.columns = p.columns;
  s.total_columns = p.total_columns;
  s.own = part_shape(p, p.args.hidden, p.args.dhidden, p.args.dhead);
  s.low_rank = part_shape(p, p.args.hidden_r, p.args.dhidden_r, p.args.dhead_r);
  s.compute = compute_of(p);
  s.forward = (p.needs_forward || p.loss->needs_target_sweep()) && p.total_columns > 0;
  s.dbias = p.needs_backward && present(p.args.dbias);
  s.bias = present(p.args.bias);
  s.softcap = p.logit.softcap > 0;
  s.allowed = present(p.args.allowed);
  s.labels_per_row = several_labels(p);
  s.threads = plan.cpu.threads;
  s.tile = plan.cpu.vocab_block;
  const bool cuts_rows = plan.cpu.schedule == TILELOSS_SCHEDULE_STASH, keeps = cuts_rows && !p.loss->needs_target_sweep();
  // What waits for a second sweep over all rows is all rows'.
  const bool is_one_sweep = !p.merges_shards() && !p.couples_rows;
  s.row_chunk = cuts_rows && is_one_sweep ? std::min(plan.cpu.row_block, p.rows) : p.rows;
  if (p.loss->needs_target_sweep()) set_target(p, plan, s);
  const bool keeps_all = keeps && s.row_chunk < p.rows;
  s.kept_in_words = keeps && s.compute == Compute::kBfloat16 && !(p.logit.softcap > 0) && p.is_multiple_of_p;
  if (keeps && !keeps_all) s.kept_in_dhead = kept_in_dhead(p, plan, s);
  s.kept = keeps_all ? p.columns : 0;
  const auto fits = [&] { return plan.workspace_bytes == 0 || layout_bytes(p, plan, s) <= plan.workspace_bytes; };
  for (const std::int64_t chunk : kChunks) {
    s.chunk = chunk_of(s, plan, chunk);
    if (plan.cpu.chunk_columns > 0 ? s.chunk <= plan.cpu.chunk_columns : fits()) break;
  }
  if (s.needs_target_sweep()) {
    const std::int64_t panel = s.target.rows, most = std::max(panel, std::min(kMostTargetRows, s.row_chunk));
    const auto set = [&](std::int64_t panels) { s.target.rows = panel * std::max<std::int64_t>(panels, 1); };
    set(largest((most + panel - 1) / panel, [&](std::int64_t panels) {
      set(panels);
      return fits();
    }));
  }
  if (keeps && !keeps_all && s.kept_in_dhead.rows < s.rows) {
    const auto keep = [&](std::int64_t tiles) { s.kept = std::min(tiles * s.tile, p.columns); };
    keep(largest((p.columns + s.tile - 1) / s.tile, [&](std::int64_t tiles) {
      keep(tiles);
      return fits();
    }));
  }
  return s;
}

// Rough, as predict_ms is: products at a server core's rate; for each chunk of rows but the first the head is read and packed
// twice more, and dhead, or its sums, read and written, by as many threads as memory serves.
double predict_linear_ms(const Problem& p, const tileloss_plan& plan) {
  constexpr double kBytesPerSecond = 8.5e9, kMultiplyAddsPerSecond = 1e11, kAmxMultiplyAddsPerSecond = 8e11;
  if (p.rows == 0 || p.columns == 0) return 0;
  const LinearShape s = linear_shape(p, plan);
  const double columns = static_cast<double>(s.columns), weights = columns * static_cast<double>(s.own.width);
  const double again = s.backward() && !s.needs_target_sweep() ? 1 - share_kept(s) : 0;
  const auto cost_of = [&](const PartShape& part) {
    return ((s.forward ? 1 : 0) + again + (part.dhidden ? 1 : 0) + (part.dhead ? 1 : 0)) * static_cast<double>(part.width);
  };
  const bool uses_amx = kernels(plan.cpu.isa).matmul.uses_amx(s.compute);
  const double rate = (uses_amx ? kAmxMultiplyAddsPerSecond : kMultiplyAddsPerSecond) * plan.cpu.threads;
  const double bandwidth = kBytesPerSecond * std::min(plan.cpu.threads, kPlannedThreads[0]);
  const std::int64_t more_chunks = (s.rows - 1) / std::max<std::int64_t>(s.row_chunk, 1);
  double moved = static_cast<double>(more_chunks) * weights *
                 (2.0 * static_cast<double>(element_bytes(p.args.head.dtype)) + (s.own.dhead ? 8 : 0));
  double multiply_adds = (cost_of(s.own) + cost_of(s.low_rank)) * static_cast<double>(s.rows) * columns;
  if (s.needs_target_sweep()) {
    const double teacher = columns * static_cast<double>(s.target.width),
                 parts = std::ceil(static_cast<double>(s.rows) / static_cast<double>(s.target.rows));
    multiply_adds += static_cast<double>(s.rows) * teacher;
    moved += parts * (weights * static_cast<double>(element_bytes(p.args.head.dtype)) +
                      teacher * static_cast<double>(element_bytes(p.args.teacher_head.dtype)));
  }
  return 1e3 * (multiply_adds / rate + moved / bandwidth);
}

namespace {

// The fastest plan of schedule stash within the cap: columns of all rows, or all columns of some rows at a time. None: its
// workspace_bytes say how many would do.
tileloss_plan plan_stash(const Problem& p, const tileloss_plan& base, std::int64_t row_block, std::int64_t fewest,
                         std::int64_t cap) {
  tileloss_plan stash = base, best = base;
  stash.cpu.schedule = best.cpu.schedule = TILELOSS_SCHEDULE_STASH;
  best.workspace_bytes = std::numeric_limits<std::int64_t>::max();
  // A shard's states are handed out all at once.
  const bool may_cut = !p.is_shard;
  const std::int64_t most = whole_panels(base, may_cut && row_block > 0 ? std::min(row_block, p.rows) : p.rows);
  const auto consider = [&](std::int64_t rows, std::int64_t budget) {
    stash.cpu.row_block = rows;
    stash.workspace_bytes = bytes_within(p, stash, budget);
    stash.predicted_ms = predict_linear_ms(p, stash);
    const bool fits = stash.workspace_bytes <= cap, is_first = best.workspace_bytes > cap;
    if (is_first ? stash.workspace_bytes < best.workspace_bytes : fits && stash.predicted_ms < best.predicted_ms) best = stash;
  };
  if (most >= p.rows) consider(most, cap);
  const std::int64_t panel = whole_panels(base, 1);
  const auto fits = [&](std::int64_t panels) {
    stash.cpu.row_block = panels * panel;
    return bytes_within(p, stash, 0) <= cap;
  };
  const std::int64_t at_once = panel * std::max<std::int64_t>(1, largest(most / panel, fits));
  if (may_cut && at_once < p.rows && at_once >= std::min(fewest, most)) {
    const std::int64_t chunks = (p.rows + at_once - 1) / at_once;
    consider(whole_panels(base, (p.rows + chunks - 1) / chunks), 0);
  }
  return best;
}

Status too_small(std::int64_t least, const char* for_what, std::int64_t budget) {
  return {TILELOSS_WORKSPACE_TOO_SMALL,
          "workspace_bytes: expected at least " + to_string(least) + for_what + ", got a budget of " + to_string(budget)};
}

}  // namespace

namespace {

// Rows in chunks, whose gradients wait for dhead at once: as many as are fastest within the budget.
Status choose_some_rows(const Problem& p, std::int64_t row_block, std::int64_t budget, tileloss_plan* plan) {
  const std::int64_t logits = p.rows * p.columns * element_bytes(p.args.hidden.dtype), panel = whole_panels(*plan, 1);
  const std::int64_t sides = p.loss->target() == TargetKind::kLogits ? 2 : 1;
  const std::int64_t cap = budget > 0 ? budget : std::max(sides * logits / 2, kLeastDefaultBudget);
  tileloss_plan best = *plan, least = *plan, candidate = *plan;
  best.workspace_bytes = least.workspace_bytes = std::numeric_limits<std::int64_t>::max();
  candidate.cpu.schedule = TILELOSS_SCHEDULE_STASH;
  std::int64_t rows = whole_panels(*plan, row_block > 0 ? std::min(row_block, p.rows) : p.rows);
  while (true) {
    candidate.cpu.row_block = rows;
    candidate.workspace_bytes = bytes_within(p, candidate, cap);
    candidate.predicted_ms = predict_linear_ms(p, candidate);
    if (candidate.workspace_bytes < least.workspace_bytes) least = candidate;
    const bool is_first = best.workspace_bytes > cap;
    if (candidate.workspace_bytes <= cap && (is_first || candidate.predicted_ms < best.predicted_ms)) best = candidate;
    if (row_block > 0 || rows <= panel) break;
    rows = whole_panels(*plan, std::min(rows - panel, rows * 3 / 4));
  }
  if (best.workspace_bytes > cap && budget > 0) return too_small(least.workspace_bytes, "", budget);
  *plan = best.workspace_bytes > cap ? least : best;
  return {};
}

// The plan as for plan->cpu.threads, all of whose scratch it holds.
Status choose(const Problem& p, tileloss_schedule hint, std::int64_t row_block, std::int64_t budget, tileloss_plan* plan) {
  if (p.loss->needs_target_sweep()) return choose_some_rows(p, row_block, budget, plan);
  const bool may_stash = p.needs_forward && p.needs_backward && !p.couples_rows;
  const std::int64_t logits = p.rows * p.columns * (present(p.args.hidden) ? element_bytes(p.args.hidden.dtype) : 0);
  tileloss_plan lean = *plan;
  lean.cpu.schedule = may_stash ? TILELOSS_SCHEDULE_RECOMPUTE : TILELOSS_SCHEDULE_SWEEPS;
  lean.cpu.row_block = std::max<std::int64_t>(p.rows, 1);
  const std::int64_t least = bytes_within(p, lean, 1);  // so little that the narrowest chunk is taken
  const std::int64_t cap = budget > 0 ? budget : std::max({logits / 2, kLeastDefaultBudget, bytes_within(p, lean, 0)});
  lean.workspace_bytes = bytes_within(p, lean, std::max(least, cap));
  lean.predicted_ms = predict_linear_ms(p, lean);
  if (may_stash && (hint == TILELOSS_SCHEDULE_STASH || hint == TILELOSS_SCHEDULE_AUTO)) {
    const bool is_asked = hint == TILELOSS_SCHEDULE_STASH;
    // Rows that were asked for without a budget are given.
    const bool is_free = is_asked && row_block > 0 && budget == 0;
    const tileloss_plan stash = plan_stash(p, *plan, row_block, is_asked && budget > 0 ? 1 : kLeastRowsAtOnce,
                                           is_free ? std::numeric_limits<std::int64_t>::max() - 1 : cap);
    const bool fits = stash.workspace_bytes <= cap;
    if (is_asked && !fits && budget > 0) return too_small(stash.workspace_bytes, " for schedule stash", budget);
    if (is_asked || (fits && stash.predicted_ms < lean.predicted_ms)) {
      *plan = stash;
      return {};
    }
  }
  if (budget > 0 && least > budget) return too_small(least, "", budget);
  *plan = lean;
  return {};
}

// A plan chosen as for some threads, for those that there are: as many as a budget has room for. What that leaves, or without a
// budget what was planned, holds logits.
void set_threads(const Problem& p, std::int32_t threads, std::int64_t budget, tileloss_plan* plan) {
  const std::int64_t planned = plan->workspace_bytes;
  plan->cpu.chunk_columns = linear_shape(p, *plan).chunk;
  const std::int64_t bare = bytes_within(p, *plan, 1);
  plan->cpu.threads = threads;
  while (budget > 0 && plan->cpu.threads > 1 && bytes_within(p, *plan, 1) > budget) --plan->cpu.threads;
  const std::int64_t more = bytes_within(p, *plan, 1) - bare;  // scratch; fewer threads need less
  plan->workspace_bytes = bytes_within(p, *plan, budget > 0 ? budget : planned + std::max<std::int64_t>(more, 0));
}

}  // namespace

Status plan_linear(const Problem& p, tileloss_schedule hint, std::int64_t row_block, std::int64_t budget, tileloss_plan* plan) {
  const std::int32_t threads = plan->cpu.threads;
  Status status;
  for (const std::int32_t planned : kPlannedThreads) {
    plan->cpu.threads = planned;
    status = choose(p, hint, row_block, budget, plan);
    if (status.code != TILELOSS_WORKSPACE_TOO_SMALL) break;
  }
  if (status.ok()) set_threads(p, threads, budget, plan);
  return status;
}

}  // namespace tileloss::impl::cpu
