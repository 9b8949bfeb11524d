// How the LM head's work is cut: a plan's numbers, and the workspace that follows from them. The schedule is in linear_sweeps.h.
#pragma once

#include <array>
#include <functional>
#include <utility>
#include <vector>

#include "backends/cuda/gradient_row.h"
#include "backends/cuda/pieces.h"
#include "backends/problem.h"
#include "core/row_state.h"

namespace tileloss::impl::cuda {

struct HeadCut {
  std::int64_t row_block = 0;      // rows whose logits are made at a time
  std::int64_t vocab_block = 0;    // columns of them, in a forward: what row states are merged of. 0: there is no head
  std::int64_t chunk_columns = 0;  // of the backward, whose gradients of all rows are there at once; divides vocab_block
  std::int64_t kept_columns = 0;   // the first ones, whose logits wait for the backward; whole vocab_blocks, or all
  std::int64_t kept_rows = 0;      // the same of a target that is not labels: whole row_blocks, or all
  std::int64_t kept_bytes = 4;     // of a logit that waits: in float32, or as a word (kept_words.h)

  bool is_valid() const;
  // Logits that are made again are rounded as those that are kept: how many these are changes no bit.
  bool has_words() const { return kept_bytes == 2; }
};

// Whether the call multiplies with a head: from a saved row state alone it does not.
inline bool has_head(const Problem& p) { return p.loss->is_linear && p.total_columns > 0; }

// Elements from a row to the next of operands and sums of so many columns: rows begin at multiples of 16 bytes.
inline std::int64_t row_stride_of(std::int64_t columns) { return (columns + 7) / 8 * 8; }

// Which of a head's dimensions lies together, and whether products read it where it lies.
bool lies_across(const tileloss_matrix& m);
bool is_copied(const tileloss_matrix& head, tileloss_dtype compute);
// Whether the target is logits, which a head of their own makes.
inline bool has_teacher(const Problem& p) { return p.loss->target() == TargetKind::kLogits; }

// What makes logits: the call's own head with its low-rank part, as one product, and the teacher's head. Gradients are each
// side's own.
enum HeadSide : std::size_t { kOwnHead, kLowRankPart, kTeachersHead };
inline constexpr HeadSide kHeadSides[] = {kOwnHead, kLowRankPart, kTeachersHead};
template <class T>
using PerSide = std::array<T, 3>;
struct SideMatrices {
  tileloss_matrix hidden, head, dhidden, dhead;
  tileloss_vector bias;
};
inline PerSide<SideMatrices> sides_of(const tileloss_args& a) {
  return {{{a.hidden, a.head, a.dhidden, a.dhead, a.bias},
           {a.hidden_r, a.head_r, a.dhidden_r, a.dhead_r, {}},
           {a.teacher_hidden, a.teacher_head, {}, {}, a.teacher_bias}}};
}
// How many columns of hidden states and head a side's logits are a product of; 0: of none, as they are another side's. A low-rank
// part stands behind the head's columns, where 16 bytes begin.
inline std::int64_t depth_of_logits(const tileloss_args& a, HeadSide side) {
  if (side == kTeachersHead) return a.teacher_hidden.cols;
  if (!present(a.hidden_r)) return side == kOwnHead ? a.hidden.cols : 0;
  return side == kOwnHead ? row_stride_of(a.hidden.cols) + a.hidden_r.cols : 0;
}

// The smoothing sums of a forward's blocks are merged by the weights of their columns: those that are the same for all rows.
inline bool merges_class_weights(const Problem& p) {
  return p.needs_forward && p.rows > 0 && (p.sums & kSmoothingSum) != 0 && present(p.args.class_weights) && !p.has_classes();
}

// A forward whose rows are a maximum and a sum until they are merged: of labels, without other sums and softcap.
inline bool has_block_sums(const Problem& p) {
  return p.needs_forward && !p.loss->needs_target_sweep() && p.sums == kNoSums && !(p.logit.softcap > 0);
}
// The blocks of a forward whose rows have columns of their own: their number says whether there are any, and their weight.
inline bool has_block_classes(const Problem& p) { return p.needs_forward && p.has_classes() && !has_block_sums(p); }
// A backward whose rows' numbers are made once for all chunks: of labels, without softcap. dbias is added up there before dlogits
// are written, and so before those of several labels are right.
inline bool has_gradient_rows(const Problem& p) {
  const bool is_of_labels = !p.loss->needs_target_sweep() && !(p.has_several_labels() && present(p.args.dbias));
  return p.needs_backward && is_of_labels && !(p.logit.softcap > 0);
}

// What products make of a side's dhead: the caller's bfloat16, rounded once, or sums that are rounded or added there. The same
// wherever dhead lies, as it is part of what an algorithm is chosen by.
inline tileloss_dtype made_of(const tileloss_matrix& dhead, const Problem& p) {
  const bool is_bfloat16 = dhead.dtype == TILELOSS_BFLOAT16 && p.compute == TILELOSS_BFLOAT16;
  return is_bfloat16 && p.linear.accumulate == 0 ? TILELOSS_BFLOAT16 : TILELOSS_FLOAT32;
}

// Whether words say enough of the logits: dlogits are p times a number of the row's, and rounded to 8 bits.
inline bool can_keep_words(const Problem& p) {
  return has_gradient_rows(p) && p.is_multiple_of_p && p.compute == TILELOSS_BFLOAT16;
}

// Of a block of a row: the largest logit but the label's, as it lies in memory, and the sum of 2^t of all but the label.
struct BlockSums {
  float max, sum;
};

// The head's part of the workspace; null: there is no such thing in this call.
struct HeadPieces {
  HeadPieces() = default;
  HeadPieces(const Problem& problem, const HeadCut& cut, Pieces& pieces);

