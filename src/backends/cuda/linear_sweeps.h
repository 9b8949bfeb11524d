// The two sweeps with the LM head: logits = hidden head^T + bias exist for some rows and a block of the vocabulary at a time, in
// float32, as input of the row kernels that read logits from memory.
//
// Products, each 2 N H V flops:
//   forward   z of blocks of the vocabulary, and of so many rows at a time that z stays in cache. What rows are in each
//             block waits to be merged at the end, in the order of the vocabulary; the blocks are the same for any number of
//             rows and any budget.
//   backward  the vocabulary in chunks. z of some rows at a time, or of all where it was kept; dz, rounded once to what the
//             products see, goes to where that of all rows of the chunk is: with a softcap, and where the target is not labels,
//             by way of float32 over z. Then dhidden += dz head, and the chunk of dhead = dz^T hidden at once, over all rows.
// Schedules: recompute keeps no z and does 4 products; stash keeps that of the first K columns, 3 + (1 - K/V) products.
//
// With a low-rank part z is one product along both widths: hidden_r stands beside hidden in its copy, and a block of the head is
// copied beside head_r's. The gradients are products of each side's own, of the same dz; no product is made for one that nobody
// asks for.
//
// Of a target that is not labels a row's columns are needed side by side, for its sums. So the forward takes some rows at a time:
// z of their whole vocabulary, and of the teacher, a block of columns after the other; then the sweeps of target_launches.h. The
// backward is the same as for labels, with the teacher's z beside z. With a teacher recompute does 6 products; stash keeps both z
// of the first K rows, 4 + 2 (1 - K/N) products. Without one it is 4, and 3 + (1 - K/N).
//
// Sums that products make are float32, in the workspace, and stored from there: ignored rows, padding, strides and rounding are
// one kernel's. dhead, where it is of a type that products round to and nothing is added to it, is written where it lies, if its
// rows begin at multiples of 16 bytes. Rows that are ignored are 0 in hidden's copy, and their dz is 0.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "backends/cuda/linear_plan.h"
#include "backends/cuda/linear_products.h"
#include "backends/cuda/row_plan.h"
#include "backends/cuda/steps.h"
#include "backends/cuda/target_launches.h"

namespace tileloss::impl::cuda {

// Of whole blocks and chunks; and [1] of the last ones, if they have fewer columns, which need not be aligned as those are.
struct HeadAlgorithms {
  using OfSizes = std::array<const Algorithm*, 2>;
  struct Side {
    OfSizes logits = {}, dhidden = {}, dhead = {};
  };
  PerSide<Side> sides;

  static Status find(const Problem& problem, const HeadCut& cut, Algorithms& all, HeadAlgorithms* found);
};

class HeadSweeps {
 public:
  // `target`: of a call whose target is not labels.
  HeadSweeps(const Problem& problem, const HeadCut& cut, const HeadPieces& pieces, const HeadAlgorithms& algorithms,
             const LogitTransform* transform, const std::optional<TargetSweeps>& target, const RowCut& rows,
             const SumParts& sums);

  // The logits of rows' labels, where these are several.
  void multiply_labels(Queue& queue, const LabelColumns& labels, const device::RowArrays& rows) const;
  void forward(Queue& queue, const device::RowArrays& rows) const;
  void find_sums(Queue& queue, const device::RowArrays& rows) const;
  void backward(Queue& queue, const device::RowArrays& rows, const RowStates& states) const;

 private:
  struct Side : SideMatrices {
    HeadSide which;
    std::int64_t depth;  // depth_of_logits
    bool is_across;      // as the head's copy lies: a low-rank part's is the head's
    HeadPieces::Side pieces;
    HeadAlgorithms::Side algorithms;
  };
  // Columns of the vocabulary, from `first` on, and what products read of each side's head for them. Of a forward: a whole
  // vocab_block.
  struct Chunk {
    std::int64_t first, columns;
    PerSide<Operand> heads;  // [columns, width]; in the order of sides_
  };
  using Arrays = device::RowArrays;

  bool is_bfloat16() const { return problem_->compute == TILELOSS_BFLOAT16; }
  void copy_hidden(Queue& queue, const Arrays& rows) const;
  void sum_weights(Queue& queue, const Chunk& block) const;
  Chunk columns_from(std::int64_t first, std::int64_t most) const;
  void find_labels(Queue& queue, const Arrays& rows, const Chunk& chunk) const;
  // What logits and dhidden read of all sides' heads for a chunk, and copies of what is not read where it lies.
  void find_heads(Queue& queue, Chunk* chunk, bool makes_logits) const;
  Operand head_at(Queue& queue, const Side& side, const Chunk& chunk, bool makes_logits) const;
  // z of rows from `begin` on, in a chunk: where it is kept, or where it is made for now.
  bool is_kept(const Chunk& chunk, std::int64_t begin) const {
    return target_ ? begin < cut_.kept_rows : chunk.first < cut_.kept_columns;
  }
  const Algorithm* algorithm_of(const Chunk& chunk, const HeadAlgorithms::OfSizes& of) const {
    return of[chunk.columns < cut_.chunk_columns ? 1 : 0];
  }
  float* logits_at(const Side& side, const Chunk& chunk, std::int64_t begin) const;
  std::byte* kept_at(const Chunk& chunk, std::int64_t begin) const;
  bool is_in_words(const Chunk& chunk) const { return cut_.has_words() && is_kept(chunk, 0); }
  // Of all rows of a chunk, as products see them: over its words, if these were kept.
  std::byte* dlogits_at(const Chunk& chunk) const { return is_in_words(chunk) ? kept_at(chunk, 0) : pieces_.dlogits; }
  std::int64_t dlogits_stride(const Chunk& chunk) const { return is_in_words(chunk) ? cut_.vocab_block : cut_.chunk_columns; }
  // Of all sides.
  void make_logits(Queue& queue, const Chunk& chunk, std::int64_t begin, std::int64_t count) const;
  SweepJob job(const Chunk& chunk, std::int64_t begin, const Arrays& rows) const;
  TargetPart part(const SweepJob& own, const Chunk& chunk, std::int64_t begin, std::int64_t count) const;
  // kSweep: TargetSweeps's, over some rows at a time.
  template <auto kSweep>
  void sweep_whole_rows(Queue& queue, const Arrays& rows) const;
  void make_dlogits(Queue& queue, const Chunk& chunk, const Arrays& rows, const RowStates& states) const;
  // The same where rows' gradients are made once: dz goes straight to what products see.
  void write_dlogits(Queue& queue, const Chunk& chunk, const Arrays& rows, const RowStates& states) const;
  template <class Slopes>
  void write_dlogits(Queue& queue, const Chunk& chunk, const Arrays& rows, const RowStates& states) const;
  // Over those that are at `to`, from row `begin` on: of the labels, where a row has several.
  void write_labels(Queue& queue, const Chunk& chunk, const Arrays& rows, const RowStates& states, std::int64_t begin,
                    std::int64_t count, const RowMatrix& to, tileloss_dtype storage) const;
  bool has_products() const;
  void add_dhidden(Queue& queue, const Side& side, const Chunk& chunk, const Operand& head) const;
  void store_dhead(Queue& queue, const Side& side, const Chunk& chunk) const;
  void clear_padding(Queue& queue) const;

  const Problem* problem_;
  HeadCut cut_;
  HeadPieces pieces_;
  const LogitTransform* transform_;
  SumParts sums_;
  std::optional<TargetSweeps> target_;
  std::vector<Side> sides_;  // those that there are, the call's own first
  RowCut row_cut_;
};

}  // namespace tileloss::impl::cuda
