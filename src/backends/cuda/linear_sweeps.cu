#include "backends/cuda/count_allowed.h"
#include "backends/cuda/linear_rows.h"
#include "backends/cuda/linear_sweeps.h"
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

// A low-rank part is copied beside the head.
bool head_lies_across(const tileloss_args& a, HeadSide side) {
  return lies_across(side == kTeachersHead ? a.teacher_head : a.head);
}

int threads_for(std::int64_t columns) { return threads_of_row(columns, TILELOSS_FLOAT32); }

// Of rows from `begin` on.
RowStates states_from(RowStates states, std::int64_t begin) {
  const auto move = [=](auto*& array) {
    if (array != nullptr) array += begin;
  };
  move(states.kept);
  tileloss_row_state& s = states.saved;
  for (float** array : {&s.max, &s.sum, &s.label_logit, &s.entropy_sum, &s.collision_sum, &s.smoothing_sum}) move(*array);
  move(s.argmax);
  return states;
}

}  // namespace

Status HeadAlgorithms::find(const Problem& p, const HeadCut& cut, Algorithms& all, HeadAlgorithms* found) {
  if (!has_head(p)) return {};
  Pieces pieces;
  const std::int64_t scratch = HeadPieces(p, cut, pieces).scratch_bytes;
  const bool is_bfloat16 = p.compute == TILELOSS_BFLOAT16;
  const PerSide<SideMatrices> matrices = sides_of(p.args);
  Status status;
  const auto find = [&](const Algorithm*& algorithm, bool left_is_across, bool right_is_across, std::int64_t rows,
                        std::int64_t columns, std::int64_t depth, tileloss_dtype made = TILELOSS_FLOAT32) {
    if (!status.ok() || rows == 0 || columns == 0 || depth == 0) return;
    status = all.find(
        {p.device_index, is_bfloat16, made == TILELOSS_BFLOAT16, left_is_across, right_is_across, rows, columns, depth, scratch},
        &algorithm);
  };
  for (const bool is_last : {false, true}) {
    const auto size = [&](std::int64_t whole) { return is_last ? p.columns % whole : p.columns >= whole ? whole : 0; };
    const std::int64_t block = size(cut.vocab_block), chunk = size(cut.chunk_columns);
    for (const HeadSide s : kHeadSides) {
      const auto& [hidden, head, dhidden, dhead, bias] = matrices[s];
      Side& side = found->sides[s];
      const std::int64_t width = hidden.cols;
      const bool is_across = head_lies_across(p.args, s), is_made_across = lies_across(dhead);
      find(side.logits[is_last], false, !is_across, kUsualRowBlock, block, depth_of_logits(p.args, s));
      if (!p.needs_backward) continue;
      if (present(dhidden)) find(side.dhidden[is_last], false, is_across, kUsualRows, width, chunk);
      if (present(dhead))
        find(side.dhead[is_last], true, false, is_made_across ? width : chunk, is_made_across ? chunk : width, kUsualRows,
             made_of(dhead, p));
    }
  }
  return status;
}

HeadSweeps::HeadSweeps(const Problem& problem, const HeadCut& cut, const HeadPieces& pieces, const HeadAlgorithms& algorithms,
                       const LogitTransform* transform, const std::optional<TargetSweeps>& target, const RowCut& rows,
                       const SumParts& sums)
    : problem_(&problem), cut_(cut), pieces_(pieces), transform_(transform), sums_(sums), target_(target), row_cut_(rows) {
  const PerSide<SideMatrices> all = sides_of(problem.args);
  for (const HeadSide s : kHeadSides) {
    if (!present(all[s].hidden)) continue;
    sides_.push_back(
        {all[s], s, depth_of_logits(problem.args, s), head_lies_across(problem.args, s), pieces.sides[s], algorithms.sides[s]});
  }
}

// --------------------------------------------------------------------------------------------------------------- forward

