// From per-token losses to one: each token's weight. n_b tokens in use of its sequence, M of all, B sequences, empty ones
// included. Counts are floored at 1; what the caller gives (num_items) is not, and 0 of it gives 0.
#pragma once

#include <tileloss/tileloss.h>

#include <algorithm>
#include <cmath>

#include "core/host_device.h"

namespace tileloss::impl {

// generated: enums aggregation
enum class Aggregation { kSeqMeanTokenMean, kTokenMean, kSeqMeanTokenSumNorm, kSeqMeanTokenSum, kSum, kNone };
// end of generated

struct AggregationCounts {
  double sequences = 0;  // B
  double tokens = 0;     // M
  double max_length = 0;
  double num_items = 0;  // NaN: not given
};

TILELOSS_HOST_DEVICE inline double token_weight(tileloss_aggregation aggregation, const AggregationCounts& c,
                                                double sequence_tokens) {
  const double sequences = std::max(c.sequences, 1.0);
  const auto over_items = [&c](double otherwise) {
    if (std::isnan(c.num_items)) return 1 / otherwise;
    return c.num_items == 0 ? 0 : 1 / c.num_items;
  };
  switch (static_cast<Aggregation>(aggregation)) {
    case Aggregation::kSeqMeanTokenMean: return 1 / (sequences * std::max(sequence_tokens, 1.0));
    case Aggregation::kTokenMean: return over_items(std::max(c.tokens, 1.0));
    case Aggregation::kSeqMeanTokenSumNorm: return 1 / std::max(c.sequences * c.max_length, 1.0);
    case Aggregation::kSeqMeanTokenSum: return 1 / sequences;
    case Aggregation::kSum: return over_items(1);
    case Aggregation::kNone: break;
  }
  return 1;
}

}  // namespace tileloss::impl
