// What device/device_call.h asks of a device, on a CUDA stream: kernels are queued; nothing waits, allocates or reads device
// memory on the host.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>

#include "backends/cuda/beginning.h"
#include "backends/cuda/linear_sweeps.h"
#include "backends/cuda/pieces.h"
#include "backends/cuda/row_launches.h"
#include "backends/cuda/row_plan.h"
#include "backends/cuda/steps.h"
#include "backends/cuda/target_launches.h"
#include "backends/device/device_call.h"
#include "backends/problem.h"

namespace tileloss::impl::cuda {

// What the device itself keeps of a call there, but for the head's.
struct DeviceArrays {
  LogitTransform* transform;
  CallState* state;
  double* sums_of_blocks;
  TargetArrays target;

  template <class Allocator>
  DeviceArrays(const Problem& p, Allocator& from)
      : transform(from.template allocate<LogitTransform>(1)),
        state(from.template allocate<CallState>(1)),
        sums_of_blocks(from.template allocate<double>(SumParts::kMostBlocks)),
        target(p, from) {}
};

class CudaDevice {
 public:
  // `owned`: the workspace, where it is the call's own; `zeroed_bytes` of it are all that it takes but for the head's. `cut`,
  // `algorithms`: of an LM head.
  CudaDevice(const Problem& problem, const RowCut& rows, const HeadCut& cut, const HeadAlgorithms& algorithms, DeviceGuard guard,
             std::byte* workspace, std::int64_t zeroed_bytes, StreamMemory owned, cudaStream_t stream, Report* report)
      : problem_(&problem),
        row_cut_(rows),
        guard_(std::move(guard)),
        owned_(std::move(owned)),
        pieces_(workspace),
        queue_(stream),
        report_(report),
        head_pieces_(problem, cut, pieces_),
        arrays_(problem, pieces_) {
    queue_.keep(cudaMemsetAsync(arrays_.transform, 0, static_cast<std::size_t>(zeroed_bytes), stream), "the workspace");
    if (problem.loss->needs_target_sweep()) target_.emplace(problem, arrays_.transform, arrays_.target, rows.threads);
    if (has_head(problem)) head_.emplace(problem, cut, head_pieces_, algorithms, arrays_.transform, target_, rows, sums());
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
    return pieces_.allocate<T>(count);
  }
  template <class Step>
  void each(std::int64_t count, const Step& step) {
    launch_each(queue_, count, step);
  }
  template <class Term, class Take>
  void sum(std::int64_t count, const Term& term, const Take& take) {
    each_then_sum(count, NoStep{}, term, take);
  }
  template <class Step, class Term, class Take>
  void each_then_sum(std::int64_t count, const Step& step, const Term& term, const Take& take) {
    launch_each_then_sum(queue_, count, step, term, take, sums());
  }
  void sort(double* values, std::int64_t count) {
    queue_.launch(sort_ascending<double>, 1, threads_for(count / 2), values, count);
  }
  // take(the first i for which test(i)), if there is any.
  template <class Test, class Take>
  void find(std::int64_t count, const Test& test, const Take& take) {
    queue_.launch(find_first<Test, Take>, 1, threads_for(count), test, take, count);
  }
  template <class Loss>
  void begin(Loss* at, const Loss& loss, const LabelColumns& labels, const device::RowArrays& rows) {
    Beginning all = beginning(labels, rows);
    all.set_loss(at, loss);
    const std::int64_t blocks = (problem_->rows + kThreadsOfBeginning - 1) / kThreadsOfBeginning;
    queue_.launch(begin_call<Beginning>, std::max<std::int64_t>(blocks, 1), kThreadsOfBeginning, all);
    count_classes(rows);
    find_labels(labels, rows);
    check_known_columns(rows);
  }
  void forward(const device::RowArrays& rows);
  void find_sums(const device::RowArrays& rows);
  void backward(const device::RowArrays& rows, const RowStates& states);
  bool holds_rows() const { return row_cut_.kernel == TILELOSS_CUDA_KERNEL_CLUSTER; }
  template <class Loss>
  void whole_rows(const device::RowArrays& rows, const device::CoefficientsOf<Loss>& coefficients) {
    if constexpr (kHasWholeRows<Loss>) launch_whole(queue_, *problem_, row_cut_.threads, job(rows), coefficients);
  }
  Status done() const { return queue_.status(); }

 private:
  static int threads_for(std::int64_t count) {
    return static_cast<int>(std::clamp<std::int64_t>((count + kWarp - 1) / kWarp * kWarp, kWarp, kMaxThreads));
  }
  SumParts sums() const { return {arrays_.sums_of_blocks, &arrays_.state->blocks_of_sum}; }
  SweepJob job(const device::RowArrays& rows) const;
  TargetPart all_rows(const device::RowArrays& rows) const;
  Verdict verdict() const { return {report_, arrays_.state}; }
  Beginning beginning(const LabelColumns& labels, const device::RowArrays& rows) const;
  void count_classes(const device::RowArrays& rows);
  // Of rows with several.
  void find_labels(const LabelColumns& labels, const device::RowArrays& rows);
  // Of rows whose target is not labels: target_sweeps.cu.
  void add_target_transforms(Beginning& all) const;
  void check_known_columns(const device::RowArrays& rows);

  const Problem* problem_;
  RowCut row_cut_;
  DeviceGuard guard_;  // outlives what is given back
  StreamMemory owned_;
  Pieces pieces_;
  Queue queue_;
  Report* report_;
  HeadPieces head_pieces_;
  DeviceArrays arrays_;
  std::optional<TargetSweeps> target_;
  std::optional<HeadSweeps> head_;
};

}  // namespace tileloss::impl::cuda
