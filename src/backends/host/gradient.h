// A finished gradient times a number, where the host can read and write.
#pragma once

#include <tileloss/tileloss.h>

#include <cstdint>

namespace tileloss::impl::host {

// Pieces of its rows, which may be scaled in any order.
std::int64_t count_pieces(const tileloss_matrix& gradient);
void scale_piece(const tileloss_matrix& gradient, std::int64_t piece, float factor);

}  // namespace tileloss::impl::host
