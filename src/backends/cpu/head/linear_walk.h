// One call with the LM head: its pieces of workspace, and the phases that run in order.
#pragma once

#include <atomic>
#include <span>

#include "backends/cpu/amx/tile_table.h"
#include "backends/cpu/head/linear_blocks.h"
#include "backends/cpu/simd/storage_access.h"
#include "backends/cpu/sweep/label_gradients.h"
#include "backends/cpu/threads/executor.h"
#include "backends/cpu/threads/floating_point.h"

namespace tileloss::impl::cpu {

class LinearWalk {
 public:
  LinearWalk(const LinearJob& job, const tileloss_executor* executor);

  // All of a call, but for ignored rows and finish(): of rows compared with their labels, and of others (linear_some_rows.cpp).
  void run(RowVisitor& visitor);
  void run_some_rows(RowVisitor& visitor);
  // Outputs that were added up in the workspace, and what no row or column touches.
  void finish();

 private:
  class RowsAtHand;

  // Rows in use, side by side: [begin, end) counts those.
  void pack_hidden();
  // Of rows with several labels (linear_labels.cpp): the labels' logits, the likeliest as the row's; what the row stage sees of
  // them; and their gradients, of which set_labels writes those of a tile's columns.
  void find_labels(const RowVisitor& visitor);
  SeveralLabels labels(std::int64_t u, const RowVisitor& visitor) const;
  void keep_label_gradients(std::int64_t u, const SeveralLabels& labels, const RowVisitor& visitor) const;
  template <class Put>
  void set_labels(std::int64_t u, std::int64_t column, std::int64_t columns, const Put& put) const {
    if (shape().labels_per_row == 0) return;
    const LabelGradient* const first = label_gradients(u);
    const LabelGradient *const end = first + 1 + first->slot,
                               *at = std::lower_bound(first + 1, end, column, [](const LabelGradient&label, std::int64_t least) {
                                 return label.column < least;
                               });
    for (; at < end && at->column < column + columns; ++at) put(at->column - column, at->dx);
  }
  void forward(std::int64_t begin, std::int64_t end);
  void backward(std::int64_t begin, std::int64_t end);
  // The logits of some rows, float [end - begin, z_stride].
  void logits(std::int64_t begin, std::int64_t end, float* z);
  // A row of the row chunk from `begin` on, and its dL/dz, for the backward.
  void keep_dz(std::int64_t begin, std::int64_t u, const float* dz) const;
  LinearJob teacher_job() const;
  SweepJob sweep_job() const;

  const LinearShape& shape() const { return job_.shape; }
  // The head's own operands, or those of its low-rank part.
  struct Part {
    const PartShape& shape;
    const PartLayout& layout;
    const PartOperands& operands;
    bool packs_by_classes() const { return operands.head.k_stride == 1; }
  };
  std::span<const Part> parts() const { return {parts_, shape().low_rank.width > 0 ? std::size_t{2} : 1}; }
  // Of tasks of the parts, count(part) each, one after the other.
  template <class Count>
  std::int64_t all_tasks(const Count& count) const {
    std::int64_t sum = 0;
    for (const Part& part : parts()) sum += count(part);
    return sum;
  }
  // Whose task it is, which is counted from the part's first then; null: of none, and counted from the end of all.
  template <class Count>
  const Part* part_of(std::int64_t& task, const Count& count) const {
    for (const Part& part : parts()) {
      if (task < count(part)) return &part;
      task -= count(part);
    }
    return nullptr;
  }
  // Few columns of dhidden, the low-rank part's, are made with the head's last ones, up to `end`, while dz is at hand.
  const Part* joined_to(const Part& part, std::int64_t end) const {
    const bool joins = shape().low_rank.dhidden && shape().low_rank.width <= kFewColumns;
    return joins && &part == &parts_[0] && end >= part.shape.width ? &parts_[1] : nullptr;
  }
  bool makes_dhidden_alone(const Part& part) const {
    const bool has_other = shape().own.dhidden && &part != &parts_[0];
    return part.shape.dhidden && !(has_other && joined_to(parts_[0], shape().own.width) != nullptr);
  }
  const MatmulTable& matmul() const { return job_.kernels->matmul; }
  template <class T>
  T* piece(std::int64_t offset) const {
    return reinterpret_cast<T*>(job_.workspace + offset);
  }
  float* scratch(std::int64_t slot) const { return piece<float>(job_.layout.scratch + slot * job_.layout.scratch_bytes); }
  // The end of a thread's scratch: ForwardRow::operands.
  float* operands(float* scratch) const {
    return scratch + job_.layout.scratch_bytes / 4 - operand_floats(shape().softcap, shape().tile);
  }

  // The same for what of a row's tile is allowed.
  float* side_by_side(float* scratch) const { return operands(scratch) - side_by_side_floats(shape()); }

