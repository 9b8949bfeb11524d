// The narrow waist between the drivers (plain C++) and the sweeps (one copy per instruction set): what to do with one row, and
// the table of functions that do it.
#pragma once

#include <cstdint>

#include "backends/cpu/matmul/matmul.h"
#include "backends/cpu/simd/storage_type.h"
#include "core/logit_transform.h"
#include "core/row_state.h"
#include "core/target.h"

namespace tileloss::impl::cpu {

// How far a block's maximum may exceed the reference, in units of log 2, before the block is redone: exp stays below 2^6, so
// neither exponents nor moments lose digits.
inline constexpr double kMaxGap = 6;
// The same where exponents are not rounded relative to the reference and no moments are taken: far from overflow.
inline constexpr double kMaxExactGap = 60;

// Longer vocab_blocks leave the L1 cache between the look for their maximum and the rest.
inline constexpr std::int64_t kMaxVocabBlock = 8192;

// Floats that a soft-capped block's tanh and slopes take, three of each column (backends/cpu/sweep/capped_operands.h). They are
// too many for the stack of a host's thread.
inline std::int64_t operand_floats(bool has_softcap, std::int64_t vocab_block) { return has_softcap ? 3 * vocab_block : 0; }

// Forward of one row: logits -> row state, and 2^(z log2(e) - reference) of every column into the stash if there is one.
struct ForwardRow {
  const void* x = nullptr;
  std::int64_t columns = 0;        // valid columns
  std::int64_t label_column = -1;  // -1: in another shard
  std::int64_t vocab_block = 0;    // a multiple of 64
  LogitTransform transform;
  std::uint32_t sums = kNoSums;
  const float* class_weights = nullptr;  // for the smoothing sum; null: 1
  float* stash = nullptr;                // columns rounded up to 64, in pair order; 0 at the label's
  double* references = nullptr;          // with a stash: each block's reference
  float* operands = nullptr;             // operand_floats() of them, aligned to 64
  RowState state;                        // out
};

// Backward of one row: dx_j = dz/dx * (p_j (prob + prob_logp (z_j - max - log_sum)) + uniform c_j), p_j = exp(z_j - max) * scale.
// The label's column is the driver's.
struct BackwardRow {
  const void* x = nullptr;
  void* dx = nullptr;
  std::int64_t columns = 0;
  std::int64_t vocab_block = 0;
  LogitTransform transform;
  float max = 0;
  double log_sum = 0;
  double prob = 0;       // prob / S
  double prob_logp = 0;  // prob_logp / S
  double uniform = 0;
  const float* class_weights = nullptr;  // with uniform != 0; null: 1
  const float* stash = nullptr;          // null: exp is computed again from x
  const double* references = nullptr;
  float* operands = nullptr;  // operand_floats() of them, aligned to 64; may be the forward row's
  bool stream = false;        // dx is another buffer, not to be read again soon: non-temporal stores where aligned
};

// Forward of `next` and backward of `previous`, each may be null; with both, interleaved block by block, `next` writing each
// stash block after `previous` has read it. Same results as one after the other.
using RowFunction = void (*)(ForwardRow* next, const BackwardRow* previous);

// Columns of a row and its target whose exponents wait in L1, where there is a softcap.
inline constexpr std::int64_t kTargetBlock = 1024;

// A row of logits, after its forward.
struct RowSide {
  const void* x = nullptr;
  LogitTransform transform;
  float max = 0;
  double sum = 1, log_sum = 0;         // S of the row and its logarithm
  float* exps = nullptr;               // in: the stash; written over
  const double* references = nullptr;  // the stash's
  float* operands = nullptr;           // as a forward row's
};

// A row and what it is compared with: a teacher's, or class probabilities. With a softcap the exps are made again, as a stash of
// them holds slopes. Of class probabilities the teacher's exps are what `weigh` makes of them, and nothing else of the teacher is
// looked at.
struct TargetRow {
  RowSide own, teacher;
  std::int64_t columns = 0;
  std::int64_t label_column = -1;  // which is left out; -1: none
  std::int64_t vocab_block = 0;
  Divergence divergence;
  bool has_mean = true;        // the divergence's; of class probabilities it is the sum of -q
  float* exponents = nullptr;  // 2 kTargetBlock of them
  TargetSums sums;             // out of the first; into gradient with the label's column
  // The row as its label's cross-entropy sees it, of which nothing but x, transform, max and sum is looked at; null: as the
  // divergence does.
  const RowSide* label = nullptr;
  // For the gradient, dx; the label's column is left wrong.
  void* dx = nullptr;
  double form = 0, target = 0;  // RowResult's
  bool stream = false;          // as BackwardRow's
  bool has_gradient = false;    // out of diverge: it has written dx as well, as it may where the divergence has no mean
};
// The sums first, by a divergence or by class probabilities, then the gradient; `dx` and the coefficients may be known to both.
struct TargetTable {
  void (*diverge)(TargetRow& row);
  void (*add_probabilities)(TargetRow& row);
  void (*gradient)(TargetRow& row);
  // A TargetRow's teacher.exps of class probabilities of this storage type, in pair order: (factor q + added) times the weights,
  // if there are any; 0 of the column left out, if it is one of these, and behind the last. probs null: what is in `to`, column
  // by column. Returns the largest, or 0 if that is less.
  float (*weigh)(const void* probs, std::int64_t columns, std::int64_t left_out, float factor, float added,
                 const float* class_weights, float* to);
};

// A row's logits of a tile to 16 bits and back: backends/cpu/head/kept_logits.h. Reads and writes `columns` logits; `to` has room
// for a multiple of 64.
struct KeptLogitsTable {
  float (*keep)(const float* z, std::int64_t columns, float steps_per_unit, std::uint16_t* to);  // returns their maximum
  void (*restore)(const std::uint16_t* from, std::int64_t columns, float max, float steps_per_unit, float* z);
};

struct KernelTable {
  RowFunction run[kStorageTypes];
  TargetTable target[kStorageTypes];
  // The exp of the sweeps over an array that lies in L1: `count` values, `repeats` times; returns their sum. For the roof.
  float (*exp_sum)(const float* x, std::int64_t count, std::int64_t repeats);
  MatmulTable matmul;
  KeptLogitsTable kept_logits;
};

}  // namespace tileloss::impl::cpu