void HeadSweeps::multiply_labels(Queue& queue, const LabelColumns& labels, const Arrays& rows) const {
  const tileloss_args& a = problem_->args;
  const std::int64_t slots = problem_->rows * rows.slots.count;
  visit_compute(is_bfloat16(), [&]<class T>(T /*format*/) {
    queue.launch(cuda::multiply_labels<T>, (slots + kSlotWarps - 1) / kSlotWarps, kSlotWarps * kWarp, labels, rows, slots,
                 Factors{any(a.hidden), any(a.head), a.hidden.cols}, Factors{any(a.hidden_r), any(a.head_r), a.hidden_r.cols},
                 any(a.bias));
  });
}

void HeadSweeps::forward(Queue& queue, const Arrays& rows) const {
  const Problem& p = *problem_;
  copy_hidden(queue, rows);
  if (target_) return sweep_whole_rows<&TargetSweeps::forward>(queue, rows);
  const bool has_sums = has_block_sums(p);
  for (std::int64_t first = 0, before = 0; first < p.columns; first += cut_.vocab_block, before += p.rows) {
    Chunk block = columns_from(first, cut_.vocab_block);
    if (!has_sums) find_labels(queue, rows, block);
    find_heads(queue, &block, true);
    if (merges_class_weights(p)) sum_weights(queue, block);
    if (pieces_.classes != nullptr) {
      SweepJob all = job(block, 0, rows);
      all.rows.classes = pieces_.classes + before;
      queue.launch(count_allowed, p.rows, threads_for(block.columns / 32), all, (p.sums & kSmoothingSum) != 0);
    }
    for (std::int64_t begin = 0; begin < p.rows; begin += cut_.row_block) {
      const std::int64_t count = std::min(cut_.row_block, p.rows - begin);
      make_logits(queue, block, begin, count);
      SweepJob sweep = job(block, begin, rows);
      if (!has_sums) {
        sweep.rows.states = pieces_.states + before + begin;
        if (pieces_.classes != nullptr) sweep.rows.classes = pieces_.classes + before + begin;
        launch_forward(queue, p, count, row_cut_.threads, sweep, p.logit.softcap > 0);
      }
      if (has_sums || cut_.has_words()) {
        sweep.rows.label_columns = rows.label_columns + begin;
        const ForwardPart part = {first, pieces_.sums + before + begin, has_sums ? pieces_.label_logits + begin : nullptr};
        const bool keeps = is_in_words(block);
        const auto kernel = is_masked(p) ? keeps ? forward_block<true, true> : forward_block<false, true>
                            : keeps ? forward_block<true, false>
                                         : forward_block<false, false>;
        Rows<std::uint16_t> words;
        if (keeps) words = rows_at<std::uint16_t>(kept_at(block, begin), 0, cut_.vocab_block);
        queue.launch(kernel, count, row_cut_.threads, sweep, part, words);
      }
    }
  }
  launch_each(
      queue, p.rows,
      MergeBlocks{transform_, rows.label_columns, rows.states, p.rows, p.columns, cut_.vocab_block,
                  has_sums ? pieces_.sums : nullptr, pieces_.label_logits, pieces_.states, pieces_.weights, pieces_.classes});
}

void HeadSweeps::find_sums(Queue& queue, const Arrays& rows) const {
  copy_hidden(queue, rows);
  sweep_whole_rows<&TargetSweeps::find_sums>(queue, rows);
}

template <auto kSweep>
void HeadSweeps::sweep_whole_rows(Queue& queue, const Arrays& rows) const {
  const Problem& p = *problem_;
  const Chunk all = columns_from(0, p.columns);
  find_labels(queue, rows, all);
  for (std::int64_t begin = 0; begin < p.rows; begin += cut_.row_block) {
    const std::int64_t count = std::min(cut_.row_block, p.rows - begin);
    for (std::int64_t first = 0; first < p.columns; first += cut_.vocab_block) {
      Chunk block = columns_from(first, cut_.vocab_block);
      find_heads(queue, &block, true);
      make_logits(queue, block, begin, count);
    }
    ((*target_).*kSweep)(queue, part(job(all, begin, rows), all, begin, count));
  }
}

void HeadSweeps::sum_weights(Queue& queue, const Chunk& block) const {
  double* const sums = pieces_.weights + block.first / cut_.vocab_block;
  if (block.first == 0) queue.keep(cudaMemsetAsync(sums, 0, sizeof *sums, queue.stream()), "the workspace");
  launch_each_then_sum(queue, block.columns, NoStep{}, WeightTerm{class_weights(*problem_) + block.first}, TakeWeight{sums},
                       sums_);
}