  // task(slot, i) for i in [0, count) on all threads.
  template <class F>
  void parallel(std::int64_t count, F&& task) {
    struct Shared {
      F* task;
      std::int64_t count;
      std::atomic<std::int64_t> next{0};
    } shared{&task, count};
    parallel_for(
        executor_, std::min<std::int64_t>(shape().threads, count),
        [](void* data, std::int64_t slot) {
          auto& s = *static_cast<Shared*>(data);
          const FloatingPointScope scope;
          for (std::int64_t i = s.next.fetch_add(1); i < s.count; i = s.next.fetch_add(1)) (*s.task)(slot, i);
        },
        &shared);
  }

  LabelGradient* label_gradients(std::int64_t u) const {
    return piece<LabelGradient>(job_.layout.label_gradients) + u * (shape().labels_per_row + 1);
  }
  float* packed_rows(std::int64_t u) const { return packed_hidden_ + u * z_words(); }
  std::int64_t z_words() const { return matmul().words(z_depth_, shape().compute); }
  // A tile of the head for z, at the beginning of a thread's scratch; behind it is room.
  void pack_tile_of_head(std::int64_t column, std::int64_t columns, float* scratch) const;
  float* after_head(float* scratch) const { return scratch + tile_of_head(shape(), matmul()); }
  Operand rows_in_use(const Part& part, std::int64_t u, std::int64_t rows, std::int64_t h, std::int64_t columns,
                      float* copy) const;
  // Of a tile of columns, the same for all rows of a row tile.
  bool is_in_dhead(std::int64_t u) const { return u - first_row_ < kept_in_dhead_.rows; }
  bool is_kept(std::int64_t u, std::int64_t column) const {
    return is_in_dhead(u) ? column + shape().tile <= shape().columns : column < kept_columns_;
  }
  // z of a row in use of this row chunk, from the first column of a tile on: T is float, or std::uint16_t with a maximum.
  template <class T>
  T* kept_row(std::int64_t u, std::int64_t column) const {
    const KeptInDhead& d = kept_in_dhead_;
    std::int64_t row = u - first_row_;
    if (!is_in_dhead(u)) {
      row -= d.rows;
      return piece<T>(job_.layout.kept) + column * (shape().row_chunk - d.rows) + row * shape().tile;
    }
    auto* const line =
        static_cast<std::byte*>(job_.own.dhead.data) + column * d.column_bytes + row / d.rows_of_line * d.line_bytes;
    return reinterpret_cast<T*>(line) + row % d.rows_of_line * shape().tile;
  }
  // From a row's z to the next one's, in a row tile whose z is kept in float32.
  std::int64_t kept_stride(std::int64_t u) const {
    return is_in_dhead(u) && kept_in_dhead_.line_bytes > 0 ? kept_in_dhead_.line_bytes / 4 : shape().tile;
  }
  float& kept_max(std::int64_t u, std::int64_t column) const {
    const std::int64_t tile = column / shape().tile, rows = kept_in_dhead_.rows, row = u - first_row_;
    if (is_in_dhead(u)) return piece<float>(job_.layout.max_in_dhead)[tile * rows + row];
    return piece<float>(job_.layout.kept_max)[tile * (shape().row_chunk - rows) + row - rows];
  }
  // Returns the maximum that they are relative to.
  float to_words(const float* z, std::int64_t columns, std::uint16_t* words) const {
    return job_.kernels->kept_logits.keep(z, columns, steps_per_unit_, words);
  }
  const float* tile_of_bias(std::int64_t column, std::int64_t columns, float* to) const;
  void multiply_z(const float* head, const float* bias, std::int64_t u, std::int64_t rows, std::int64_t columns, float* z,
                  std::int64_t z_stride) const;
  RowState tile_state(std::int64_t u, std::int64_t column, std::int64_t columns, const float* z, float* scratch) const;
  double weight_of(std::int64_t column, std::int64_t columns) const;
  void add_to_slice(std::int64_t u, std::int64_t slice, std::int64_t column, std::int64_t columns, const RowState& tile,
                    double weight_before, double weight) const;

  // With `allowed`.
  AllowedSet allowed(std::int64_t u, std::int64_t column, std::int64_t columns) const {
    return job_.allowed(rows_[u], column, columns);
  }
  const float* weights_from(std::int64_t column) const {
    return job_.class_weights == nullptr ? nullptr : job_.class_weights + column;
  }
  // Whether one of the rows has something in these columns: a logit; or a gradient, as a row without any has, of NaN.
  bool has_z(std::int64_t first, std::int64_t last, std::int64_t column, std::int64_t columns) const;
  bool has_dz(std::int64_t first, std::int64_t last, std::int64_t column, std::int64_t columns) const;
  void leave_out(std::int64_t u, std::int64_t column, std::int64_t columns, float* z) const;
  void skip(std::int64_t first, std::int64_t last, std::int64_t column) const;
  void zero_dhead(const Part& part, std::int64_t begin, std::int64_t column, std::int64_t columns) const;
  bool skips_dhidden(const Part& part, std::int64_t first, std::int64_t rows, std::int64_t h, std::int64_t width,
                     std::int64_t chunk, std::int64_t chunk_columns, Store& how) const;
  void forward_task(float* scratch, std::int64_t begin, std::int64_t end, std::int64_t task) const;
  void merge_slices(std::int64_t u) const;

