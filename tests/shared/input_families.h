// The inputs that have found bugs in kernels of this kind, as lists to loop over.
#pragma once

#include <array>
#include <cstdint>

#include "judge/strict/guard_buffer.h"
#include "oracle/number_formats.h"
#include "support/synthetic.h"

namespace tileloss::test {

using tools::Flush;

// Real vocabularies and the sizes around vectors and tiles.
inline constexpr std::array<std::int64_t, 13> kVocabSizes{1,     2,      15,     17,     127,    1000,  32000,
                                                          50257, 128256, 129920, 151643, 151936, 262144};
// The same bugs at sizes where hundreds of combinations take seconds: one under, at and over vector, unroll and block lengths.
inline constexpr std::array<std::int64_t, 20> kSmallVocabSizes{1,  2,  3,   7,   15,  16,  17,   31,   32,   33,
                                                               63, 64, 127, 129, 255, 257, 1000, 2047, 2048, 2049};
inline constexpr std::array<std::int64_t, 6> kRowCounts{0, 1, 2, 7, 33, 130};
inline constexpr std::array<std::int64_t, 5> kHiddenSizes{1, 7, 33, 64, 1536};
// Row stride = vocab + one of these.
inline constexpr std::array<std::int64_t, 4> kStrideExtras{0, 1, 13, 64};
// Elements by which a buffer's start is moved off the page's alignment.
inline constexpr std::array<std::int64_t, 4> kMisalignments{0, 1, 3, 31};
inline constexpr std::array<oracle::NumberFormat, 3> kFormats{oracle::NumberFormat::kFloat32, oracle::NumberFormat::kBfloat16,
                                                              oracle::NumberFormat::kFloat16};
inline constexpr std::array<Flush, 2> kFlushes{Flush::kRight, Flush::kLeft};

// How the upstream gradient comes: none, one scalar, one per row, per row with a stride, one value for all rows (stride 0).
enum class Upstream { kAbsent, kScalar, kPerRow, kStrided, kBroadcast };
inline constexpr std::array<Upstream, 5> kUpstreams{Upstream::kAbsent, Upstream::kScalar, Upstream::kPerRow, Upstream::kStrided,
                                                    Upstream::kBroadcast};

// The distributions are tools::distribution_names(): common offsets of +-1e4, std 0.01 and 30, spikes at the first, last and
// tile-edge column, confident targets.

}  // namespace tileloss::test
