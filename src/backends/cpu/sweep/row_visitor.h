// What the drivers call for a row, between its sweeps.
#pragma once

#include <cstdint>
#include <optional>

#include "core/row_coefficients.h"
#include "core/target.h"

namespace tileloss::impl::cpu {

// Called for every row, by any thread, in any order.
class RowVisitor {
 public:
  virtual ~RowVisitor() = default;
  virtual void ignored(std::int64_t row) = 0;
  // What earlier sweeps have found of the row, those over the vocabulary's other shards included; none: this sweep finds it.
  virtual std::optional<TargetStats> known(std::int64_t row) const = 0;
  // The state that a forward sweep has found of a row compared with its label, or with several, and over which classes.
  virtual void swept(std::int64_t row, const RowState& state, const RowClasses& classes, const SeveralLabels& labels) = 0;
  // The row stage before the target sweep, for its coefficients; writes nothing.
  virtual RowResult before_target_sweep(std::int64_t row, const TargetStats& stats) const = 0;
  // The row stage, and the outputs, once.
  virtual RowResult visit(std::int64_t row, const TargetStats& stats) = 0;
  // Of rows with several labels: a slot's column, kLabelElsewhere where it is empty or its label is not allowed or on another
  // shard, and the upstream gradient of its logp.
  virtual std::int64_t label_column(std::int64_t row, std::int64_t k) const = 0;
  virtual double logp_grad(std::int64_t row, std::int64_t k) const = 0;
  // Once its gradient is written, while it is in cache.
  virtual void finished(std::int64_t row) { static_cast<void>(row); }
};

}  // namespace tileloss::impl::cpu