  // The same with the softmax beside products in tile registers (linear_tiles.cpp).
  struct TileAtHand;
  bool has_softmax_beside() const;
  SoftmaxRows softmax_of(float* scratch, std::int64_t first, std::int64_t last) const;
  void forward_tiles_task(float* scratch, std::int64_t first, std::int64_t last, std::int64_t slice) const;
  void add_running(const RunningRow& running, const SoftmaxRows& job, RowState& state) const;

  void dz_task(float* scratch, std::int64_t begin, std::int64_t end, std::int64_t column, std::int64_t columns, float* dz) const;

  // The backward whose dz is packed as soon as it is made (linear_backward_tiles.cpp). A block: rows in use [first, first + rows)
  // of the row chunk [begin, end), columns [column, column + columns) of the chunk of columns from `chunk` on.
  struct DzChunk {
    std::int64_t begin, end, chunk, columns;
  };
  struct DzBlock {
    std::int64_t first, rows, column, columns;
  };
  float* dz_along(const DzChunk& c, const DzBlock& b) const;
  float* dz_down(const DzChunk& c, const DzBlock& b) const;
  void pack_dz(const DzChunk& c, const DzBlock& b, const float* dz) const;
  bool words_to_dz(std::int64_t u, float max, float& factor, float& exponent) const;
  void put_dz(const GradientTiles& g, std::int64_t row, std::int64_t column, float dz) const;
  void dz_from_words(const DzChunk& c, const DzBlock& b, float* z, std::uint16_t* words, float* scratch) const;
  void dz_from_kept(const DzChunk& c, const DzBlock& b, float* dz) const;
  void dz_from_floats(const DzChunk& c, const DzBlock& b, float* z, float* scratch) const;
  void dz_tiles_task(float* scratch, const DzChunk& c, const DzBlock& rows) const;
  void multiply_dhead(const Part& part, const DzChunk& c, std::int64_t row, std::int64_t rows, std::int64_t h, std::int64_t width,
                      bool adds, Store alone, float* to, std::int64_t stride) const;
  void dhead_set(const Part& part, float* scratch, const DzChunk& c, std::int64_t first, std::int64_t rows, std::int64_t h,
                 std::int64_t width) const;
  void dhidden_set(const Part& part, const DzChunk& c, std::int64_t first, std::int64_t rows, std::int64_t h,
                   std::int64_t width) const;
  void multiply_sets(const DzChunk& c);
  void backward_amx(std::int64_t begin, std::int64_t end);

  void* kept_dz(std::int64_t row, std::int64_t column) const;
  void load_dz(std::int64_t u, std::int64_t column, std::int64_t columns, float* dz) const;
  void restore_row(std::int64_t u, std::int64_t column, std::int64_t columns, std::uint16_t* words, float* z) const;
  void dz_row(std::int64_t u, std::int64_t column, std::int64_t columns, const float* z, float* dz, float* scratch) const;
  std::int64_t pack_head_tasks(const Part& part, std::int64_t chunk_columns) const;
  void pack_head_task(const Part& part, std::int64_t task, std::int64_t chunk, std::int64_t chunk_columns) const;
  void pack_across(const Part& part, std::int64_t begin, std::int64_t end);
  void dhead_task(const Part& part, float* scratch, std::int64_t begin, std::int64_t end, std::int64_t column,
                  std::int64_t columns, const float* dz) const;
  void dbias_task(float* scratch, std::int64_t begin, std::int64_t end, std::int64_t column, std::int64_t columns,
                  const float* dz) const;
  void dhidden_task(const Part& part, float* scratch, bool packs, std::int64_t first, std::int64_t rows, std::int64_t h,
                    std::int64_t width, std::int64_t chunk, std::int64_t chunk_columns, const float* dz) const;

  const LinearJob& job_;
  const Part parts_[2];
  const tileloss_executor* executor_;
  std::int64_t used_ = 0;
  std::int64_t first_row_ = 0;  // of the row chunk at hand
  KeptInDhead kept_in_dhead_;
  std::int64_t kept_columns_ = 0;
  bool has_words_ = false;
  float steps_per_unit_ = 0;  // of the words, in z before its scale
  std::int64_t z_depth_ = 0;
  std::int64_t chunk_columns_ = 0;
  std::int64_t slice_columns_ = 0;
  std::int64_t* rows_;
  float* packed_hidden_;
  RowState* states_;
  double* weights_;      // with `allowed`
  std::uint8_t* empty_;  // so
  RowGradient* gradients_;
};

}  // namespace tileloss::impl::cpu
