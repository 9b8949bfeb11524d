// What a row's gradient is compared with. The budgets are those of judge/gates/error_metric.h.
#pragma once

#include <cstdint>
#include <span>

#include "oracle/oracle.h"

namespace tileloss::tools {

constexpr double kExpRange = 104.0;  // exp(-104) is 0 in float32: larger distances cost no more

// The magnitude that allows an error of 1 in an output.
constexpr double kMagnitudeOfError = 0x1p22;

// Spans have one entry for each valid column.
struct RowReference {
  std::span<const double> gradient;
  std::span<const double> magnitude;  // see oracle::GradientRow
  std::span<const double> blur;       // see oracle::GradientRow; may be empty
  std::span<const double> z;          // transformed logits
  double max = 0.0;                   // m
  double scale = 0.0;                 // see oracle::GradientRow
  bool transformed = false;
  std::int64_t target = 0;
  std::span<const std::int64_t> labels = {};  // of several labels the columns, in order, the target's too; empty: it is the one
  oracle::Allowed allowed = {};               // outside the gradient must be exactly 0; empty: nowhere
  double others_distance = 0.0;               // mean of m - z over the columns but the target, weighted by p
};

RowReference make_row_reference(const oracle::SoftmaxRow& softmax, const oracle::GradientRow& gradient);

// The mean of m - z over the columns but the label, weighted by p.
double others_distance(const oracle::SoftmaxRow& softmax);

}  // namespace tileloss::tools
