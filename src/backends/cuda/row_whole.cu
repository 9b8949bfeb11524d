#include "backends/cuda/cuda_device.h"
#include "backends/cuda/row_whole.h"

namespace tileloss::impl::cuda {

template <class Loss>
void launch_whole(Queue& queue, const Problem& p, int threads, const SweepJob& job, const device::RowStageOf<Loss>& stage) {
  const bool is_plain_backward = p.is_multiple_of_p && p.logit.softcap == 0;
  visit_kernel(p.storage, p.sums == kNoSums && is_plain_backward, [&]<class T>(T /*format*/, auto is_plain) {
    const auto kernel = whole_rows<T, is_plain, device::RowStageOf<Loss>>;
    queue.launch_clusters(kernel, p.rows, job.slices, threads, slice_bytes(p.columns, p.storage, job.slices), job, stage,
                          is_plain_backward);
  });
}

template void launch_whole(Queue&, const Problem&, int, const SweepJob&, const device::RowStageOf<CrossEntropy>&);
template void launch_whole(Queue&, const Problem&, int, const SweepJob&, const device::RowStageOf<PolicyLoss>&);

}  // namespace tileloss::impl::cuda
