// Losses fused with the LM head: logits = hidden head^T + bias exist a tile at a time, in float32, as input of the same row
// kernels that read logits from memory. Knows no loss; what happens between forward and backward is the visitor's.
//
// Products, each 2 N H V flops, N the rows in use:
//   forward     z = hidden head^T, tiles of rows x `tile` columns. A row's state is that of its tiles merged in the order of the
//               vocabulary: slices of it are tasks, the same cut for any N and any threads.
//   backward    the vocabulary in chunks, each in two phases. First dz of all rows, from z kept or computed again, and the chunk
//               of the head packed for the second: dhead's rows of the chunk (dz^T hidden, done at once), dhidden += dz head.
//               dz is float32 and is rounded to the compute type once, while it is packed.
// Schedules: recompute keeps no z and does 4 products. stash keeps what there is room for: of all rows the first K columns, the
// others are computed again, 3 + (1 - K/V) products; or of some rows at a time all columns, 3 products, but head and dhead go
// through the caches once for each chunk of rows, and dhead is added up over those in float32. Where the gradient off the label
// is p times a number and is rounded to bfloat16, z is kept in 16 bits (backends/cpu/head/kept_logits.h), else in float32.
//
// There is room in dhead itself: until a tile's rows of it are written, their memory holds the tile's z of the first rows in use,
// H of them in 16 bits where dhead is in 16 bits, 2 H where it is in float32.
//
// Where of each row some columns alone are allowed, its z of a tile are put side by side for the row kernels, as whole rows are
// (sweep/allowed_rows.h). Products of which no row needs a column are not made, in the forward nor in the backward; those of
// dhidden go by chunks.
//
// A head with a low-rank part, logits = hidden W^T + hidden_r B^T: z is one product along the k of both, W's and then B's. The
// gradients of each part are products of their own, of the same packed dz.
//
// Of a target that is not labels (linear_some_rows.cpp) a row's columns are needed side by side. So rows in use are taken some at
// a time: their logits in float32, and those of a teacher with a head of its own; the sweeps of sweep/driver.h, whose gradient
// goes over the logits and from there, as the products see it, to where it waits; and once it is there for a whole row chunk, the
// backward. With two heads 4 products where a linear cross-entropy has 3, and both heads go through the caches once for each of
// the parts. The gradient waits in dhead's own memory, until the rows of dhead are written, and what has no room there in the
// workspace.
#pragma once

#include <tileloss/tileloss.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backends/cpu/matmul/matmul.h"
#include "backends/cpu/sweep/driver.h"

namespace tileloss::impl::cpu {

// Where a tile's z lies in dhead: in lines, z of `rows_of_line` rows after one another in each.
struct KeptInDhead {
  std::int64_t rows = 0;          // in all, of those in use; 0: none is kept there
  std::int64_t rows_of_line = 1;  // whose z of a tile fit side by side
  std::int64_t line_bytes = 0;    // from a line to the next
  std::int64_t column_bytes = 0;  // from a column's beginning to the next one's
};

// What a target that is not labels adds.
struct TargetShape {
  std::int64_t rows = 0;          // whose logits are there at once; 0: the target is labels
  std::int64_t width = 0;         // of the teacher's hidden; 0: it has no head
  std::int64_t hidden_bytes = 4;  // of an element
  bool bias = false;              // the teacher's
  ScratchShape scratch;           // of the sweeps
};

// Of the logits' operands, hidden [N, width] and head [V, width]: the head's own, and those of its low-rank part.
struct PartShape {
  std::int64_t width = 0;
  std::int64_t hidden_bytes = 4;  // of an element
  bool dhidden = false, dhead = false;
  bool dhead_in_place = false;  // float32, one of its strides 1: products can be added right there
  bool dhead_across = false;    // so, but as [width,V]: its product is made the other way round
};

// What a plan has to know: shapes, what is asked for, and how it is cut.
struct LinearShape {
  std::int64_t rows = 0;           // N, used or not
  std::int64_t columns = 0;        // V, valid ones
  std::int64_t total_columns = 0;  // with padding: its gradients are 0
  PartShape own, low_rank;         // of width H, and r; 0: there is no low-rank part
  Compute compute = Compute::kFloat32;
  bool forward = false;
  bool dbias = false;
  bool bias = false;
  bool softcap = false;
  bool allowed = false;  // of each row some columns alone
  int threads = 1;

  std::int64_t tile = 256;     // columns of a product's block
  std::int64_t chunk = 2048;   // columns of a backward's chunk, a multiple of the tile
  std::int64_t row_chunk = 0;  // rows at a time
  KeptInDhead kept_in_dhead;   // with all rows at a time: those whose z of every whole tile is kept from the forward, in dhead
  std::int64_t kept = 0;       // columns of the other rows whose z is kept in the workspace: the first ones, whole tiles, or all
  bool kept_in_words = false;  // in 16 bits; z that is not kept is rounded like it, so that no bit depends on what is

  std::int64_t labels_per_row = 0;  // where these are several
  TargetShape target;               // not labels: what is kept are gradients then, and kept_in_dhead says which are in dhead

