// The row stage: the only place that knows a loss. From a row's statistics to its share of the loss and its four coefficients.
#ifndef TILELOSS_CORE_ROW_STAGE_H_
#define TILELOSS_CORE_ROW_STAGE_H_

#include <cstdint>

#include "core/row_coefficients.h"
#include "core/row_stats.h"

namespace tileloss {

struct RowResult {
  double loss = 0;  // this row's share: with a reduction, what is to be summed (weights and denominators applied)
  RowCoefficients coefficients;
};

// One object a call. `row` is called from several threads at once, once for every used row.
class RowStage {
 public:
  RowStage() = default;
  RowStage(const RowStage&) = delete;
  RowStage& operator=(const RowStage&) = delete;
  virtual ~RowStage() = default;

  // Which sums the loss's value needs, and which its coefficients.
  virtual std::uint32_t forward_sums() const { return kNoSums; }
  virtual std::uint32_t backward_sums() const { return kNoSums; }
  // After all labels were validated, before any row: denominators.
  virtual void prepare() {}
  virtual RowResult row(std::int64_t i, const RowStats& stats) const = 0;
};

}  // namespace tileloss

#endif  // TILELOSS_CORE_ROW_STAGE_H_