void HeadSweeps::copy_hidden(Queue& queue, const Arrays& rows) const {
  const Problem& p = *problem_;
  // What stands between the head's columns and those of a low-rank part is multiplied, too.
  if (present(p.args.hidden_r) && p.args.hidden.cols % 8 != 0) {
    const HeadPieces::Side& own = sides_[0].pieces;
    for (const auto& [copy, count] : {std::pair{own.hidden, p.rows}, {own.head, cut_.vocab_block}}) {
      const auto bytes = static_cast<std::size_t>(count * own.stride * element_bytes(p.compute));
      queue.keep(cudaMemsetAsync(copy, 0, bytes, queue.stream()), "the workspace");
    }
  }
  visit_compute(is_bfloat16(), [&]<class T>(T /*format*/) {
    for (const Side& side : sides_) {
      const std::int64_t width = side.hidden.cols;
      queue.launch(copy_rows<T>, p.rows, threads_for(width), any(side.hidden),
                   rows_at<T>(side.pieces.hidden, 0, side.pieces.stride), width, rows.label_columns);
    }
  });
}

HeadSweeps::Chunk HeadSweeps::columns_from(std::int64_t first, std::int64_t most) const {
  return {first, std::min(most, problem_->columns - first), {}};
}

void HeadSweeps::find_labels(Queue& queue, const Arrays& rows, const Chunk& chunk) const {
  launch_each(queue, problem_->rows, FindInChunk{rows.label_columns, pieces_.labels, chunk.first, chunk.columns});
}

void HeadSweeps::find_heads(Queue& queue, Chunk* chunk, bool makes_logits) const {
  for (std::size_t s = 0; s < sides_.size(); ++s) chunk->heads[s] = head_at(queue, sides_[s], *chunk, makes_logits);
}

Operand HeadSweeps::head_at(Queue& queue, const Side& side, const Chunk& chunk, bool makes_logits) const {
  const tileloss_matrix& head = side.head;
  const bool is_across = side.is_across, is_low_rank = side.which == kLowRankPart, is_beside_one = side.depth > head.cols;
  const AnyMatrix here = from(any(head), chunk.first);
  if (!is_low_rank && !(is_beside_one && makes_logits) && !is_copied(head, problem_->compute))
    return {here.data, is_across ? head.col_stride : head.row_stride, is_across};
  const std::int64_t lines = is_across ? head.cols : chunk.columns, line = is_across ? chunk.columns : head.cols;
  const std::int64_t stride = is_across ? cut_.vocab_block : side.pieces.stride;
  if (makes_logits || present(side.dhidden)) {
    visit_compute(is_bfloat16(), [&]<class T>(T /*format*/) {
      queue.launch(copy_rows<T>, lines, threads_for(line), is_across ? transposed(here) : here,
                   rows_at<T>(side.pieces.head, 0, stride), line, static_cast<const std::int64_t*>(nullptr));
    });
  }
  return {side.pieces.head, stride, is_across};
}

std::byte* HeadSweeps::kept_at(const Chunk& chunk, std::int64_t begin) const {
  const std::int64_t block = chunk.first / cut_.vocab_block, column = chunk.first % cut_.vocab_block;
  return pieces_.kept + ((block * problem_->rows + begin) * cut_.vocab_block + column) * cut_.kept_bytes;
}

float* HeadSweeps::logits_at(const Side& side, const Chunk& chunk, std::int64_t begin) const {
  if (target_) return side.pieces.logits + std::min(begin, cut_.kept_rows) * pieces_.logits_stride + chunk.first;
  return is_kept(chunk, begin) && !cut_.has_words() ? reinterpret_cast<float*>(kept_at(chunk, begin)) : side.pieces.logits;
}

