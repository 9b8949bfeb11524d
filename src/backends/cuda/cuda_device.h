// What device/device_call.h asks of a device, on a CUDA stream: kernels are queued; nothing waits, allocates or reads device
// memory on the host.
#ifndef TILELOSS_BACKENDS_CUDA_CUDA_DEVICE_H_
#define TILELOSS_BACKENDS_CUDA_CUDA_DEVICE_H_

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>

#include "backends/cuda/checks.h"
#include "backends/cuda/linear_sweeps.h"
#include "backends/cuda/pieces.h"
#include "backends/cuda/row_launches.h"
#include "backends/cuda/steps.h"
#include "backends/device/device_call.h"
#include "backends/problem.h"

namespace tileloss::impl::cuda {

// What the device itself keeps of a call there, but for the head's.
struct DeviceArrays {
  LogitTransform* transform;
  std::int32_t* is_wrong;

  template <class Allocator>
  DeviceArrays(const Problem& /*problem*/, Allocator& from)
      : transform(from.template allocate<LogitTransform>(1)), is_wrong(from.template allocate<std::int32_t>(1)) {}
};

class CudaDevice {
 public:
  // `threads`: of a block that sweeps a row. `is_owned`: the workspace is given back at the end of what is queued. `cut`,
  // `algorithms`: of an LM head.
  CudaDevice(const Problem& problem, int threads, const HeadCut& cut, const HeadAlgorithms& algorithms, DeviceGuard guard,
             std::byte* workspace, bool is_owned, cudaStream_t stream, Report* report)
      : problem_(&problem),
        threads_(threads),
        guard_(std::move(guard)),
        workspace_(workspace),
        is_owned_(is_owned),
        pieces_(workspace),
        queue_(stream),
        report_(report),
        arrays_(problem, *this) {
    if (has_head(problem))
      head_.emplace(problem, cut, HeadPieces(problem, cut, pieces_), algorithms, arrays_.transform, threads);
  }

  // Of all that a call takes, its loss included, but for the head's.
  template <class Loss>
  static std::int64_t workspace_bytes(const Problem& p) {
    Pieces pieces;
    DeviceArrays(p, pieces);
    device::CallMemory<Loss>(p, pieces);
    return pieces.bytes();
  }

  const Problem& problem() const { return *problem_; }

  template <class T>
  T* allocate(std::int64_t count) {
    T* const at = pieces_.allocate<T>(count);
    if (count > 0)
      queue_.keep(cudaMemsetAsync(at, 0, static_cast<std::size_t>(count) * sizeof(T), queue_.stream()), "the workspace");
    return at;
  }
  template <class Step>
  void each(std::int64_t count, const Step& step) {
    launch_each(queue_, count, step);
  }
  template <class Term, class Take>
  void sum(std::int64_t count, const Term& term, const Take& take) {
    queue_.launch(sum_terms<Term, Take>, 1, threads_for(count), term, take, count);
  }
  void sort(double* values, std::int64_t count) {
    queue_.launch(sort_ascending<double>, 1, threads_for(count / 2), values, count);
  }
  // take(the first i for which test(i)), if there is any.
  template <class Test, class Take>
  void find(std::int64_t count, const Test& test, const Take& take) {
    queue_.launch(find_first<Test, Take>, 1, threads_for(count), test, take, count);
  }
  template <class T>
  void place(T* at, const T& value) {
    queue_.launch(place_value<T>, 1, 1, at, value);
  }

  void check(const device::RowArrays& rows);
  void forward(const device::RowArrays& rows);
  void backward(const device::RowArrays& rows, const RowStates& states);
  Status done() {
    if (is_owned_) queue_.keep(cudaFreeAsync(workspace_, queue_.stream()), "the workspace");
    return queue_.status();
  }

 private:
  // Its number of threads decides the order of a sum, and is the count's alone.
  static int threads_for(std::int64_t count) {
    return static_cast<int>(std::clamp<std::int64_t>((count + kWarp - 1) / kWarp * kWarp, kWarp, kMaxThreads));
  }
  SweepJob job(const device::RowArrays& rows) const;

  const Problem* problem_;
  int threads_;
  DeviceGuard guard_;
  std::byte* workspace_;
  bool is_owned_;
  Pieces pieces_;
  Queue queue_;
  Report* report_;
  DeviceArrays arrays_;
  std::optional<HeadSweeps> head_;
};

}  // namespace tileloss::impl::cuda

#endif  // TILELOSS_BACKENDS_CUDA_CUDA_DEVICE_H_
