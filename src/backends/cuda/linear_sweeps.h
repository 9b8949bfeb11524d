// The two sweeps with the LM head: logits = hidden head^T + bias exist for some rows and a block of the vocabulary at a time, in
// float32, as input of the row kernels that read logits from memory.
//
// Products, each 2 N H V flops:
//   forward   z of blocks of the vocabulary, and of so many rows at a time that z stays in cache. A block's row states are merged
//             in the order of the vocabulary; the blocks are the same for any number of rows and any budget.
//   backward  the vocabulary in chunks. z of some rows at a time, kept from the forward or made again; dz goes over it, and from
//             there, rounded once to what the products see, to where dz of all rows of the chunk is. Then dhidden += dz head,
//             and the chunk of dhead = dz^T hidden at once, over all rows.
// Schedules: recompute keeps no z and does 4 products; stash keeps that of the first K columns, 3 + (1 - K/V) products.
// Sums that products make are float32, in the workspace, and stored from there: ignored rows, padding, strides and rounding are
// one kernel's. Rows that are ignored are 0 in hidden's copy, and their dz is 0.
#ifndef TILELOSS_BACKENDS_CUDA_LINEAR_SWEEPS_H_
#define TILELOSS_BACKENDS_CUDA_LINEAR_SWEEPS_H_

#include "backends/cuda/linear_plan.h"
#include "backends/cuda/linear_products.h"
#include "backends/cuda/row_launches.h"

namespace tileloss::impl::cuda {

struct BlockWeights;

// Of whole blocks and chunks; and [1] of the last ones, if they have fewer columns, which need not be aligned as those are.
struct HeadAlgorithms {
  const Algorithm *logits[2] = {}, *dhidden[2] = {}, *dhead[2] = {};

  // Chosen now, if nobody has and `may_choose`.
  static Status find(const Problem& problem, const HeadCut& cut, Algorithms& all, bool may_choose, HeadAlgorithms* found);
};

class HeadSweeps {
 public:
  HeadSweeps(const Problem& problem, const HeadCut& cut, const HeadPieces& pieces, const HeadAlgorithms& algorithms,
             const LogitTransform* transform, int threads)
      : problem_(&problem), cut_(cut), pieces_(pieces), algorithms_(algorithms), transform_(transform), threads_(threads) {}

  void forward(Queue& queue, const device::RowArrays& rows) const;
  void backward(Queue& queue, const device::RowArrays& rows, const RowStates& states) const;

 private:
  // Columns of the vocabulary, from `first` on, and what products read of the head for them. Of a forward: a whole vocab_block.
  struct Chunk {
    std::int64_t first, columns;
    Operand head;  // [columns, width]
  };
  using Arrays = device::RowArrays;

  bool is_bfloat16() const { return problem_->compute == TILELOSS_BFLOAT16; }
  void copy_hidden(Queue& queue, const device::RowArrays& rows) const;
  BlockWeights weights_of(Queue& queue, const Chunk& block) const;
  Chunk chunk_at(Queue& queue, const Arrays& rows, std::int64_t first, std::int64_t most, bool needs_head) const;
  // z of rows from `begin` on, in a chunk: where it is kept, or where it is made for now. From row to row vocab_block elements.
  bool is_kept(const Chunk& chunk) const { return chunk.first < cut_.kept_columns; }
  const Algorithm* algorithm_of(const Chunk& chunk, const Algorithm* const (&of)[2]) const {
    return of[chunk.columns < cut_.chunk_columns ? 1 : 0];
  }
  float* logits_at(const Chunk& chunk, std::int64_t begin) const;
  void make_logits(Queue& queue, const Chunk& chunk, std::int64_t begin, std::int64_t count, float* z) const;
  SweepJob job(const Chunk& chunk, std::int64_t begin, const Arrays& rows, float* z) const;
  void make_dlogits(Queue& queue, const Chunk& chunk, const device::RowArrays& rows, const RowStates& states) const;
  void add_dhidden(Queue& queue, const Chunk& chunk) const;
  void store_dhead(Queue& queue, const Chunk& chunk) const;
  void clear_padding(Queue& queue) const;

  const Problem* problem_;
  HeadCut cut_;
  HeadPieces pieces_;
  HeadAlgorithms algorithms_;
  const LogitTransform* transform_;
  int threads_;  // of a block that sweeps a row
};

}  // namespace tileloss::impl::cuda

#endif  // TILELOSS_BACKENDS_CUDA_LINEAR_SWEEPS_H_