void HeadSweeps::make_logits(Queue& queue, const Chunk& chunk, std::int64_t begin, std::int64_t count) const {
  const Problem& p = *problem_;
  for (std::size_t s = 0; s < sides_.size(); ++s) {
    const Side& side = sides_[s];
    if (side.which == kLowRankPart) continue;
    float* const z = logits_at(side, chunk, begin);
    const bool has_bias = present(side.bias);
    if (has_bias)
      queue.launch(fill_rows, count, threads_for(chunk.columns), any(side.bias), chunk.first,
                   Rows<float>{z, pieces_.logits_stride}, chunk.columns);
    const std::int64_t stride = side.pieces.stride;
    const Operand hidden = {side.pieces.hidden + begin * stride * element_bytes(p.compute), stride, false};
    Operand head = chunk.heads[s];
    head.is_across = !head.is_across;  // [width, columns]
    // The same for all columns of a block, so that those that are made again have the same bits.
    const bool is_last = chunk.first - chunk.first % cut_.vocab_block + cut_.vocab_block > p.columns;
    multiply(queue, side.algorithms.logits[is_last],
             {count, chunk.columns, side.depth, hidden, head, z, pieces_.logits_stride, has_bias}, pieces_.scratch);
  }
}

SweepJob HeadSweeps::job(const Chunk& chunk, std::int64_t begin, const Arrays& rows) const {
  const Problem& p = *problem_;
  const float* const weights = class_weights(p);
  SweepJob job;
  job.logits = job.dlogits = {logits_at(sides_[0], chunk, begin), pieces_.logits_stride};
  job.columns = job.total_columns = chunk.columns;
  job.first_column = p.logit.vocab_start + chunk.first;
  job.slices = row_cut_.blocks;
  job.sums = p.sums;
  job.transform = transform_;
  job.class_weights = weights == nullptr ? nullptr : weights + chunk.first;
  job.rows.label_columns = pieces_.labels + begin;
  job.rows.states = rows.states + begin;
  if (target_) job.rows.stats = rows.stats + begin;
  job.rows.results = rows.results + begin;
  if (rows.classes != nullptr) job.rows.classes = rows.classes + begin;
  job.allowed = allowed_rows(p).from(begin, chunk.first);
  return job;
}

TargetPart HeadSweeps::part(const SweepJob& own, const Chunk& chunk, std::int64_t begin, std::int64_t count) const {
  TargetPart part = {own, {}, begin, count};
  if (has_teacher(*problem_)) part.teacher = {logits_at(sides_.back(), chunk, begin), pieces_.logits_stride};
  return part;
}

// -------------------------------------------------------------------------------------------------------------- backward

void HeadSweeps::backward(Queue& queue, const Arrays& rows, const RowStates& states) const {
  const Problem& p = *problem_;
  const tileloss_args& a = p.args;
  if (!p.needs_forward) copy_hidden(queue, rows);  // there was no forward
  for (const Side& side : sides_) {
    if (!present(side.dhidden)) continue;
    const auto bytes = static_cast<std::size_t>(p.rows * row_stride_of(side.hidden.cols)) * sizeof(float);
    queue.keep(cudaMemsetAsync(side.pieces.dhidden, 0, bytes, queue.stream()), "the workspace");
  }
  const bool has_gradients = has_gradient_rows(p);
  if (has_gradients) {
    SweepJob all = job(columns_from(0, p.columns), 0, rows);
    all.rows = rows;
    launch_each(queue, p.rows, MakeGradients{all, states, pieces_.gradients});
  }
  for (std::int64_t first = 0; first < p.columns; first += cut_.chunk_columns) {
    Chunk chunk = columns_from(first, cut_.chunk_columns);
    if (!has_gradients) find_labels(queue, rows, chunk);
    const bool makes_logits = p.rows > 0 && !is_kept(chunk, p.rows - 1);
    find_heads(queue, &chunk, makes_logits);
    has_gradients ? write_dlogits(queue, chunk, rows, states) : make_dlogits(queue, chunk, rows, states);
    for (std::size_t s = 0; s < sides_.size(); ++s) {
      if (present(sides_[s].dhidden)) add_dhidden(queue, sides_[s], chunk, chunk.heads[s]);
      if (present(sides_[s].dhead)) store_dhead(queue, sides_[s], chunk);
    }
    if (present(a.dbias)) {
      const bool has_rows = p.rows > 0;
      launch_each(queue, chunk.columns, StoreBias{has_rows ? pieces_.dbias : nullptr, a.dbias, first, p.linear.accumulate != 0});
    }
  }
  for (const Side& side : sides_) {
    const std::int64_t width = side.hidden.cols;
    if (present(side.dhidden))
      queue.launch(store_rows<float>, p.rows, threads_for(width), Rows<float>{side.pieces.dhidden, row_stride_of(width)},
                   any(side.dhidden), width, rows.label_columns, false);
  }
  if (p.linear.accumulate == 0) clear_padding(queue);
}

