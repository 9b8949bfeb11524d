// What rows are compared with other than labels: CudaDevice's part of it, and its launches.
#include "backends/cuda/cuda_device.h"
#include "backends/cuda/target_backward.h"

namespace tileloss::impl::cuda {
namespace {

double softcap_of_teacher(const Problem& p) {
  return p.loss->target() == TargetKind::kLogits ? p.loss->info.teacher_options(p.options.data()).softcap : 0;
}

// From a row and a column on.
tileloss_matrix from(tileloss_matrix m, std::int64_t row, std::int64_t column = 0) {
  m.data = static_cast<std::byte*>(m.data) + (row * m.row_stride + column * m.col_stride) * element_bytes(m.dtype);
  return m;
}

}  // namespace

void CudaDevice::add_target_transforms(Beginning& all) const {
  const Problem& p = *problem_;
  if (arrays_.target.teacher_transform != nullptr) {
    const TeacherOptions teacher = p.loss->info.teacher_options(p.options.data());
    all.transforms.add({teacher.logit_scale, teacher.softcap, teacher.temperature, p.logit.temperature, "teacher_temperature",
                        arrays_.target.teacher_transform});
  }
  if (arrays_.target.label_transform != nullptr) {
    all.transforms.add({p.logit.logit_scale, p.logit.softcap, p.loss->info.label_temperature(p.options.data()),
                        p.logit.temperature, "label_temperature", arrays_.target.label_transform});
  }
}

void CudaDevice::check_known_columns(const device::RowArrays& rows) {
  const Problem& p = *problem_;
  if (p.loss->target() != TargetKind::kColumns) return;
  const tileloss_matrix &ids = p.args.teacher_ids, &logprobs = p.args.teacher_logprobs;
  queue_.launch(check_entries<tileloss_matrix>, p.rows, threads_for(ids.cols), rows, ids, logprobs, p.columns);
  find(p.rows, HasBadEntry{rows}, ReportEntry{ids, logprobs, p.columns, verdict()});
  each(p.rows, CondemnRow{rows});
}

bool TargetSweeps::is_plain() const { return problem_->logit.softcap == 0 && softcap_of_teacher(*problem_) == 0; }

TargetJob TargetSweeps::job(const TargetPart& part) const {
  const Problem& p = *problem_;
  const auto rows_of_part = [&](auto* array) { return array == nullptr ? nullptr : array + part.begin; };
  TargetJob target;
  target.own = part.own;
  target.kind = p.loss->target();
  target.other = part.teacher;
  if (target.kind == TargetKind::kProbabilities) {
    const tileloss_matrix probs = from(p.args.target_probs, part.begin, part.own.first_column - p.logit.vocab_start);
    target.other = row_matrix(probs, p.args.row_groups.rows, p.args.row_groups.teacher_logits_stride);
    target.other_dtype = probs.dtype;
  }
  target.teacher_transform = arrays_.teacher_transform;
  target.label_transform = arrays_.label_transform;
  target.largest = rows_of_part(arrays_.largest);
  target.teacher_largest = rows_of_part(arrays_.teacher_largest);
  target.known = rows_of_part(arrays_.known);
  target.options = options_;
  target.classes = p.classes;
  if (has_shift(options_.divergence.kind)) target.shifts = rows_of_part(arrays_.shifts);
  return target;
}

void TargetSweeps::forward(Queue& queue, const TargetPart& part) const {
  const TargetJob target = job(part);
  // A label that is given and not allowed is no row without one: its logp is -inf.
  const bool may_lack_labels = !(present(problem_->args.labels) && present(problem_->args.allowed));
  if (target.kind == TargetKind::kProbabilities && may_lack_labels) queue.launch(choose_columns, part.rows, threads_, target);
  make_stats(queue, part, target);
  find_sums(queue, part);
}

void TargetSweeps::find_sums(Queue& queue, const TargetPart& part) const {
  const Problem& p = *problem_;
  const TargetJob target = job(part);
  const tileloss_matrix ids = from(p.args.teacher_ids, part.begin);
  visit_kernel(p.storage, is_plain(), true, [&]<class T>(T /*format*/, auto is_plain_kernel, auto /*may_be_masked*/) {
    if (target.kind == TargetKind::kColumns) {
      queue.launch(sweep_other_columns<T, is_plain_kernel>, part.rows, threads_, target.own, ids, target.known);
    } else {
      queue.launch(sweep_targets<T, is_plain_kernel>, part.rows, threads_, target);
    }
  });
  if (target.kind == TargetKind::kColumns) {
    launch_each(queue, part.rows,
                Diverge{part.own.rows, part.own.logits, p.storage, ids, from(p.args.teacher_logprobs, part.begin), transform_,
                        options_, part.own.allowed, arrays_.known_columns + part.begin * ids.cols, target.known});
  }
}

void TargetSweeps::make_stats(Queue& queue, const TargetPart& part, const TargetJob& target) const {
  const Problem& p = *problem_;
  // Sweeps the logits for the states of a side.
  const auto sweep = [&](const SweptSide& side, SweepJob how, float* largest, double softcap) {
    how.logits = side.logits;
    how.transform = side.transform;
    how.rows.states = side.states;
    how.largest = largest;
    launch_forward(queue, p, part.rows, threads_, how, softcap > 0);
  };
  const auto states_of_part = [&](RowState* states) { return states == nullptr ? nullptr : states + part.begin; };
  const RowMatrix& logits = part.own.logits;
  const SweptSide own = {logits, p.storage, transform_, part.own.rows.states, target.largest};
  const SweptSide teacher = {part.teacher, p.storage, arrays_.teacher_transform, states_of_part(arrays_.teacher_states),
                             target.teacher_largest};
  const SweptSide label = {logits, p.storage, arrays_.label_transform, states_of_part(arrays_.label_states), target.largest};
  SweepJob how = part.own;
  if (target.shifts != nullptr) how.sums |= kArgmax;
  sweep(own, how, target.largest, p.logit.softcap);
  how.sums = part.own.sums;
  if (teacher.states != nullptr) sweep(teacher, how, target.teacher_largest, softcap_of_teacher(p));
  how.sums = kNoSums;
  if (label.states != nullptr) sweep(label, how, nullptr, p.logit.softcap);
  launch_each(queue, part.rows, MakeStats{part.own.rows, own, teacher, label});
}

void TargetSweeps::backward(Queue& queue, const TargetPart& part) const {
  visit_kernel(problem_->storage, is_plain(), true, [&]<class T>(T /*format*/, auto is_plain_kernel, auto /*may_be_masked*/) {
    queue.launch(target_backward_rows<T, is_plain_kernel>, part.rows, threads_, job(part));
  });
}

}  // namespace tileloss::impl::cuda