  bool dhidden() const { return own.dhidden || low_rank.dhidden; }
  bool dhead() const { return own.dhead || low_rank.dhead; }
  bool backward() const { return dhidden() || dhead() || dbias; }
  bool needs_target_sweep() const { return target.rows > 0; }
  std::int64_t z_stride() const { return (columns + 15) / 16 * 16; }  // of logits that are stored
  // Of an element of a gradient that is kept: as the products see it, but dbias adds up what is not rounded.
  std::int64_t dz_bytes() const { return compute == Compute::kBfloat16 && !dbias ? 2 : 4; }
  std::int64_t whole_tiles() const { return columns / tile; }
  // Several row chunks and no place in the output: dhead is added up in the workspace.
  bool sums_dhead(const PartShape& part) const { return part.dhead && row_chunk < rows && !part.dhead_in_place; }
  // Several row chunks: dbias is added up in the workspace, so that it is rounded once, and added to once.
  bool sums_dbias() const { return dbias && row_chunk < rows; }
};

// Columns of a tile: with its rows of the head about as many bytes as a core's L2.
std::int64_t linear_tile(const MatmulTable& matmul, Compute compute, std::int64_t width);

struct NamedBytes {
  const char* name;
  std::int64_t bytes;
};

// Offsets in bytes, multiples of 64, as all of a layout.
struct PartLayout {
  std::int64_t packed_across = 0;  // a row chunk's hidden for dhead
  std::int64_t packed_head = 0;    // a chunk of the head for dhidden
  std::int64_t dhidden = 0;        // float [N, width]
  std::int64_t dhead = 0;          // float [V, width], with several row chunks and no place in the output
};

struct LinearLayout {
  std::int64_t used_rows = 0;      // int64 [N]
  std::int64_t packed_hidden = 0;  // for z
  PartLayout own, low_rank;
  std::int64_t empty = 0;      // with `allowed`: uint8 [N], rows in use without any column
  std::int64_t states = 0;     // RowState [slices, N]
  std::int64_t weights = 0;    // with `allowed`: double [slices, N], the sums of class weights that a state has seen
  std::int64_t gradients = 0;  // RowGradient [N]
  // Of rows with several labels:
  std::int64_t label_logits = 0;  // float [N, labels]: the labels' logits, and z
  std::int64_t label_z = 0;
  std::int64_t label_gradients = 0;  // LabelGradient [N, labels + 1], the first of a row has their number as slot
  std::int64_t kept = 0;             // z of the rows that dhead does not hold: float or 16-bit words [tiles kept, rows, tile]
  std::int64_t kept_max = 0;         // with words: float [tiles kept, rows], the tiles' maxima; a part of that buffer
  std::int64_t max_in_dhead = 0;     // the same of the rows that dhead holds: float [whole tiles, rows]
  // Of a target that is not labels:
  std::int64_t packed_teacher = 0;       // its hidden, for its logits
  std::int64_t some_logits = 0;          // float [target.rows, z_stride]; their gradient is written over them
  std::int64_t some_teacher_logits = 0;  // the same of the teacher
  std::int64_t some_label_columns = 0;   // int64 [target.rows]
  std::int64_t kept_dz = 0;              // of the rows that dhead does not hold: bfloat16 or float [rows, z_stride]
  std::int64_t dz = 0;       // float [row_chunk, chunk]; with products in tile registers bfloat16, packed once for each product
  std::int64_t dbias = 0;    // float [V], with several row chunks
  std::int64_t scratch = 0;  // scratch_bytes a thread
  std::int64_t scratch_bytes = 0;
  std::int64_t bytes = 0;
  std::vector<NamedBytes> buffers;  // that are not empty, in their order
};

LinearLayout linear_layout(const LinearShape& shape, const MatmulTable& matmul);

struct PartOperands {
  Operand hidden;  // rows: tokens
  Operand head;    // rows: classes
  OutputMatrix dhidden, dhead;
};

struct LinearJob {
  LinearShape shape;
  LinearLayout layout;
  const KernelTable* kernels = nullptr;
  PartOperands own;       // hidden null: the row stage alone
  PartOperands low_rank;  // null: none
  Operand bias;           // rows: classes, one column; null: none
  LogitTransform transform;
  std::uint32_t sums = kNoSums;
  const float* class_weights = nullptr;   // of column 0; null: 1
  std::int64_t* label_columns = nullptr;  // [rows]; of several labels the likeliest's, which is written there
  AllowedSets allowed;
  TargetInput target;
  Operand teacher_hidden, teacher_head, teacher_bias;  // of TargetKind::kLogits
  bool sweeps_forward = false;
  bool wants_gradients = false;
  bool is_packed = false;   // by the forward of the same call, which has kept its logits as well
  OutputMatrix dbias;       // [V, 1]
  bool accumulate = false;  // each part's dhead, and dbias, are added to
  std::byte* workspace = nullptr;
};

void run_linear(const LinearJob& job, RowVisitor& visitor, const tileloss_executor* executor);

}  // namespace tileloss::impl::cpu
