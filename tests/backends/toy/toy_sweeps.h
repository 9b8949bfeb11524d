// The toy's sweeps, row by row in plain loops over double: what a device has to bring of its own. Run where its memory can be
// read.
#pragma once

#include <vector>

#include "backends/device/row_kernels.h"
#include "backends/problem.h"
#include "core/columns.h"

namespace tileloss::test {

class ToySweeps {
 public:
  // z, teacher_z: with the LM head, [rows, columns] of each side; else null.
  ToySweeps(const impl::Problem& problem, const impl::device::RowArrays& rows, float* z, float* teacher_z)
      : p_(problem),
        rows_(rows),
        z_(z),
        teacher_z_(teacher_z),
        own_(impl::make_transform(problem)),
        label_(impl::make_label_transform(problem).value_or(own_)),
        options_(problem.loss->info.make(impl::make_context(problem))->target_options()) {}

  void make_logits() const;
  void forward() const;
  void find_sums() const;
  void choose_column(std::int64_t i) const;
  void backward(const impl::RowStates& states) const;

 private:
  using Numbers = std::vector<double>;
  // A row of a matrix of floats.
  struct Row {
    const void* data;
    tileloss_dtype dtype;
    std::int64_t offset;
    float operator()(std::int64_t j) const { return impl::load_number(data, dtype, offset + j); }
  };
  using Columns = impl::Columns<Row>;

  Row row(const tileloss_matrix& m, std::int64_t i, std::int64_t group_stride, const float* z = nullptr) const;
  Columns own(std::int64_t i, const impl::LogitTransform& transform) const;
  Columns teacher(std::int64_t i) const;
  impl::RowState gather(std::int64_t i, Columns columns) const;
  // What the target adds to a row's stats, unless the sums are there, and dD/dz of its columns.
  Numbers look(std::int64_t i, impl::TargetStats& stats, bool has_sums) const;
  Numbers look_at_all(std::int64_t i, impl::TargetStats& stats, bool has_sums) const;
  Numbers look_at_some(std::int64_t i, impl::TargetStats& stats) const;
  Numbers gradient(std::int64_t i, const impl::RowStates& states) const;
  double weight(std::int64_t j) const {
    const float* const weights = impl::class_weights(p_);
    return weights == nullptr ? 1 : static_cast<double>(weights[j]);
  }

  const impl::Problem& p_;
  const impl::device::RowArrays rows_;
  float *const z_, *const teacher_z_;
  const impl::LogitTransform own_, label_;
  const impl::TargetOptions options_;
};

}  // namespace tileloss::test
