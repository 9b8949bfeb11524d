#include "backends/cuda/cuda_device.h"
#include "backends/cuda/row_whole.h"

namespace tileloss::impl::cuda {

namespace {

// use(kernel, is_plain_backward)
template <class Loss, class Use>
void with_kernel(const Problem& p, Use&& use) {
  const bool is_plain_backward = p.is_multiple_of_p && p.logit.softcap == 0;
  visit_kernel(p.storage, p.sums == kNoSums && is_plain_backward, is_masked(p),
               [&]<class T>(T /*format*/, auto is_plain, auto may_be_masked) {
                 use(whole_rows<T, is_plain, may_be_masked, device::CoefficientsOf<Loss>>, is_plain_backward);
               });
}

}  // namespace

template <class Loss>
void launch_whole(Queue& queue, const Problem& p, int threads, const SweepJob& job,
                  const device::CoefficientsOf<Loss>& coefficients) {
  with_kernel<Loss>(p, [&](auto kernel, bool is_plain_backward) {
    queue.launch_clusters(kernel, p.rows, job.slices, threads, slice_bytes(p.columns, p.storage, job.slices), job, coefficients,
                          is_plain_backward);
  });
}

template void launch_whole(Queue&, const Problem&, int, const SweepJob&, const device::CoefficientsOf<CrossEntropy>&);
template void launch_whole(Queue&, const Problem&, int, const SweepJob&, const device::CoefficientsOf<PolicyLoss>&);

bool can_place(const Problem& p, const RowCut& cut) {
  const ApartFromCapture apart;  // a kernel is loaded when it is first asked about
  int clusters = 1;
  visit_loss(p.loss->info.name, [&]<class Loss>() {
    if constexpr (kHasWholeRows<Loss>) {
      with_kernel<Loss>(p, [&](auto kernel, bool /*is_plain_backward*/) {
        const Launch launch(1, cut.blocks, cut.threads, slice_bytes(p.columns, p.storage, cut.blocks), nullptr);
        cudaError_t error = allow_shared_memory(reinterpret_cast<const void*>(kernel));
        if (error == cudaSuccess) error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch.config());
        if (error != cudaSuccess) cudaGetLastError(), clusters = 1;
      });
    }
  });
  return clusters > 0;
}

}  // namespace tileloss::impl::cuda