void HeadSweeps::make_dlogits(Queue& queue, const Chunk& chunk, const Arrays& rows, const RowStates& states) const {
  const Problem& p = *problem_;
  const bool are_multiplied = has_products();
  for (std::int64_t begin = 0; begin < p.rows; begin += cut_.row_block) {
    const std::int64_t count = std::min(cut_.row_block, p.rows - begin);
    if (!is_kept(chunk, begin)) make_logits(queue, chunk, begin, count);
    SweepJob sweep = job(chunk, begin, rows);
    Rows<float> dz = {static_cast<float*>(sweep.logits.data), sweep.logits.row_stride};
    if (are_multiplied && !is_bfloat16()) dz = rows_at<float>(pieces_.dlogits, begin, cut_.chunk_columns);
    sweep.dlogits = {dz.data, dz.stride};
    if (target_) {
      target_->backward(queue, part(sweep, chunk, begin, count));
    } else {
      launch_backward(queue, p, count, row_cut_.threads, sweep, states_from(states, begin));
      write_labels(queue, chunk, rows, states, begin, count, sweep.dlogits, TILELOSS_FLOAT32);
    }
    if (are_multiplied && is_bfloat16()) {
      queue.launch(round_rows<Bfloat16>, count, threads_for(chunk.columns), dz,
                   rows_at<Bfloat16>(pieces_.dlogits, begin, cut_.chunk_columns), chunk.columns);
    }
    if (present(p.args.dbias)) {
      queue.launch(sum_columns<Rows<float>>, (chunk.columns + kWarp - 1) / kWarp, kSumWarps * kWarp, dz, count, chunk.columns,
                   pieces_.dbias, begin > 0);
    }
  }
}

void HeadSweeps::write_dlogits(Queue& queue, const Chunk& chunk, const Arrays& rows, const RowStates& states) const {
  const bool is_multiple_of_p = problem_->is_multiple_of_p;
  if (is_in_words(chunk)) return write_dlogits<SlopesOfWords>(queue, chunk, rows, states);
  if (cut_.has_words()) return write_dlogits<SlopesAsOfWords>(queue, chunk, rows, states);
  visit_compute(is_bfloat16(), [&]<class T>(T /*format*/) {
    is_multiple_of_p ? write_dlogits<SlopesOfLogits<T, true>>(queue, chunk, rows, states)
                     : write_dlogits<SlopesOfLogits<T, false>>(queue, chunk, rows, states);
  });
}

template <class Slopes>
void HeadSweeps::write_dlogits(Queue& queue, const Chunk& chunk, const Arrays& rows, const RowStates& states) const {
  using T = typename Slopes::To;
  const Problem& p = *problem_;
  // All of what is kept at once, but where columns are added up: always by the same rows.
  const std::int64_t at_once = is_kept(chunk, 0) && !present(p.args.dbias) ? p.rows : cut_.row_block;
  for (std::int64_t begin = 0; begin < p.rows; begin += at_once) {
    const std::int64_t count = std::min(at_once, p.rows - begin);
    if (!is_kept(chunk, begin)) make_logits(queue, chunk, begin, count);
    Slopes slopes;
    slopes.job = job(chunk, begin, rows);
    slopes.job.rows.label_columns = rows.label_columns + begin;
    slopes.gradients = pieces_.gradients + begin;
    slopes.first = chunk.first;
    if (cut_.has_words()) slopes.blocks = pieces_.sums + chunk.first / cut_.vocab_block * p.rows + begin;
    if (is_in_words(chunk)) slopes.job.logits = {kept_at(chunk, begin), cut_.vocab_block};
    if (present(p.args.dbias))  // before dlogits go over what they are made of
      queue.launch(sum_columns<Slopes>, (chunk.columns + kWarp - 1) / kWarp, kSumWarps * kWarp, slopes, count, chunk.columns,
                   pieces_.dbias, begin > 0);
    if (!has_products()) continue;
    const Rows<T> to = rows_at<T>(dlogits_at(chunk), begin, dlogits_stride(chunk));
    queue.launch(is_masked(p) ? backward_chunk<Slopes, true> : backward_chunk<Slopes, false>, count, threads_for(chunk.columns),
                 slopes, to);
    const RowMatrix dz = {to.data, to.stride};
    write_labels(queue, chunk, rows, states, begin, count, dz, p.compute);
  }
}

