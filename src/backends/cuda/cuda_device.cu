#include <cstring>

#include "backends/cuda/count_allowed.h"
#include "backends/cuda/cuda_device.h"
#include "backends/cuda/label_slots.h"
#include "backends/cuda/row_backward.h"

namespace tileloss::impl::cuda {

SweepJob CudaDevice::job(const device::RowArrays& rows) const {
  const Problem& p = *problem_;
  SweepJob job;
  job.logits = row_matrix(p.args.logits, p.args.row_groups.rows, p.args.row_groups.logits_stride);
  job.dlogits = row_matrix(p.args.dlogits, p.args.row_groups.rows, p.args.row_groups.dlogits_stride);
  job.columns = p.columns;
  job.total_columns = p.args.dlogits.cols;
  job.first_column = p.logit.vocab_start;
  job.slices = row_cut_.blocks;
  job.sums = p.sums;
  job.transform = arrays_.transform;
  job.class_weights = class_weights(p);
  job.rows = rows;
  job.allowed = allowed_rows(p);
  return job;
}

TargetPart CudaDevice::all_rows(const device::RowArrays& rows) const {
  const Problem& p = *problem_;
  const tileloss_row_groups& groups = p.args.row_groups;
  return {job(rows), row_matrix(p.args.teacher_logits, groups.rows, groups.teacher_logits_stride), 0, p.rows};
}

Beginning CudaDevice::beginning(const LabelColumns& labels, const device::RowArrays& rows) const {
  const Problem& p = *problem_;
  Beginning all = {labels, rows, p.rows, p.logit.ignore_index, verdict(), {}, {}, {}, {}, nullptr, 0};
  for (tileloss_field field : p.loss->fields) {
    if (field.type != TILELOSS_FIELD_SCALAR) continue;
    tileloss_scalar scalar;
    std::memcpy(&scalar, p.options.data() + field.offset, sizeof scalar);
    if (scalar.pointer == nullptr) continue;
    const char* if_missing = nullptr;
    visit_loss(p.loss->info.name, [&]<class Loss>() {
      if constexpr (requires { &Loss::limit_number; })
        if_missing = Loss::limit_number(*reinterpret_cast<const typename Loss::Options*>(p.options.data()), field);
    });
    all.numbers.add({field, scalar, if_missing});
  }
  const bool on_logprob = p.logit.temperature_on == TILELOSS_TEMPERATURE_ON_LOGPROB;
  const tileloss_scalar temperature = on_logprob ? tileloss_scalar{1, nullptr} : p.logit.temperature;
  all.transforms.add({p.logit.logit_scale, p.logit.softcap, temperature, temperature, "temperature", arrays_.transform});
  add_target_transforms(all);
  if (p.args.sequence_offsets.dtype != TILELOSS_NONE) all.offsets = IntegerInput(p.args.sequence_offsets);
  return all;
}

void CudaDevice::count_classes(const device::RowArrays& rows) {
  const Problem& p = *problem_;
  if (rows.classes == nullptr) return;
  const bool sums_weights = present(p.args.class_weights) && (!p.is_multiple_of_p || p.row_state.allowed_weight != nullptr);
  queue_.launch(count_allowed, p.rows, threads_for(p.columns / 32), job(rows), sums_weights);
}

void CudaDevice::find_labels(const LabelColumns& labels, const device::RowArrays& rows) {
  const Problem& p = *problem_;
  if (rows.slots.count == 0) return;
  if (head_) {
    head_->multiply_labels(queue_, labels, rows);
  } else {
    launch_each(queue_, p.rows * rows.slots.count, ReadLabelLogit{labels, rows, job(rows).logits, p.storage});
  }
  const bool are_known = !p.needs_forward && p.row_state.label_logits != nullptr;
  launch_each(queue_, p.rows, FindLikeliest{labels, rows, arrays_.transform, are_known ? p.row_state : tileloss_row_state{}});
}

void CudaDevice::forward(const device::RowArrays& rows) {
  if (head_) return head_->forward(queue_, rows);
  if (target_) return target_->forward(queue_, all_rows(rows));
  launch_forward(queue_, *problem_, problem_->rows, row_cut_.threads, job(rows), problem_->logit.softcap > 0);
}

void CudaDevice::backward(const device::RowArrays& rows, const RowStates& states) {
  if (head_) return head_->backward(queue_, rows, states);
  if (target_) return target_->backward(queue_, all_rows(rows));
  const SweepJob all = job(rows);
  launch_backward(queue_, *problem_, problem_->rows, row_cut_.threads, all, states);
  if (rows.slots.count == 0) return;
  launch_each(queue_, problem_->rows * rows.slots.count,
              WriteLabelGradient{make_context(*problem_), LabelColumns(*problem_), rows, states, arrays_.transform, 0, 0,
                                 problem_->columns, all.dlogits, problem_->storage});
}

void CudaDevice::find_sums(const device::RowArrays& rows) {
  head_ ? head_->find_sums(queue_, rows) : target_->find_sums(queue_, all_rows(rows));
}

void launch_forward(Queue& queue, const Problem& p, std::int64_t rows, int threads, const SweepJob& job, bool has_softcap) {
  visit_kernel(p.storage, job.sums == kNoSums && !has_softcap, job.allowed.words != nullptr,
               [&]<class T>(T /*format*/, auto is_plain, auto may_be_masked) {
                 queue.launch(forward_rows<T, is_plain, may_be_masked>, rows, threads, job);
               });
}

void launch_backward(Queue& queue, const Problem& p, std::int64_t rows, int threads, const SweepJob& job,
                     const RowStates& states) {
  visit_kernel(p.storage, p.is_multiple_of_p && p.logit.softcap == 0, job.allowed.words != nullptr,
               [&]<class T>(T /*format*/, auto is_plain, auto may_be_masked) {
                 queue.launch(backward_rows<T, is_plain, may_be_masked>, rows, threads, job, states);
               });
}

}  // namespace tileloss::impl::cuda
