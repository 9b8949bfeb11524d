#include "backends/cuda/linear_plan.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <string>
#include <string_view>

#include "schema/tensors.h"

namespace tileloss::impl::cuda {
namespace {

using std::to_string;

constexpr std::int64_t kStep = 64;  // blocks of columns are multiples of it
constexpr std::int64_t kMaxVocabBlock = 8192;
constexpr std::int64_t kVocabBlock = kMaxVocabBlock;
// Of a target that is not labels, whose rows are held whole.
constexpr std::int64_t kVocabBlockOfTarget = 4096, kRowBlockOfTarget = 1024;
// Rows whose logits take two thirds of the L2 cache at most; but so many where it is small, as products of fewer leave a GPU
// idle.
constexpr std::int64_t kLeastRowBlock = 512, kMostRowBlock = 2048;
// Products of fewer rows read the head more often than they compute: only where nothing else fits.
constexpr std::int64_t kFewRows = 256, kFewestRows = 16;
constexpr std::int64_t kLeastDefaultBudget = std::int64_t{192} << 20;  // the CPU's
// NVIDIA's advice for Hopper; smaller products need less of it.
constexpr std::int64_t kMaxScratch = std::int64_t{32} << 20, kScratchAlignment = 256;

std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

std::int64_t operand_bytes(const Problem& p) { return element_bytes(p.compute); }

Status check_hints(const tileloss_cuda_plan_options& o) {
  if (o.schedule < TILELOSS_SCHEDULE_AUTO || o.schedule > TILELOSS_SCHEDULE_SWEEPS)
    return expected("schedule", "auto, stash, recompute or sweeps (0 to 3)", to_string(o.schedule));
  if (o.row_block < 0) return expected("row_block", ">= 0", to_string(o.row_block));
  if (o.vocab_block < 0 || o.vocab_block % kStep != 0 || o.vocab_block > kMaxVocabBlock)
    return expected("vocab_block", "a multiple of 64 up to " + to_string(kMaxVocabBlock), to_string(o.vocab_block));
  if (o.chunk_columns < 0) return expected("chunk_columns", ">= 0", to_string(o.chunk_columns));
  return {};
}

}  // namespace

bool HeadCut::is_valid() const {
  const auto is_block = [](std::int64_t columns) { return columns > 0 && columns <= kMaxVocabBlock && columns % kStep == 0; };
  return row_block > 0 && is_block(vocab_block) && is_block(chunk_columns) && vocab_block % chunk_columns == 0 &&
         kept_columns >= 0 && kept_rows >= 0 && (kept_bytes == 2 || kept_bytes == 4);
}

bool lies_across(const tileloss_matrix& m) { return m.row_stride == 1 && m.col_stride != 1; }

bool is_copied(const tileloss_matrix& head, tileloss_dtype compute) {
  const std::int64_t line = lies_across(head) ? head.col_stride : head.row_stride;
  const bool is_together = lies_across(head) || head.col_stride == 1;
  const std::int64_t bytes = element_bytes(head.dtype);
  return head.dtype != compute || !is_together || line * bytes % 16 != 0 || reinterpret_cast<std::uintptr_t>(head.data) % 16 != 0;
}

HeadPieces::HeadPieces(const Problem& p, const HeadCut& cut, Pieces& pieces) {
  if (!has_head(p)) return;
  // A low-rank part's buffers count as the head's: a plan has no room for more of them.
  const auto take = [&]<class T>(const char* name, T*& piece, std::int64_t count) {
    if (count == 0) return;
    const std::int64_t before = pieces.bytes();
    piece = pieces.allocate<T>(count);
    auto buffer = std::ranges::find(buffers, std::string_view(name), [](const auto& b) { return b.first; });
    if (buffer == buffers.end()) buffer = buffers.insert(buffer, {name, 0});
    buffer->second += pieces.bytes() - before;
  };
  const bool is_labels = !p.loss->needs_target_sweep();
  const std::int64_t blocks = (p.columns + cut.vocab_block - 1) / cut.vocab_block,
                     kept_blocks = (cut.kept_columns + cut.vocab_block - 1) / cut.vocab_block;
  const std::int64_t row_block = std::min(cut.row_block, p.rows), kept_rows = std::min(cut.kept_rows, p.rows);
  std::int64_t rows_of_logits = kept_rows + std::min(row_block, p.rows - kept_rows);
  const bool keeps_all = cut.kept_columns >= p.columns;
  if (is_labels) rows_of_logits = keeps_all && !cut.has_words() ? 0 : row_block;
  logits_stride = is_labels ? cut.vocab_block : row_stride_of(p.columns);
  take("labels of a chunk", labels, p.rows);
  take("row states of blocks", states, is_labels && p.needs_forward && !has_block_sums(p) ? blocks * p.rows : 0);
  take("row sums of blocks", sums, has_block_sums(p) || cut.has_words() ? blocks * p.rows : 0);
  take("logits of labels", label_logits, has_block_sums(p) ? p.rows : 0);
  take("gradients' numbers", gradients, has_gradient_rows(p) ? p.rows : 0);
  take("sums of class weights", weights, is_labels && merges_class_weights(p) ? blocks + 1 : 0);
  take("classes of blocks", classes, is_labels && has_block_classes(p) ? blocks * p.rows : 0);
  const PerSide<SideMatrices> matrices = sides_of(p.args);
  for (const HeadSide s : kHeadSides) {
    const auto& [hidden, head, dhidden, dhead, bias] = matrices[s];
    if (!present(hidden)) continue;
    Side& side = sides[s];
    if (s == kLowRankPart) {
      const Side& own = sides[kOwnHead];
      const std::int64_t before = row_stride_of(p.args.hidden.cols) * operand_bytes(p);
      side.hidden = own.hidden + before;
      side.head = own.head + before * (lies_across(p.args.head) ? cut.vocab_block : 1);
      side.stride = own.stride;
    } else {
      const bool is_own = s == kOwnHead;
      side.stride = row_stride_of(depth_of_logits(p.args, s));
      take(is_own ? "hidden" : "teacher's hidden", side.hidden, p.rows * side.stride * operand_bytes(p));
      // Whether it is copied or not: a plan is made before anybody knows where the head lies.
      take(is_own ? "head" : "teacher's head", side.head, cut.vocab_block * side.stride * operand_bytes(p));
      take(is_own ? "logits" : "teacher's logits", side.logits, rows_of_logits * logits_stride);
    }
    const std::int64_t width = row_stride_of(hidden.cols);
    if (p.needs_backward && present(dhidden)) take("dhidden", side.dhidden, p.rows * width);
    if (p.needs_backward && present(dhead))
      take("dhead", side.dhead, cut.chunk_columns * width * element_bytes(made_of(dhead, p)));
  }
  take("logits kept", kept, kept_blocks * p.rows * cut.vocab_block * cut.kept_bytes);
  const bool are_over_words = cut.has_words() && keeps_all;
  take("dlogits", dlogits, p.needs_backward && !are_over_words ? p.rows * cut.chunk_columns * operand_bytes(p) : 0);
  take("dbias", dbias, p.needs_backward && present(p.args.dbias) ? cut.chunk_columns : 0);
  // The same for any number of rows, as it decides which algorithms there are.
  scratch_bytes = std::min(
      kMaxScratch, round_up(cut.vocab_block * std::max(sides[kOwnHead].stride, sides[kTeachersHead].stride), kScratchAlignment));
  take("products", scratch, scratch_bytes + kScratchAlignment - Pieces::kAlignment);
  scratch += (kScratchAlignment - reinterpret_cast<std::uintptr_t>(scratch) % kScratchAlignment) % kScratchAlignment;
}

Status cut_head(const Problem& p, const tileloss_plan_options& hints, std::int64_t l2_bytes,
                const std::function<std::int64_t(const HeadCut&)>& bytes, HeadCut* cut) {
  if (Status s = check_hints(hints.cuda); !s.ok()) return s;
  const std::int64_t columns = std::max<std::int64_t>(round_up(p.columns, kStep), kStep),
                     rows = std::max<std::int64_t>(p.rows, 1);
  const bool needs_target_sweep = p.loss->needs_target_sweep();
  const std::int64_t usual_block = needs_target_sweep ? kVocabBlockOfTarget : kVocabBlock;
  const std::int64_t vocab_block = std::min(hints.cuda.vocab_block > 0 ? hints.cuda.vocab_block : usual_block, columns);
  const std::int64_t widest = hints.cuda.chunk_columns > 0 ? std::max(hints.cuda.chunk_columns, kStep) : vocab_block;
  const auto rows_in_cache =
      static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(l2_bytes * 2 / 3 / 4 / vocab_block)));
  const std::int64_t usual_rows =
      needs_target_sweep ? kRowBlockOfTarget : std::clamp(rows_in_cache, kLeastRowBlock, kMostRowBlock);
  const std::int64_t row_block = hints.cuda.row_block > 0 ? hints.cuda.row_block : usual_rows;
  const std::int64_t most_rows = std::min(rows, row_block);
  const bool may_keep = p.needs_forward && p.needs_backward && hints.cuda.schedule <= TILELOSS_SCHEDULE_STASH;
  const std::int64_t kept_bytes = may_keep && can_keep_words(p) ? 2 : 4;
  // The widest chunk that fits the budget, then the most rows; what needs least otherwise.
  const auto cut_within = [&](std::int64_t budget) {
    HeadCut least;
    for (const std::int64_t fewest : {kFewRows, kFewestRows}) {
      for (std::int64_t parts = 1; parts <= vocab_block / kStep; ++parts) {
        const std::int64_t chunk = vocab_block / parts;
        if (chunk > widest || chunk % kStep != 0 || vocab_block % chunk != 0) continue;
        for (std::int64_t block = most_rows; block > 0; block /= 2) {
          if (block < most_rows && (block < fewest || hints.cuda.row_block > 0)) break;
          const HeadCut candidate = {block, vocab_block, chunk, 0, 0, kept_bytes};
          if (bytes(candidate) <= budget) return candidate;
          if (least.row_block == 0 || bytes(candidate) < bytes(least)) least = candidate;
        }
      }
    }
    return least;
  };
  std::int64_t budget = hints.workspace_bytes;
  if (budget == 0) {
    const std::int64_t logits = p.rows * p.columns * element_bytes(p.args.hidden.dtype) * (has_teacher(p) ? 2 : 1);
    budget = std::max(logits / 2, kLeastDefaultBudget);
    // Whole rows may be fewer.
    if (!needs_target_sweep) budget = std::max(budget, bytes(cut_within(std::numeric_limits<std::int64_t>::max())));
  }
  *cut = cut_within(budget);
  const bool keeps_all = hints.cuda.schedule == TILELOSS_SCHEDULE_STASH && hints.workspace_bytes == 0;
  const std::int64_t all = needs_target_sweep ? p.rows : p.columns, block = needs_target_sweep ? cut->row_block : vocab_block;
  for (std::int64_t kept = may_keep ? (all + block - 1) / block : 0; kept > 0; --kept) {
    HeadCut keeping = *cut;
    (needs_target_sweep ? keeping.kept_rows : keeping.kept_columns) = std::min(kept * block, all);
    if (!keeps_all && bytes(keeping) > budget) continue;
    *cut = keeping;
    break;
  }
  return {};
}

}  // namespace tileloss::impl::cuda
