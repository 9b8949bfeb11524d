// A cross-entropy with the LM head, what the oracle says of it, and implementations of it in plain loops: what the tests of
// linear_metric.h judge.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <vector>

#include "judge/gates/linear_metric.h"
#include "support/synthetic.h"

namespace tileloss::tools {

using oracle::NumberFormat;
using oracle::StoredMatrix;

inline std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

inline double round_to(NumberFormat format, double value) { return decode(format, encode(format, value)); }

inline std::vector<float> random_floats(std::int64_t count, std::int64_t stream, double size, NumberFormat format) {
  Random random(11, Stream::kLogits, stream);
  std::vector<float> values(index(count));
  for (float& value : values) value = static_cast<float>(round_to(format, size * random.next_normal()));
  return values;
}

struct Shape {
  std::int64_t rows = 40, vocab = 700, hidden = 48;
  NumberFormat compute = NumberFormat::kBfloat16;
  double logit_std = 2;
  bool alike = false;  // all hidden states are one, all weights 1: the dlogits of a column, and so their roundings, are alike
};

// What an implementation gave.
struct Gradients {
  std::vector<double> dhidden, dhead, dbias;
};

// A cross-entropy over random hidden states, every eighth row ignored, what the oracle says of it, and implementations of it in
// plain loops.
class Problem {
 public:
  explicit Problem(const Shape& shape) : shape_(shape) {
    const double size = std::sqrt(shape.logit_std) / std::sqrt(std::sqrt(static_cast<double>(shape.hidden)));
    hidden_ = random_floats(shape.rows * shape.hidden, 1, size, shape.compute);
    head_ = random_floats(shape.vocab * shape.hidden, 2, size, shape.compute);
    if (shape.alike) {
      for (std::size_t i = index(shape.hidden); i < hidden_.size(); ++i) hidden_[i] = hidden_[i - index(shape.hidden)];
    }
    labels_ = make_labels({.vocab = shape.vocab}, 5, shape.rows);
    for (std::size_t i = 3; i < labels_.size(); i += 8) labels_[i] = -100;
    std::vector<std::int64_t> rows;
    for (std::size_t i = 0; i < labels_.size(); ++i) {
      used_.push_back(labels_[i] == -100 ? 0 : 1);
      if (labels_[i] != -100) rows.push_back(static_cast<std::int64_t>(i));
    }
    operands_ = make_operands({hidden_.data(), NumberFormat::kFloat32, shape.rows, shape.hidden, shape.hidden, 1},
                              {head_.data(), NumberFormat::kFloat32, shape.vocab, shape.hidden, shape.hidden, 1}, shape.vocab, {},
                              shape.compute, used_, 2);
    norms_.emplace(operands_);
    oracle_case_.emplace(operands_, *norms_, oracle::LinearGradients::NeedsGrad{true, true, true});
    dlogits_.resize(index(shape.rows * shape.vocab));
    // Without weights the labels' dlogits are all about -1/N, and so are their roundings.
    std::vector<double> weights;
    Random random(6, Stream::kWeights, 0);
    for (std::int64_t i = 0; i < shape.rows; ++i) weights.push_back(shape.alike ? 1 : 0.5 + 1.5 * random.next_uniform());
    const oracle::CrossEntropy oracle({}, labels_, weights, {}, {});
    for_each_linear_row(operands_, *norms_, rows, [&](const LogitsRow& row) {
      oracle::SoftmaxRow softmax;
      oracle::GradientRow gradient;
      softmax.compute({}, row.logits, labels_[index(row.row)]);
      oracle.row_gradient(row.row, softmax, gradient);
      oracle_case_->add_row(row, softmax, gradient);
      std::copy(gradient.gradient.begin(), gradient.gradient.end(), dlogits_.begin() + row.row * shape.vocab);
    });
    oracle_case_->finish();
  }

  // Products in double of dlogits made by `round` from the exact ones.
  Gradients ideal(const std::function<double(double)>& round) const {
    std::vector<double> dlogits(dlogits_.size());
    std::transform(dlogits_.begin(), dlogits_.end(), dlogits.begin(), round);
    return multiply<double>(dlogits);
  }
  // Sums in T, one term after the other.
  template <typename T>
  Gradients multiply(const std::vector<double>& dlogits) const {
    const Shape& s = shape_;
    std::vector<T> dhidden(hidden_.size()), dhead(head_.size()), dbias(index(s.vocab));
    for (std::int64_t i = 0; i < s.rows; ++i) {
      for (std::int64_t v = 0; v < s.vocab; ++v) {
        const T d = static_cast<T>(dlogits[index(i * s.vocab + v)]);
        dbias[index(v)] += d;
        for (std::int64_t h = 0; h < s.hidden; ++h) {
          dhidden[index(i * s.hidden + h)] += d * static_cast<T>(head_[index(v * s.hidden + h)]);
          dhead[index(v * s.hidden + h)] += d * static_cast<T>(hidden_[index(i * s.hidden + h)]);
        }
      }
    }
    const auto widen = [](const std::vector<T>& values) { return std::vector<double>(values.begin(), values.end()); };
    return {widen(dhidden), widen(dhead), widen(dbias)};
  }

  // Stored in these types; `before` is already added where given.
  std::vector<Gate> judge(const Gradients& g, NumberFormat dhidden = NumberFormat::kFloat32,
                          NumberFormat dhead = NumberFormat::kFloat32, const Gradients* before = nullptr) const {
    std::vector<Gate> all;
    const auto add = [&](const std::vector<Gate>& gates) { all.insert(all.end(), gates.begin(), gates.end()); };
    std::vector<std::vector<unsigned char>> kept;
    const auto store = [&](const std::vector<double>& values, NumberFormat format, std::int64_t cols) {
      std::vector<unsigned char>& bytes = kept.emplace_back(values.size() * 4);
      encode_row(format, values, bytes.data());
      return StoredMatrix{bytes.data(), format, static_cast<std::int64_t>(values.size()) / cols, cols, cols, 1};
    };
    const StoredMatrix none;
    add(oracle_case_->judge(LinearOutput::kDhidden, store(g.dhidden, dhidden, shape_.hidden)));
    add(oracle_case_->judge(LinearOutput::kDhead, store(g.dhead, dhead, shape_.hidden),
                            before == nullptr ? none : store(before->dhead, dhead, shape_.hidden)));
    add(oracle_case_->judge(LinearOutput::kDbias, store(g.dbias, NumberFormat::kFloat32, 1),
                            before == nullptr ? none : store(before->dbias, NumberFormat::kFloat32, 1)));
    return all;
  }

  const Shape& shape() const { return shape_; }
  const std::vector<double>& dlogits() const { return dlogits_; }
  const std::vector<float>& hidden() const { return hidden_; }
  const std::vector<std::int64_t>& labels() const { return labels_; }

 private:
  Shape shape_;
  std::vector<float> hidden_, head_;
  std::vector<std::int64_t> labels_;
  std::vector<std::uint8_t> used_;
  oracle::LinearOperands operands_;
  std::optional<LinearNorms> norms_;
  std::optional<LinearOracleCase> oracle_case_;
  std::vector<double> dlogits_;
};

}  // namespace tileloss::tools
