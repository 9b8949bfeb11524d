// The row stage: the only place that knows a loss. From a row's statistics to its share of the loss and its four coefficients.
#ifndef TILELOSS_CORE_ROW_STAGE_H_
#define TILELOSS_CORE_ROW_STAGE_H_

#include <cstdint>

#include "core/row_coefficients.h"
#include "core/row_stats.h"

namespace tileloss::impl {

struct RowResult {
  double loss = 0;  // this row's share: with a reduction, what is to be summed (weights and denominators applied)
  RowCoefficients coefficients;
};

// The statistics of the used rows, once the forward sweep has seen all of them.
class AllRows {
 public:
  virtual ~AllRows() = default;
  virtual RowStats stats(std::int64_t i) const = 0;
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
  // Whether off the label the gradient is p times one number of the row: prob_logp and uniform are 0, whatever the data. An error
  // of p is then no larger in the gradient.
  virtual bool is_multiple_of_p() const { return false; }
  // Memory that the stage works in, the same for any mask: the context's `scratch`.
  virtual std::int64_t scratch_bytes() const { return 0; }
  // Whether a row's result depends on other rows' statistics: all rows are then swept forward before the first `row`, and
  // `couple` is called in between.
  virtual bool couples_rows() const { return false; }

  // After all labels were validated, before any row: denominators.
  virtual void prepare() {}
  virtual void couple(const AllRows& rows) { static_cast<void>(rows); }
  virtual RowResult row(std::int64_t i, const RowStats& stats) const = 0;
  // After the last row: what is reported of all of them.
  virtual void finish() const {}
};

}  // namespace tileloss::impl

#endif  // TILELOSS_CORE_ROW_STAGE_H_
