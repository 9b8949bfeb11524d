// A call on a device with memory and a queue of its own: everything but the sweeps is the same on all of them. Nothing here reads
// what lies on the device; what is to be done there is queued, in order.
//
// A Device has
//   const Problem& problem()            the call's, for as long as anything of it is queued
//   T* allocate<T>(count)               memory of the call's, zeroed in the queue
//   void each(count, step)              step(i) for each i, in any order; steps are plain data
//   void sum(count, term, take)         take(sum of term(i)), in an order that is fixed
//   void each_then_sum(count, step, term, take)     both
//   void sort(double* values, count)    ascending
//   void begin(at, loss, labels, rows)  *at = loss; the rows' label_columns and, if there are any, classes, and what only the
//                                       device can look at: rows that are wrong get kBadLabel, those whose label is not allowed
//                                       kLabelElsewhere; of several labels the slots, and the likeliest's column
//   void forward(rows)                  the rows' states; of a target that is not labels their stats too
//   void find_sums(rows)                of stats that are there but for the sums: these, of these columns
//   void backward(rows, states)         from the rows' results to all gradients
//   bool holds_rows()                   may be missing: whether it takes each row of this call in one go, by
//   void whole_rows(rows, coefficients) ... its forward, the coefficients (CoefficientsOf) and its backward
//   Status done()                       what a call ends with
#pragma once

#include "backends/backend.h"
#include "backends/device/row_kernels.h"
#include "losses/all_losses.h"

namespace tileloss::impl::device {

template <class Device, class Loss>
class DeviceSteps {
 public:
  DeviceSteps(Device& device, Loss* loss) : device_(device), loss_(loss) {}

  template <auto kStep, class... With>
  void each(std::int64_t count, const With&... with) {
    device_.each(count, Step<kStep, Loss, With...>(loss_, with...));
  }
  template <auto kTerm, auto kTake, class... With>
  void sum(std::int64_t count, const With&... with) {
    device_.sum(count, Step<kTerm, Loss, With...>(loss_, with...), Step<kTake, Loss>(loss_));
  }
  void sort(double* values, std::int64_t count) { device_.sort(values, count); }

 private:
  Device& device_;
  Loss* loss_;
};

// What a call keeps on its device, taken from that, or from who counts what it takes.
template <class Loss>
struct CallMemory {
  std::byte* scratch;
  Loss* loss;
  RowArrays rows;

  template <class Allocator>
  CallMemory(const Problem& p, Allocator& from)
      : scratch(from.template allocate<std::byte>(p.stage_bytes)), loss(from.template allocate<Loss>(1)) {
    rows.label_columns = from.template allocate<std::int64_t>(p.rows);
    rows.states = from.template allocate<RowState>(p.rows);
    if (p.loss->needs_target_sweep()) rows.stats = from.template allocate<TargetStats>(p.rows);
    rows.results = from.template allocate<RowResult>(p.rows);
    if (p.has_classes()) rows.classes = from.template allocate<RowClasses>(p.rows);
    if (!p.has_several_labels()) return;
    const std::int64_t count = p.args.labels_per_row;
    float* const z = p.row_state.label_logits;
    rows.slots = {count, from.template allocate<float>(p.rows * count),
                  z != nullptr ? z : from.template allocate<float>(p.rows * count), from.template allocate<std::int64_t>(p.rows)};
  }
};

template <class Device, class Loss>
class DeviceCall final : public Call {
 public:
  explicit DeviceCall(Device device)
      : device_(std::move(device)),
        p_(device_.problem()),
        memory_(p_, device_),
        rows_(memory_.rows),
        on_device_(memory_.loss),
        context_(context_with(memory_.scratch)),
        loss_(context_),
        steps_(device_, on_device_) {}

  Status check() override {
    device_.begin(on_device_, loss_, LabelColumns(p_), rows_);
    return {};
  }
  void prepare() override {
    if constexpr (requires { loss_.prepare(steps_); }) loss_.prepare(steps_);
  }
  void couple() override {
    const RowStates all = states();  // for nvcc, to which no requirement holds that calls a member of this class, or says so
    if constexpr (requires { loss_.couple(steps_, all); }) loss_.couple(steps_, all);
  }
  bool keeps_states() const override {
    if constexpr (requires { device_.holds_rows(); }) return !device_.holds_rows();
    return true;
  }

  Status sweep(std::uint32_t stages) override {
    if constexpr (requires { device_.holds_rows(); }) {
      if (!keeps_states()) {
        CoefficientsOf<Loss> coefficients = {on_device_};
        if constexpr (coefficients.kMayNeedNoStats) coefficients.need_stats = loss_.coefficients_need_stats();
        device_.whole_rows(rows_, coefficients);
        if (p_.has_row_state) device_.each(p_.rows, SaveState{rows_, p_.row_state});
        row_stage();
        return {};
      }
    }
    if ((stages & kForward) != 0) {
      device_.forward(rows_);
      if (p_.has_row_state) device_.each(p_.rows, SaveState{rows_, p_.row_state});
    }
    const bool gives_sums = (stages & kGiveSums) != 0;
    if ((stages & kPairState) != 0) device_.each(p_.rows, LoadStats{rows_, pair_states(p_), !gives_sums});
    if (gives_sums) {
      device_.find_sums(rows_);
      device_.each(p_.rows, GiveSums{rows_, pair_states(p_)});
    }
    if ((stages & kRowStage) != 0) row_stage();
    if ((stages & kBackward) != 0) device_.backward(rows_, states());
    return {};
  }

  Status finish() override {
    if constexpr (requires { loss_.finish(steps_); }) {
      if (writes()) loss_.finish(steps_);
    }
    return device_.done();
  }

 private:
  // With the loss.
  void row_stage() {
    const RowOutput<float> loss(p_.args.loss), none;
    const RowStageOf<Loss> stage = {on_device_, rows_,      states(), {p_.args, context_}, p_.is_per_row ? loss : none,
                                    writes(),   p_.is_shard};
    if (writes() && loss.data != nullptr && !p_.is_per_row) {
      device_.each_then_sum(p_.rows, stage, LossTerm{rows_}, TakeLoss{loss});
    } else {
      device_.each(p_.rows, stage);
    }
  }
  bool writes() const { return p_.pass != TILELOSS_BACKWARD; }
  // Those of this call's forward, unless others have a share in them.
  RowStates states() const {
    const bool are_own = p_.needs_forward && !p_.merges_shards();
    return {are_own ? rows_.states : nullptr, p_.row_state};
  }
  LossContext context_with(std::byte* scratch) const {
    LossContext context = make_context(p_);
    context.scratch = scratch;
    return context;
  }

  Device device_;
  const Problem& p_;
  const CallMemory<Loss> memory_;
  const RowArrays& rows_;
  Loss* const on_device_;
  const LossContext context_;
  const Loss loss_;  // what the host may know of it
  DeviceSteps<Device, Loss> steps_;
};

// A call of the problem's loss. Of losses that live outside the library there is none.
template <class Device>
Status begin_call(Device device, std::unique_ptr<Call>* call) {
  const RegisteredLoss& loss = *device.problem().loss;
  if (visit_loss(loss.info.name, [&]<class Loss>() { *call = std::make_unique<DeviceCall<Device, Loss>>(std::move(device)); }))
    return {};
  return {TILELOSS_UNSUPPORTED, loss.name + ": expected one of the library's losses on this device, got another"};
}

}  // namespace tileloss::impl::device
