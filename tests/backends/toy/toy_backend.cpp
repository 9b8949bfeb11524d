#include "tests/backends/toy/toy_backend.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "backends/device/device_call.h"
#include "backends/host/checks.h"
#include "backends/host/gradient.h"
#include "backends/host/row_state.h"
#include "tests/backends/toy/toy_sweeps.h"

namespace tileloss::test {
namespace {

using impl::Problem;
using impl::Status;
using impl::device::RowArrays;

const ToyPlan& own_part(const tileloss_plan& plan) { return *reinterpret_cast<const ToyPlan*>(plan.other); }

// What device/device_call.h asks for. What is queued outlives it.
class ToyDevice {
 public:
  ToyDevice(const Problem& problem, DeviceMemory& memory, Status& error)
      : problem_(std::make_shared<const Problem>(problem)), memory_(&memory), error_(&error) {
    if (!problem.loss->is_linear || problem.pass == TILELOSS_FROM_ROW_STATE) return;
    z_ = allocate<float>(problem.rows * problem.columns);
    if (problem.loss->target() == impl::TargetKind::kLogits) teacher_z_ = allocate<float>(problem.rows * problem.columns);
  }

  const Problem& problem() const { return *problem_; }

  template <class T>
  T* allocate(std::int64_t count) {
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
    void* const data = memory_->allocate(bytes);
    pieces_.push_back(data);
    memory_->queue([=] { std::memset(data, 0, bytes); });
    return static_cast<T*>(data);
  }
  // From the last to the first, as any order has to do.
  template <class Step>
  void each(std::int64_t count, const Step& step) {
    memory_->queue([=] {
      for (std::int64_t i = count - 1; i >= 0; --i) step(i);
    });
  }
  template <class Term, class Take>
  void sum(std::int64_t count, const Term& term, const Take& take) {
    memory_->queue([=] {
      double total = 0;
      for (std::int64_t i = 0; i < count; ++i) total += term(i);
      take(total);
    });
  }
  template <class Step, class Term, class Take>
  void each_then_sum(std::int64_t count, const Step& step, const Term& term, const Take& take) {
    each(count, step);
    sum(count, term, take);
  }
  void sort(double* values, std::int64_t count) {
    memory_->queue([=] { std::sort(values, values + count); });
  }
  // Where something is wrong every row's label is, so that all that comes out is NaN.
  template <class Loss>
  void begin(Loss* at, const Loss& loss, const impl::LabelColumns& labels, const RowArrays& rows) {
    each(problem_->rows, [=](std::int64_t i) { rows.label_columns[i] = labels[i]; });
    if (rows.classes != nullptr) count_classes(rows);
    memory_->queue([=, p = problem_, error = error_] {
      std::memcpy(static_cast<void*>(at), &loss, sizeof loss);
      Status found = impl::host::check_numbers(*p);
      if (found.ok()) found = impl::host::check_labels(*p, rows.label_columns);
      if (found.ok()) found = impl::host::check_target(*p, rows.label_columns);
      if (found.ok()) return;
      std::fill_n(rows.label_columns, p->rows, impl::kBadLabel);
      if (error->ok()) *error = found;
    });
  }
  // All columns are allowed.
  void count_classes(const RowArrays& rows) {
    each(problem_->rows, [=, p = problem_](std::int64_t i) {
      const float* const weights = impl::class_weights(*p);
      const double count = rows.label_columns[i] == impl::kIgnoredRow ? 0 : static_cast<double>(p->columns);
      rows.classes[i] = {count, weights == nullptr || count == 0 ? count : std::accumulate(weights, weights + p->columns, 0.0)};
    });
  }
  void forward(const RowArrays& rows) { sweep<&ToySweeps::forward>(rows); }
  void find_sums(const RowArrays& rows) { sweep<&ToySweeps::find_sums>(rows); }
  void backward(const RowArrays& rows, const impl::RowStates& states) { sweep<&ToySweeps::backward>(rows, states); }
  Status done() {
    memory_->queue([memory = memory_, pieces = pieces_] {
      for (void* piece : pieces) memory->release(piece);
    });
    return {};
  }

 private:
  template <auto kSweep, class... With>
  void sweep(const RowArrays& rows, const With&... with) {
    memory_->queue([=, p = problem_, z = z_, teacher = teacher_z_] {
      const ToySweeps sweeps(*p, rows, z, teacher);
      if (z != nullptr) sweeps.make_logits();
      (sweeps.*kSweep)(with...);
    });
  }

  std::shared_ptr<const Problem> problem_;
  DeviceMemory* memory_;
  Status* error_;
  float *z_ = nullptr, *teacher_z_ = nullptr;
  std::vector<void*> pieces_;
};

}  // namespace

Status ToyBackend::plan(const Problem& problem, const tileloss_plan_options& /*hints*/, const tileloss_executor* /*executor*/,
                        tileloss_plan* plan) const {
  if (impl::present(problem.args.hidden_r)) return {TILELOSS_UNSUPPORTED, "hidden_r: expected none on the toy, got a matrix"};
  if (problem.has_several_labels())
    return {TILELOSS_UNSUPPORTED,
            "labels_per_row: expected 0 or 1 on the toy, got " + std::to_string(problem.args.labels_per_row)};
  if (impl::present(problem.args.allowed)) return {TILELOSS_UNSUPPORTED, "allowed: expected none on the toy, got a matrix"};
  const ToyPlan own = {problem.rows, problem.columns};
  std::memcpy(plan->other, &own, sizeof own);
  return {};
}

Status ToyBackend::check_plan(const tileloss_plan& plan) const {
  if (own_part(plan).rows >= 0 && own_part(plan).columns >= 0) return {};
  return impl::expected("plan.toy", "rows and columns", "less than 0");
}

Status ToyBackend::begin(const Problem& problem, const tileloss_plan& /*plan*/, const tileloss_run& /*run*/,
                         std::unique_ptr<impl::Call>* call) const {
  return impl::device::begin_call(ToyDevice(problem, memory_.pages, errors_[problem.device_index]), call);
}

Status ToyBackend::set_identity(const tileloss_row_state& state) const {
  memory_.pages.queue([=] { impl::host::set_identity(state); });
  return {};
}

Status ToyBackend::merge(tileloss_row_state* into, const tileloss_row_state& from) const {
  memory_.pages.queue([to = *into, from]() mutable { impl::host::merge(&to, from); });
  return {};
}

Status ToyBackend::scale_gradient(const tileloss_matrix& gradient, const float* factor, const tileloss_run& /*run*/) const {
  memory_.pages.queue([=] {
    for (std::int64_t i = 0; *factor != 1 && i < impl::host::count_pieces(gradient); ++i)
      impl::host::scale_piece(gradient, i, *factor);
  });
  return {};
}

std::vector<impl::PlanFact> ToyBackend::describe(const tileloss_plan& plan) const {
  return {{"rows", own_part(plan).rows}, {"columns", own_part(plan).columns}};
}

}  // namespace tileloss::test