  std::int64_t* labels = nullptr;    // [rows]: which of a chunk's columns they are
  RowState* states = nullptr;        // [vocab_blocks, rows]: of each block's columns; null where has_block_sums
  BlockSums* sums = nullptr;         // the same where has_block_sums; and of words, for their maxima
  float* label_logits = nullptr;     // [rows], beside them
  GradientRow* gradients = nullptr;  // [rows], where has_gradient_rows
  double* weights = nullptr;         // [vocab_blocks + 1]: those of all columns before each, where merges_class_weights
  RowClasses* classes = nullptr;     // [vocab_blocks, rows]: of each block's columns, where has_block_classes
  struct Side {
    // What products multiply, in the compute type; a low-rank part's are columns of the head's.
    std::byte* hidden = nullptr;  // [rows, width]; 0 where a row is ignored
    std::byte* head = nullptr;    // [vocab_block, width] or [width, vocab_block], where it is copied
    std::int64_t stride = 0;      // from row to row of both
    // What they make, in float32 but for dhead.
    float* logits = nullptr;     // [row_block, vocab_block]; of a target that is not labels [kept_rows + row_block, columns]
    float* dhidden = nullptr;    // [rows, width]
    std::byte* dhead = nullptr;  // [chunk_columns, width] or [width, chunk_columns], made_of it
  };
  PerSide<Side> sides;
  std::int64_t logits_stride = 0;  // of all sides
  std::byte* kept = nullptr;       // [vocab_blocks kept, rows, vocab_block]; of words, dlogits go over them
  std::byte* dlogits = nullptr;    // [rows, chunk_columns], in the compute type
  double* dbias = nullptr;         // [chunk_columns]
  std::byte* scratch = nullptr;    // cuBLASLt's, aligned as that wants it
  std::int64_t scratch_bytes = 0;

  std::vector<std::pair<const char*, std::int64_t>> buffers;  // name and bytes of what there is
};

// What fits in the budget of the hints, or what needs least; bytes(cut): of the whole workspace.
Status cut_head(const Problem& problem, const tileloss_plan_options& hints, std::int64_t l2_bytes,
                const std::function<std::int64_t(const HeadCut&)>& bytes, HeadCut* cut);

}  // namespace tileloss::impl::cuda
