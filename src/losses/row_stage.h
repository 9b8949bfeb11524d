// The row stage on the host: the one virtual face of a loss. What a loss computes is a plain class (LossInfo::make says which),
// whose row() runs on devices as well; HostStage gives it this face.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

#include "core/row_coefficients.h"
#include "core/row_stats.h"
#include "core/target.h"
#include "losses/row_arrays.h"
#include "losses/steps.h"

namespace tileloss::impl {

// One object a call. `row` is called from several threads at once, for every used row.
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
  virtual void couple(const RowStates& rows) { static_cast<void>(rows); }
  // Of a target that is not labels it may be asked for the coefficients before the target sweep, whose sums are 0 then.
  virtual RowResult row(std::int64_t i, const TargetStats& stats) const = 0;
  virtual TargetOptions target_options() const { return {}; }
  // After the last row: what is reported of all of them.
  virtual void finish() {}
};

struct LossContext;

// A loss is a class that is made of a LossContext and copied to where its rows are computed:
//   RowResult row(i, stats) const   a row's share of the loss and its coefficients; for host and device
//   TargetOptions target_options() const   of a loss whose target is not labels
//   prepare(steps), couple(steps, rows), finish(steps) const
//                                   on the host: which steps run on that copy (steps.h); they alone change it and read data
// and, on the host, those of RowStage's other functions that it needs.
template <class Loss>
class HostStage final : public RowStage {
 public:
  explicit HostStage(const LossContext& context) : loss_(context) {}

  std::uint32_t forward_sums() const override {
    if constexpr (requires { loss_.forward_sums(); }) return loss_.forward_sums();
    return kNoSums;
  }
  std::uint32_t backward_sums() const override {
    if constexpr (requires { loss_.backward_sums(); }) return loss_.backward_sums();
    return kNoSums;
  }
  bool is_multiple_of_p() const override {
    if constexpr (requires { loss_.is_multiple_of_p(); }) return loss_.is_multiple_of_p();
    return false;
  }
  std::int64_t scratch_bytes() const override {
    if constexpr (requires { loss_.scratch_bytes(); }) return loss_.scratch_bytes();
    return 0;
  }
  bool couples_rows() const override {
    if constexpr (requires { loss_.couples_rows(); }) return loss_.couples_rows();
    return false;
  }
  void prepare() override {
    HostSteps steps(loss_);
    if constexpr (requires { loss_.prepare(steps); }) loss_.prepare(steps);
  }
  void couple(const RowStates& rows) override {
    HostSteps steps(loss_);
    if constexpr (requires { loss_.couple(steps, rows); }) loss_.couple(steps, rows);
  }
  RowResult row(std::int64_t i, const TargetStats& stats) const override { return loss_.row(i, stats); }
  TargetOptions target_options() const override {
    if constexpr (requires { loss_.target_options(); }) return loss_.target_options();
    return {};
  }
  void finish() override {
    HostSteps steps(loss_);
    if constexpr (requires { loss_.finish(steps); }) loss_.finish(steps);
  }

 private:
  static_assert(std::is_trivially_copyable_v<Loss>, "a loss is copied to devices");
  Loss loss_;
};

template <class Loss>
std::unique_ptr<RowStage> make_stage(const LossContext& context) {
  return std::make_unique<HostStage<Loss>>(context);
}

}  // namespace tileloss::impl
