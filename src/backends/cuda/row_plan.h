// How kernels take a row of logits: part of a plan.
#pragma once

#include "backends/problem.h"

namespace tileloss::impl::cuda {

struct RowCut {
  std::int16_t threads;         // of a block
  std::int16_t blocks;          // into whose slices a row is cut, whether they are a cluster or one block sweeps them all
  tileloss_cuda_kernel kernel;  // that a value and gradient take, not auto
};

// As many threads as have some groups of columns each, if there are enough: whole warps.
std::int16_t threads_of_row(std::int64_t columns, tileloss_dtype storage);

// By the columns, their format and the device alone: the fewest of 1, 2, 4 or 8 blocks for which the slices of two rows fit in a
// multiprocessor's shared memory, or else of one. `hint`: as tileloss_cuda_plan_options'. The device is the
// current one.
Status cut_rows(const Problem& problem, tileloss_cuda_kernel hint, RowCut* cut);
// Whether a cut that was stored, or written by hand, can be run.
Status check_cut(const RowCut& cut);
Status check_cut(const Problem& problem, const RowCut& cut);

// Whether the current device, or what a process may have of it, has so many multiprocessors side by side that it could run one
// of the clusters of such a cut. An error is for the launch to report.
bool can_place(const Problem& problem, const RowCut& cut);

// What a block holds of a row.
std::int64_t slice_bytes(std::int64_t columns, tileloss_dtype storage, std::int32_t blocks);

}  // namespace tileloss::impl::cuda
