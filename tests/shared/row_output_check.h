// The row outputs that every function can give, held against the oracle.
#ifndef TILELOSS_TESTS_SHARED_ROW_OUTPUT_CHECK_H_
#define TILELOSS_TESTS_SHARED_ROW_OUTPUT_CHECK_H_

#include <tileloss/tileloss.h>

#include <cstdint>
#include <vector>

#include "check/error_metric.h"
#include "check/linear_metric.h"
#include "check/row_outputs.h"
#include "reference/oracle.h"

namespace tileloss::test {

inline bool present(const tileloss_vector& vector) { return vector.dtype != TILELOSS_NONE; }

inline double output_at(const tileloss_vector& vector, std::int64_t i) {
  return static_cast<double>(static_cast<const float*>(vector.data)[i * vector.stride]);
}

class RowOutputCheck {
 public:
  explicit RowOutputCheck(const tileloss_args& args) : args_(args) {}

  // `softmax` null: an ignored row, whose outputs are 0 (argmax -1). `linear`: where the logits came of products. `of_logp`:
  // whose logp it is, if another's.
  void add(std::int64_t row, const reference::SoftmaxRow* softmax, const tools::LinearRow* linear = nullptr,
           const reference::SoftmaxRow* of_logp = nullptr) {
    const auto magnitudes_of = [&](const reference::SoftmaxRow& of) {
      return linear == nullptr ? tools::output_magnitudes(of) : tools::linear_output_magnitudes(of, *linear);
    };
    reference::RowOutputs expected = softmax != nullptr ? softmax->outputs() : reference::RowOutputs{};
    tools::OutputMagnitudes magnitudes = softmax != nullptr ? magnitudes_of(*softmax) : tools::OutputMagnitudes{};
    if (softmax != nullptr && of_logp != nullptr) {
      expected.logp = of_logp->outputs().logp;
      magnitudes[tools::kLogp] = magnitudes_of(*of_logp)[tools::kLogp];
    }
    for (std::size_t o = 0; o < tools::kRowOutputCount; ++o) {
      const tools::RowOutput& output = tools::row_outputs()[o];
      const tileloss_vector& vector = args_.*output.argument;
      if (output.is_exact() || !present(vector)) continue;
      numbers_[o].add(row, output_at(vector, row), output.expected(expected), magnitudes[o]);
    }
    if (!present(args_.argmax)) return;
    const std::int64_t argmax = static_cast<const std::int64_t*>(args_.argmax.data)[row];
    const bool right = softmax == nullptr  ? argmax == -1
                       : linear == nullptr ? tools::argmax_agrees(*softmax, argmax)
                                           : tools::linear_argmax_agrees(*softmax, *linear, argmax);
    argmax_.add(row, right ? 1 : 0, 1);
    const bool correct = softmax != nullptr && argmax == softmax->label();
    if (present(args_.correct)) correct_.add(row, static_cast<const std::uint8_t*>(args_.correct.data)[row], correct ? 1 : 0);
  }

  void append_gates(std::vector<tools::Gate>& gates) const {
    const auto append = [&](const std::vector<tools::Gate>& more) { gates.insert(gates.end(), more.begin(), more.end()); };
    for (const tools::RowOutputMetric& metric : numbers_) {
      if (metric.count() > 0) append(metric.gates());
    }
    if (present(args_.argmax)) append(argmax_.gates());
    if (present(args_.correct)) append(correct_.gates());
  }

 private:
  const tileloss_args& args_;
  std::vector<tools::RowOutputMetric> numbers_{tools::row_outputs().begin(), tools::row_outputs().end()};
  tools::ExactMetric argmax_{"argmax"}, correct_{"correct"};
};

}  // namespace tileloss::test

#endif  // TILELOSS_TESTS_SHARED_ROW_OUTPUT_CHECK_H_
