// A finished gradient times a number that lies on the device.
#pragma once

#include "backends/cuda/device_api.h"
#include "backends/cuda/runtime.h"
#include "losses/inputs.h"

namespace tileloss::impl::cuda {

inline constexpr int kScaleThreads = 256, kScaleBlocks = 1024;  // some 2000 threads of each multiprocessor: blocks take turns
// What a block takes of a row at a time: the groups that each thread has under way at once.
template <class T>
inline constexpr std::int64_t kScalePiece = std::int64_t{4} * kScaleThreads* Group<T>::kCount;

// Nothing but the factor is read where that is 1.
template <class T>
__global__ void __launch_bounds__(kScaleThreads)
    scale_rows(T* data, std::int64_t row_stride, std::int64_t columns, std::int64_t pieces_of_row, std::int64_t pieces,
               const float* factor) {
  begin_kernel();
  constexpr int kCount = Group<T>::kCount;
  constexpr std::int64_t kPiece = kScalePiece<T>;
  const float number = *factor;
  if (number == 1) return;
  const auto scaled = [&](Group<T> group) {
#pragma unroll
    for (float& value : group.values) value *= number;
    return group;
  };
  for (std::int64_t piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
    const std::int64_t first = piece % pieces_of_row * kPiece, left = columns - first;
    T* const at = data + piece / pieces_of_row * row_stride + first;
    for_each_group(
        at, left < kPiece ? left : kPiece, is_aligned_to_16(at),
        [&](int g, const Group<T>& group) { scaled(group).store(at + std::int64_t{g} * kCount); },
        [&](int g, const Group<T>& group, int count) { scaled(group).store_some(at + std::int64_t{g} * kCount, count); });
  }
}

inline void launch_scale(Queue& queue, const tileloss_matrix& gradient, const float* factor) {
  visit_format(gradient.dtype, [&]<class T>(T /*format*/) {
    const std::int64_t of_row = (gradient.cols + kScalePiece<T> - 1) / kScalePiece<T>, pieces = gradient.rows * of_row;
    queue.launch(scale_rows<T>, pieces < kScaleBlocks ? pieces : kScaleBlocks, kScaleThreads, static_cast<T*>(gradient.data),
                 gradient.row_stride, gradient.cols, of_row, pieces, factor);
  });
}

}  // namespace tileloss::impl::cuda