void HeadSweeps::write_labels(Queue& queue, const Chunk& chunk, const Arrays& rows, const RowStates& states, std::int64_t begin,
                              std::int64_t count, const RowMatrix& to, tileloss_dtype storage) const {
  if (rows.slots.count == 0) return;
  launch_each(queue, count * rows.slots.count,
              WriteLabelGradient{make_context(*problem_), LabelColumns(*problem_), rows, states, transform_, begin, chunk.first,
                                 chunk.columns, to, storage});
}

bool HeadSweeps::has_products() const {
  return std::ranges::any_of(sides_, [](const Side& side) { return present(side.dhidden) || present(side.dhead); });
}

void HeadSweeps::add_dhidden(Queue& queue, const Side& side, const Chunk& chunk, const Operand& head) const {
  const std::int64_t width = side.hidden.cols;
  const Operand dz = {dlogits_at(chunk), dlogits_stride(chunk), false};
  multiply(queue, algorithm_of(chunk, side.algorithms.dhidden),
           {problem_->rows, width, chunk.columns, dz, head, side.pieces.dhidden, row_stride_of(width), true}, pieces_.scratch);
}

void HeadSweeps::store_dhead(Queue& queue, const Side& side, const Chunk& chunk) const {
  const Problem& p = *problem_;
  const tileloss_matrix& dhead = side.dhead;
  const tileloss_dtype made = made_of(dhead, p);
  const bool is_across = lies_across(dhead);
  const std::int64_t width = dhead.cols;
  std::byte* const sums = side.pieces.dhead;
  const Operand dz = {dlogits_at(chunk), dlogits_stride(chunk), false}, hidden = {side.pieces.hidden, side.pieces.stride, false};
  Product product = {chunk.columns, width, p.rows, dz, hidden, sums, row_stride_of(width), false};
  AnyMatrix to = from(any(dhead), chunk.first);
  if (is_across) {
    product = {width, chunk.columns, p.rows, hidden, dz, sums, cut_.chunk_columns, false};
    to = transposed(to);
  }
  product.left.is_across = true;
  // Straight there, if that is possible.
  const bool is_there = p.linear.accumulate == 0 && p.rows > 0 && !is_copied(dhead, made);
  if (is_there) product.to = to.data, product.to_stride = to.row_stride;
  multiply(queue, algorithm_of(chunk, side.algorithms.dhead), product, pieces_.scratch);
  if (is_there) return;
  visit_compute(made == TILELOSS_BFLOAT16, [&]<class T>(T /*format*/) {
    queue.launch(store_rows<T>, product.rows, threads_for(product.columns), rows_at<T>(sums, 0, product.to_stride), to,
                 product.columns, static_cast<const std::int64_t*>(nullptr), p.linear.accumulate != 0);
  });
}

// Classes that are none have the gradient 0.
void HeadSweeps::clear_padding(Queue& queue) const {
  const Problem& p = *problem_;
  const tileloss_args& a = p.args;
  const std::int64_t padding = p.total_columns - p.columns;
  for (const Side& side : sides_) {
    const tileloss_matrix& dhead = side.dhead;
    if (present(dhead))
      queue.launch(store_rows<float>, padding, threads_for(dhead.cols), Rows<float>(), from(any(dhead), p.columns), dhead.cols,
                   static_cast<const std::int64_t*>(nullptr), false);
  }
  if (present(a.dbias)) launch_each(queue, padding, StoreBias{nullptr, a.dbias, p.columns, false});
}

}  // namespace tileloss::impl::cuda
