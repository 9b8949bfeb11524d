#include "backends/cuda/linear_kernels.h"
#include "backends/cuda/linear_sweeps.h"
#include "backends/cuda/row_plan.h"
#include "backends/cuda/steps.h"
#include "schema/tensors.h"

namespace tileloss::impl::cuda {
namespace {

// Algorithms are chosen for products of so many rows.
constexpr std::int64_t kUsualRows = 4096, kUsualRowBlock = 1024;

AnyMatrix any(const tileloss_matrix& m) { return {m.data, m.dtype, m.row_stride, m.col_stride}; }
AnyMatrix any(const tileloss_vector& v) { return {v.data, v.dtype, v.stride, 0}; }
// From an element on.
AnyMatrix from(AnyMatrix m, std::int64_t row) {
  const std::int64_t bytes = row * m.row_stride * element_bytes(m.dtype);
  return {static_cast<std::byte*>(m.data) + bytes, m.dtype, m.row_stride, m.col_stride};
}
AnyMatrix transposed(AnyMatrix m) { return {m.data, m.dtype, m.col_stride, m.row_stride}; }

// visit(T{}) with the type of the products' operands.
template <class Visit>
void visit_compute(bool is_bfloat16, Visit&& visit) {
  is_bfloat16 ? visit(Bfloat16{}) : visit(float{});
}
template <class T>
Rows<T> rows_at(std::byte* data, std::int64_t begin, std::int64_t stride) {
  return {reinterpret_cast<T*>(data) + begin * stride, stride};
}

int threads_for(std::int64_t columns) { return threads_of_row(columns, TILELOSS_FLOAT32); }

// Of rows from `begin` on.
RowStates states_from(RowStates states, std::int64_t begin) {
  const auto move = [=](auto*& array) {
    if (array != nullptr) array += begin;
  };
  move(states.kept);
  tileloss_row_state& s = states.saved;
  for (float** array : {&s.max, &s.sum, &s.target, &s.entropy_sum, &s.collision_sum, &s.smoothing_sum}) move(*array);
  move(s.argmax);
  return states;
}

}  // namespace

Status HeadAlgorithms::find(const Problem& p, const HeadCut& cut, Algorithms& all, bool may_choose, HeadAlgorithms* found) {
  const std::int64_t width = p.args.hidden.cols;
  if (!has_head(p) || width == 0) return {};
  Pieces pieces;
  const std::int64_t scratch = HeadPieces(p, cut, pieces).scratch_bytes;
  const bool is_bfloat16 = p.compute == TILELOSS_BFLOAT16, is_across = head_is_across(p);
  const auto find = [&](const Algorithm*& algorithm, bool left_is_across, bool right_is_across, std::int64_t rows,
                        std::int64_t columns, std::int64_t depth) {
    return all.find({p.device_index, is_bfloat16, left_is_across, right_is_across, rows, columns, depth, scratch}, may_choose,
                    &algorithm);
  };
  for (const bool is_last : {false, true}) {
    const auto size = [&](std::int64_t whole) { return is_last ? p.columns % whole : p.columns >= whole ? whole : 0; };
    const std::int64_t block = size(cut.vocab_block), chunk = size(cut.chunk_columns);
    Status s;
    if (block > 0) s = find(found->logits[is_last], false, !is_across, kUsualRowBlock, block, width);
    if (s.ok() && chunk > 0 && p.needs_backward) {
      s = find(found->dhidden[is_last], false, is_across, kUsualRows, width, chunk);
      const std::int64_t rows = dhead_is_across(p) ? width : chunk, columns = dhead_is_across(p) ? chunk : width;
      if (s.ok()) s = find(found->dhead[is_last], true, false, rows, columns, kUsualRows);
    }
    if (!s.ok()) return s;
  }
  return {};
}

// --------------------------------------------------------------------------------------------------------------- forward

void HeadSweeps::forward(Queue& queue, const Arrays& rows) const {
  const Problem& p = *problem_;
  copy_hidden(queue, rows);
  for (std::int64_t first = 0; first < p.columns; first += cut_.vocab_block) {
    const Chunk block = chunk_at(queue, rows, first, cut_.vocab_block, true);
    const BlockWeights weights = weights_of(queue, block);
    for (std::int64_t begin = 0; begin < p.rows; begin += cut_.row_block) {
      const std::int64_t count = std::min(cut_.row_block, p.rows - begin);
      float* const z = logits_at(block, begin);
      make_logits(queue, block, begin, count, z);
      SweepJob sweep = job(block, begin, rows, z);
      if (first > 0) sweep.rows.states = pieces_.states;
      launch_forward(queue, p, count, threads_, sweep, p.logit.softcap > 0);
      if (first > 0)
        launch_each(queue, count, MergeBlock{rows.states + begin, pieces_.states, weights, sweep.rows.label_columns});
    }
  }
}

BlockWeights HeadSweeps::weights_of(Queue& queue, const Chunk& block) const {
  BlockWeights weights = {static_cast<double>(block.first), static_cast<double>(block.columns)};
  if (!sums_class_weights(*problem_)) return weights;
  double* const sums = pieces_.weights + block.first / cut_.vocab_block;
  if (block.first == 0) queue.keep(cudaMemsetAsync(sums, 0, sizeof *sums, queue.stream()), "the workspace");
  queue.launch(sum_terms<WeightTerm, TakeWeight>, 1, kMaxThreads, WeightTerm{class_weights(*problem_) + block.first},
               TakeWeight{sums}, block.columns);
  weights.sums = sums;
  return weights;
}

void HeadSweeps::copy_hidden(Queue& queue, const Arrays& rows) const {
  const tileloss_matrix& hidden = problem_->args.hidden;
  visit_compute(is_bfloat16(), [&]<class T>(T /*format*/) {
    queue.launch(copy_rows<T>, hidden.rows, threads_for(hidden.cols), any(hidden),
                 rows_at<T>(pieces_.hidden, 0, row_stride_of(hidden.cols)), hidden.cols, rows.label_columns);
  });
}

HeadSweeps::Chunk HeadSweeps::chunk_at(Queue& queue, const Arrays& rows, std::int64_t first, std::int64_t most,
                                       bool needs_head) const {
  const Problem& p = *problem_;
  const tileloss_matrix& head = p.args.head;
  const bool is_across = head_is_across(p);
  Chunk chunk = {first, std::min(most, p.columns - first), {}};
  launch_each(queue, p.rows, FindInChunk{rows.label_columns, pieces_.labels, first, chunk.columns});
  const AnyMatrix here = from(any(head), first);
  if (!head_is_copied(p)) {
    chunk.head = {here.data, is_across ? head.col_stride : head.row_stride, is_across};
    return chunk;
  }
  const std::int64_t lines = is_across ? head.cols : chunk.columns, line = is_across ? chunk.columns : head.cols;
  const std::int64_t stride = row_stride_of(is_across ? cut_.vocab_block : head.cols);
  chunk.head = {pieces_.head, stride, is_across};
  if (!needs_head) return chunk;
  visit_compute(is_bfloat16(), [&]<class T>(T /*format*/) {
    queue.launch(copy_rows<T>, lines, threads_for(line), is_across ? transposed(here) : here, rows_at<T>(pieces_.head, 0, stride),
                 line, static_cast<const std::int64_t*>(nullptr));
  });
  return chunk;
}

float* HeadSweeps::logits_at(const Chunk& chunk, std::int64_t begin) const {
  if (!is_kept(chunk)) return pieces_.logits;
  const std::int64_t block = chunk.first / cut_.vocab_block, column = chunk.first % cut_.vocab_block;
  return pieces_.kept + (block * problem_->rows + begin) * cut_.vocab_block + column;
}

void HeadSweeps::make_logits(Queue& queue, const Chunk& chunk, std::int64_t begin, std::int64_t count, float* z) const {
  const Problem& p = *problem_;
  const bool has_bias = present(p.args.bias);
  if (has_bias)
    queue.launch(fill_rows, count, threads_for(chunk.columns), any(p.args.bias), chunk.first, Rows<float>{z, cut_.vocab_block},
                 chunk.columns);
  const std::int64_t width = p.args.hidden.cols, stride = row_stride_of(width);
  Operand hidden = {pieces_.hidden + begin * stride * element_bytes(p.compute), stride, false}, head = chunk.head;
  head.is_across = !head.is_across;  // [width, columns]
  // The same for all columns of a block, so that those that are made again have the same bits.
  const bool is_last = chunk.first - chunk.first % cut_.vocab_block + cut_.vocab_block > p.columns;
  multiply(queue, algorithms_.logits[is_last], {count, chunk.columns, width, hidden, head, z, cut_.vocab_block, has_bias},
           pieces_.scratch);
}

SweepJob HeadSweeps::job(const Chunk& chunk, std::int64_t begin, const Arrays& rows, float* z) const {
  const Problem& p = *problem_;
  const float* const weights = class_weights(p);
  SweepJob job;
  job.logits = job.dlogits = {z, cut_.vocab_block};
  job.columns = job.total_columns = chunk.columns;
  job.first_column = p.logit.vocab_start + chunk.first;
  job.sums = p.sums;
  job.transform = transform_;
  job.class_weights = weights == nullptr ? nullptr : weights + chunk.first;
  job.rows.label_columns = pieces_.labels + begin;
  job.rows.states = rows.states + begin;
  job.rows.results = rows.results + begin;
  return job;
}

// -------------------------------------------------------------------------------------------------------------- backward

void HeadSweeps::backward(Queue& queue, const Arrays& rows, const RowStates& states) const {
  const Problem& p = *problem_;
  const tileloss_args& a = p.args;
  const std::int64_t width = a.hidden.cols, stride = row_stride_of(width);
  if (!p.needs_forward) copy_hidden(queue, rows);
  if (present(a.dhidden)) {
    const auto bytes = static_cast<std::size_t>(p.rows * stride) * sizeof(float);
    queue.keep(cudaMemsetAsync(pieces_.dhidden, 0, bytes, queue.stream()), "the workspace");
  }
  for (std::int64_t first = 0; first < p.columns; first += cut_.chunk_columns) {
    const Chunk chunk = chunk_at(queue, rows, first, cut_.chunk_columns, first >= cut_.kept_columns || present(a.dhidden));
    make_dlogits(queue, chunk, rows, states);
    if (present(a.dhidden)) add_dhidden(queue, chunk);
    if (present(a.dhead)) store_dhead(queue, chunk);
    if (present(a.dbias)) {
      const bool has_rows = p.rows > 0;
      launch_each(queue, chunk.columns, StoreBias{has_rows ? pieces_.dbias : nullptr, a.dbias, first, p.linear.accumulate != 0});
    }
  }
  if (present(a.dhidden)) {
    queue.launch(store_rows, p.rows, threads_for(width), Rows<float>{pieces_.dhidden, stride}, any(a.dhidden), width,
                 rows.label_columns, false);
  }
  if (p.linear.accumulate == 0) clear_padding(queue);
}

void HeadSweeps::make_dlogits(Queue& queue, const Chunk& chunk, const Arrays& rows, const RowStates& states) const {
  const Problem& p = *problem_;
  const bool are_multiplied = present(p.args.dhidden) || present(p.args.dhead);
  for (std::int64_t begin = 0; begin < p.rows; begin += cut_.row_block) {
    const std::int64_t count = std::min(cut_.row_block, p.rows - begin);
    float* const z = logits_at(chunk, begin);
    if (!is_kept(chunk)) make_logits(queue, chunk, begin, count, z);
    Rows<float> dz = {z, cut_.vocab_block};
    if (are_multiplied && !is_bfloat16()) dz = rows_at<float>(pieces_.dlogits, begin, cut_.chunk_columns);
    SweepJob sweep = job(chunk, begin, rows, z);
    sweep.dlogits = {dz.data, dz.stride};
    launch_backward(queue, p, count, threads_, sweep, states_from(states, begin));
    if (are_multiplied && is_bfloat16()) {
      queue.launch(round_rows<Bfloat16>, count, threads_for(chunk.columns), dz,
                   rows_at<Bfloat16>(pieces_.dlogits, begin, cut_.chunk_columns), chunk.columns);
    }
    if (present(p.args.dbias)) {
      queue.launch(sum_columns, (chunk.columns + kWarp - 1) / kWarp, kSumWarps * kWarp, dz, count, chunk.columns, pieces_.dbias,
                   begin > 0);
    }
  }
}

void HeadSweeps::add_dhidden(Queue& queue, const Chunk& chunk) const {
  const std::int64_t width = problem_->args.hidden.cols;
  const Operand dz = {pieces_.dlogits, cut_.chunk_columns, false};
  multiply(queue, algorithm_of(chunk, algorithms_.dhidden),
           {problem_->rows, width, chunk.columns, dz, chunk.head, pieces_.dhidden, row_stride_of(width), true}, pieces_.scratch);
}

void HeadSweeps::store_dhead(Queue& queue, const Chunk& chunk) const {
  const Problem& p = *problem_;
  const std::int64_t width = p.args.hidden.cols;
  const Operand dz = {pieces_.dlogits, cut_.chunk_columns, false}, hidden = {pieces_.hidden, row_stride_of(width), false};
  Product product = {chunk.columns, width, p.rows, dz, hidden, pieces_.dhead, row_stride_of(width), false};
  AnyMatrix to = from(any(p.args.dhead), chunk.first);
  if (dhead_is_across(p)) {
    product = {width, chunk.columns, p.rows, hidden, dz, pieces_.dhead, cut_.chunk_columns, false};
    to = transposed(to);
  }
  product.left.is_across = true;
  multiply(queue, algorithm_of(chunk, algorithms_.dhead), product, pieces_.scratch);
  queue.launch(store_rows, product.rows, threads_for(product.columns), Rows<float>{pieces_.dhead, product.to_stride}, to,
               product.columns, static_cast<const std::int64_t*>(nullptr), p.linear.accumulate != 0);
}

// Classes that are none have the gradient 0.
void HeadSweeps::clear_padding(Queue& queue) const {
  const Problem& p = *problem_;
  const tileloss_args& a = p.args;
  const std::int64_t padding = p.total_columns - p.columns;
  if (present(a.dhead)) {
    queue.launch(store_rows, padding, threads_for(a.dhead.cols), Rows<float>(), from(any(a.dhead), p.columns), a.dhead.cols,
                 static_cast<const std::int64_t*>(nullptr), false);
  }
  if (present(a.dbias)) launch_each(queue, padding, StoreBias{nullptr, a.dbias, p.columns, false});
}

}  // namespace tileloss::impl::cuda
