// The toy's sweeps, row by row in plain loops over double: what a device has to bring of its own. Run where its memory can be
// read.
#ifndef TILELOSS_TESTS_BACKENDS_TOY_TOY_SWEEPS_H_
#define TILELOSS_TESTS_BACKENDS_TOY_TOY_SWEEPS_H_

#include "backends/device/row_kernels.h"
#include "backends/problem.h"

namespace tileloss::test {

class ToySweeps {
 public:
  // z, teacher_z: with the LM head, [rows, columns] of each side; else null.
  ToySweeps(const impl::Problem& problem, const impl::device::RowArrays& rows, float* z, float* teacher_z)
      : p_(problem), rows_(rows), z_(z), teacher_z_(teacher_z) {}

  void make_logits() const;
  void forward() const;
  void backward(const impl::RowStates& states) const;

 private:
  class Side;
  struct Terms;  // of a row's divergence

  float logit(std::int64_t i, std::int64_t j) const;
  float teacher_logit(std::int64_t i, std::int64_t j) const;
  Side student(std::int64_t i, const impl::RowStats& stats) const;
  Side teacher(std::int64_t i, const impl::RowStats& stats) const;
  template <class Logit>
  impl::RowState gather(std::int64_t i, const impl::LogitTransform& transform, Logit&& logit) const;
  impl::PairStats look(std::int64_t i) const;
  Terms terms(std::int64_t i, impl::PairStats& stats) const;
  Terms terms_of_logits(std::int64_t i, const impl::PairStats& stats) const;
  Terms terms_of_probabilities(std::int64_t i, const impl::PairStats& stats) const;
  Terms terms_of_columns(std::int64_t i, impl::PairStats& stats) const;
  void row_gradient(std::int64_t i, const impl::RowStates& states, std::vector<double>& dz) const;
  void pair_gradient(std::int64_t i, std::vector<double>& dz) const;
  void head_gradients(std::int64_t i, const std::vector<double>& dx, std::vector<double>& dhead,
                      std::vector<double>& dbias) const;

  const impl::Problem& p_;
  const impl::device::RowArrays rows_;
  float* const z_;
  float* const teacher_z_;
};

}  // namespace tileloss::test

#endif  // TILELOSS_TESTS_BACKENDS_TOY_TOY_SWEEPS_H_
