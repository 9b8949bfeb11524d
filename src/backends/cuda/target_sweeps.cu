// What rows are held against other than labels: CudaDevice's part of it.
#include "backends/cuda/cuda_device.h"
#include "backends/cuda/target_backward.h"

namespace tileloss::impl::cuda {
namespace {

double softcap_of_teacher(const Problem& p) {
  return p.loss->target() == TargetKind::kLogits ? p.loss->info.teacher_options(p.options.data()).softcap : 0;
}

}  // namespace

void CudaDevice::make_target_transforms(const Verdict& verdict) {
  const Problem& p = *problem_;
  if (arrays_.teacher_transform != nullptr) {
    const TeacherOptions teacher = p.loss->info.teacher_options(p.options.data());
    each(1, MakeTransform{teacher.logit_scale, teacher.softcap, teacher.temperature, p.logit.temperature, "teacher_temperature",
                          arrays_.teacher_transform, verdict});
  }
  if (arrays_.label_transform != nullptr) {
    each(1, MakeTransform{p.logit.logit_scale, p.logit.softcap, p.loss->info.label_temperature(p.options.data()),
                          p.logit.temperature, "label_temperature", arrays_.label_transform, verdict});
  }
}

TargetJob CudaDevice::target_job(const device::RowArrays& rows) const {
  const Problem& p = *problem_;
  TargetJob target;
  target.own = job(rows);
  target.kind = p.loss->target();
  const tileloss_matrix& other = target.kind == TargetKind::kLogits ? p.args.teacher_logits : p.args.target_probs;
  target.other = row_matrix(other, p.args.row_groups.rows, p.args.row_groups.teacher_logits_stride);
  target.other_dtype = other.dtype;
  target.teacher_transform = arrays_.teacher_transform;
  target.label_transform = arrays_.label_transform;
  target.largest = arrays_.largest;
  target.teacher_largest = arrays_.teacher_largest;
  target.known = arrays_.known;
  target.options = p.loss->info.make(make_context(p))->target_options();
  target.classes = p.classes;
  target.chooses_shift =
      target.kind == TargetKind::kLogits && has_shift(target.options.divergence.kind) && p.needs_backward && !p.has_pair_state;
  return target;
}

void CudaDevice::forward_target(const device::RowArrays& rows) {
  const Problem& p = *problem_;
  const TargetJob target = target_job(rows);
  const auto sweep = [&](const SweepJob& side, bool is_capped) {
    launch_forward(queue_, p, p.rows, row_cut_.threads, side, is_capped);
  };
  const bool has_softcap = p.logit.softcap > 0, teacher_has_softcap = softcap_of_teacher(p) > 0;
  if (!p.has_pair_state) {
    SweepJob own = target.own;
    own.largest = arrays_.largest;
    if (target.chooses_shift) own.sums |= kArgmax;
    sweep(own, has_softcap);
    if (arrays_.teacher_states != nullptr) {
      SweepJob teacher = target.own;
      teacher.logits = target.other;
      teacher.transform = arrays_.teacher_transform;
      teacher.rows.states = arrays_.teacher_states;
      teacher.largest = arrays_.teacher_largest;
      sweep(teacher, teacher_has_softcap);
    }
    if (arrays_.label_states != nullptr) {
      SweepJob label = target.own;
      label.transform = arrays_.label_transform;
      label.rows.states = arrays_.label_states;
      label.sums = kNoSums;
      sweep(label, has_softcap);
    }
    const SweptSide own_side = {target.own.logits, p.storage, arrays_.transform, rows.states, arrays_.largest};
    const SweptSide teacher_side = {target.other, p.storage, arrays_.teacher_transform, arrays_.teacher_states,
                                    arrays_.teacher_largest};
    const SweptSide label_side = {target.own.logits, p.storage, arrays_.label_transform, arrays_.label_states, arrays_.largest};
    each(p.rows, MakeStats{rows, own_side, teacher_side, label_side});
  }
  visit_kernel(p.storage, !has_softcap && !teacher_has_softcap, [&]<class T>(T /*format*/, auto is_plain) {
    if (target.kind == TargetKind::kColumns) {
      queue_.launch(look_at_others<T, is_plain>, p.rows, row_cut_.threads, target.own, p.args.teacher_ids, arrays_.known);
    } else {
      queue_.launch(look_at_rows<T, is_plain>, p.rows, row_cut_.threads, target);
    }
  });
  if (target.kind == TargetKind::kColumns) {
    each(p.rows, Diverge{rows, target.own.logits, p.storage, p.args.teacher_ids, p.args.teacher_logprobs, arrays_.transform,
                         target.options, arrays_.known_columns, arrays_.known});
  }
}

void CudaDevice::backward_target(const device::RowArrays& rows) {
  const Problem& p = *problem_;
  const bool is_plain = p.logit.softcap == 0 && softcap_of_teacher(p) == 0;
  visit_kernel(p.storage, is_plain, [&]<class T>(T /*format*/, auto is_plain_kernel) {
    queue_.launch(target_backward_rows<T, is_plain_kernel>, p.rows, row_cut_.threads, target_job(rows));
  });
}

void CudaDevice::check_known_columns(const device::RowArrays& rows, const Verdict& verdict) {
  const Problem& p = *problem_;
  if (p.loss->target() != TargetKind::kColumns) return;
  const tileloss_matrix &ids = p.args.teacher_ids, &logprobs = p.args.teacher_logprobs;
  queue_.launch(check_entries<tileloss_matrix>, p.rows, threads_for(ids.cols), rows, ids, logprobs, p.columns);
  find(p.rows, HasBadEntry{rows}, ReportEntry{ids, logprobs, p.columns, verdict});
}

}  // namespace tileloss::impl::cuda
