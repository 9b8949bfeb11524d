// A finished gradient times a number, where the host can read and write.
#pragma once

#include <algorithm>
#include <cstdint>

#include "losses/inputs.h"

namespace tileloss::impl::host {

// Pieces of its rows, which may be scaled in any order: elements of one.
inline constexpr std::int64_t kPiece = std::int64_t{1} << 16;

inline std::int64_t pieces_of_row(const tileloss_matrix& m) { return (m.cols + kPiece - 1) / kPiece; }

inline std::int64_t count_pieces(const tileloss_matrix& gradient) { return gradient.rows * pieces_of_row(gradient); }

inline void scale_piece(const tileloss_matrix& gradient, std::int64_t piece, float factor) {
  const std::int64_t row = piece / pieces_of_row(gradient), first = piece % pieces_of_row(gradient) * kPiece;
  visit_format(gradient.dtype, [&](auto format) {
    using T = decltype(format);
    T* const values = static_cast<T*>(gradient.data) + row * gradient.row_stride + first;
    const std::int64_t count = std::min(kPiece, gradient.cols - first);
    for (std::int64_t j = 0; j < count; ++j) values[j] = from_float<T>(to_float(values[j]) * factor);
  });
}

}  // namespace tileloss::impl::host
