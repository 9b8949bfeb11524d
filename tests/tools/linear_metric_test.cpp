// The bound of losses fused with the LM head: implementations that are as good as they can be pass, wrong ones do not.
#include "tools/linear_metric.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <optional>
#include <vector>

#include "tools/synthetic.h"

namespace tileloss::tools {
namespace {

using reference::NumberFormat;
using reference::StoredMatrix;

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

double round_to(NumberFormat format, double value) { return decode(format, encode(format, value)); }

std::vector<float> random_floats(std::int64_t count, std::int64_t stream, double size, NumberFormat format) {
  Random random(11, Stream::kLogits, stream);
  std::vector<float> values(index(count));
  for (float& value : values) value = static_cast<float>(round_to(format, size * random.next_normal()));
  return values;
}

struct Shape {
  std::int64_t rows = 40, vocab = 700, hidden = 48;
  NumberFormat compute = NumberFormat::kBfloat16;
  double logit_std = 2;
};

// What an implementation gave.
struct Gradients {
  std::vector<double> dhidden, dhead, dbias;
};

// A cross-entropy over random hidden states, every eighth row ignored, its witness, and implementations of it in plain loops.
class Problem {
 public:
  explicit Problem(const Shape& shape) : shape_(shape) {
    const double size = std::sqrt(shape.logit_std) / std::sqrt(std::sqrt(static_cast<double>(shape.hidden)));
    hidden_ = random_floats(shape.rows * shape.hidden, 1, size, shape.compute);
    head_ = random_floats(shape.vocab * shape.hidden, 2, size, shape.compute);
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
    witness_.emplace(operands_, *norms_, reference::LinearGradients::Wanted{true, true, true});
    dlogits_.resize(index(shape.rows * shape.vocab));
    // Without weights the labels' dlogits are all about -1/N, and so are their roundings.
    std::vector<double> weights;
    Random random(6, Stream::kWeights, 0);
    for (std::int64_t i = 0; i < shape.rows; ++i) weights.push_back(0.5 + 1.5 * random.next_uniform());
    const reference::CrossEntropy oracle({}, labels_, weights, {}, {});
    for_each_linear_row(operands_, *norms_, rows, [&](const LinearRow& row) {
      reference::SoftmaxRow softmax;
      reference::GradientRow gradient;
      softmax.compute({}, row.logits, labels_[index(row.row)]);
      oracle.row_gradient(row.row, softmax, gradient);
      witness_->add_row(row, softmax, gradient);
      std::copy(gradient.gradient.begin(), gradient.gradient.end(), dlogits_.begin() + row.row * shape.vocab);
    });
    witness_->finish();
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
    add(witness_->judge_dhidden(store(g.dhidden, dhidden, shape_.hidden)));
    add(witness_->judge_dhead(store(g.dhead, dhead, shape_.hidden),
                              before == nullptr ? none : store(before->dhead, dhead, shape_.hidden)));
    add(witness_->judge_dbias(store(g.dbias, NumberFormat::kFloat32, 1),
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
  reference::LinearOperands operands_;
  std::optional<LinearNorms> norms_;
  std::optional<LinearWitness> witness_;
  std::vector<double> dlogits_;
};

std::string failures(const std::vector<Gate>& gates) {
  std::string names;
  for (const Gate& gate : gates) {
    if (!gate.pass) names += gate.name + " " + std::to_string(gate.value) + " > " + std::to_string(gate.limit) + "; ";
  }
  return names;
}

bool fails(const std::vector<Gate>& gates, const std::string& name) {
  return std::any_of(gates.begin(), gates.end(),
                     [&](const Gate& gate) { return !gate.pass && gate.name.compare(0, name.size() + 1, name + "/") == 0; });
}

double value_of(const std::vector<Gate>& gates, const std::string& name) {
  const auto found = std::find_if(gates.begin(), gates.end(), [&](const Gate& gate) { return gate.name == name; });
  return found == gates.end() ? NAN : found->value;
}

const std::vector<Shape>& shapes() {
  static const std::vector<Shape> kShapes = {{},
                                             {.rows = 7, .vocab = 17, .hidden = 1},
                                             {.rows = 33, .vocab = 1000, .hidden = 7},
                                             {.rows = 1, .vocab = 1, .hidden = 3},
                                             {.rows = 2, .vocab = 2, .hidden = 64},
                                             {.rows = 64, .vocab = 3000, .hidden = 33, .logit_std = 8},
                                             {.rows = 130, .vocab = 127, .hidden = 64, .logit_std = 0.1}};
  return kShapes;
}

std::function<double(double)> rounding(NumberFormat format) {
  return [format](double value) { return round_to(format, value); };
}

TEST(LinearMetric, TheIdealPassesInEveryOutputType) {
  double cap = 0;
  for (Shape shape : shapes()) {
    for (const NumberFormat compute : {NumberFormat::kBfloat16, NumberFormat::kFloat32}) {
      shape.compute = compute;
      const Problem problem(shape);
      const Gradients ideal = problem.ideal(rounding(compute));
      for (const NumberFormat output : {NumberFormat::kFloat32, NumberFormat::kBfloat16, NumberFormat::kFloat16}) {
        const std::vector<Gate> gates = problem.judge(ideal, output, output);
        EXPECT_EQ(failures(gates), "") << shape.rows << " " << shape.vocab << " " << shape.hidden;
        for (const char* name : {"dhidden/cap", "dhead/cap", "dbias/cap"}) cap = std::max(cap, value_of(gates, name));
      }
    }
  }
  RecordProperty("worst_cap", std::to_string(cap));
  EXPECT_LT(cap, 0.9);
}

// Each dlogit is rounded once, but another number than the dlogit: e^(z-m), whose factor is applied afterwards.
TEST(LinearMetric, AnotherSingleRoundingPasses) {
  for (const Shape& shape : shapes()) {
    const Problem problem(shape);
    const std::vector<Gate> gates =
        problem.judge(problem.ideal([](double value) { return round_to(NumberFormat::kBfloat16, value / 3.7) * 3.7; }));
    EXPECT_EQ(failures(gates), "") << shape.rows << " " << shape.vocab << " " << shape.hidden;
  }
}

TEST(LinearMetric, SumsInFloat32Pass) {
  for (Shape shape : shapes()) {
    for (const NumberFormat compute : {NumberFormat::kBfloat16, NumberFormat::kFloat32}) {
      shape.compute = compute;
      const Problem problem(shape);
      std::vector<double> dlogits;
      for (const double value : problem.dlogits()) dlogits.push_back(round_to(compute, value));
      const std::vector<Gate> gates = problem.judge(problem.multiply<float>(dlogits));
      EXPECT_EQ(failures(gates), "") << shape.rows << " " << shape.vocab << " " << shape.hidden;
    }
  }
}

// A bit too few, truncated, or bfloat16 where float32 was asked for.
TEST(LinearMetric, CoarserRoundingsFail) {
  const Problem problem({.rows = 100});
  const auto truncated = [](double value) {
    const auto bits = encode(NumberFormat::kFloat32, value);
    return decode(NumberFormat::kFloat32, bits & 0xffff0000U);
  };
  // Veltkamp's splitting leaves 7 significant bits of a double; bfloat16 has 8.
  const auto coarse = [](double value) {
    const double multiple = value * (0x1p46 + 1);
    return multiple - (multiple - value);
  };
  for (const auto& round : std::vector<std::function<double(double)>>{truncated, coarse}) {
    const std::vector<Gate> gates = problem.judge(problem.ideal(round));
    EXPECT_TRUE(fails(gates, "dhidden"));
    EXPECT_TRUE(fails(gates, "dhead"));
    EXPECT_TRUE(fails(gates, "dbias"));
  }
  const Problem exact({.compute = NumberFormat::kFloat32});
  const std::vector<Gate> gates = exact.judge(exact.ideal(rounding(NumberFormat::kBfloat16)));
  EXPECT_TRUE(fails(gates, "dhidden"));
  EXPECT_TRUE(fails(gates, "dhead"));
  EXPECT_TRUE(fails(gates, "dbias"));
}

// --------------------------------------------------------------------------------------------------------- mutants

struct LinearMutant {
  const char* name;
  const char* gradients;  // those that must be rejected: i dhidden, w dhead, b dbias
  std::function<Gradients(const Problem&, Gradients)> apply;
};

void scale(std::vector<double>& values, double factor) {
  for (double& value : values) value *= factor;
}

Gradients with_dlogits(const Problem& p, const std::function<bool(std::int64_t, std::int64_t)>& keep) {
  std::vector<double> dlogits = p.dlogits();
  for (std::int64_t i = 0; i < p.shape().rows; ++i) {
    for (std::int64_t v = 0; v < p.shape().vocab; ++v) {
      double& value = dlogits[index(i * p.shape().vocab + v)];
      value = keep(i, v) ? round_to(p.shape().compute, value) : 0;
    }
  }
  return p.multiply<double>(dlogits);
}

// A running sum that is stored as bfloat16 after every row.
Gradients bfloat16_sums(const Problem& p, Gradients g) {
  const Shape& s = p.shape();
  std::fill(g.dhead.begin(), g.dhead.end(), 0.0);
  for (std::int64_t i = 0; i < s.rows; ++i) {
    for (std::int64_t v = 0; v < s.vocab; ++v) {
      for (std::int64_t h = 0; h < s.hidden; ++h) {
        double& sum = g.dhead[index(v * s.hidden + h)];
        sum = round_to(NumberFormat::kBfloat16, sum + round_to(s.compute, p.dlogits()[index(i * s.vocab + v)]) *
                                                          static_cast<double>(p.hidden()[index(i * s.hidden + h)]));
      }
    }
  }
  return g;
}

std::vector<LinearMutant> mutants() {
  const auto halved = [](std::vector<double> Gradients::*which, double factor) {
    return [=](const Problem&, Gradients g) {
      scale(g.*which, factor);
      return g;
    };
  };
  return {
      {"dhidden halved", "i", halved(&Gradients::dhidden, 0.5)},
      {"dhead halved", "w", halved(&Gradients::dhead, 0.5)},
      {"dbias halved", "b", halved(&Gradients::dbias, 0.5)},
      {"dhidden 1 % too large", "i", halved(&Gradients::dhidden, 1.01)},
      {"dhead 1 % too large", "w", halved(&Gradients::dhead, 1.01)},
      {"dbias 1 % too large", "b", halved(&Gradients::dbias, 1.01)},
      {"last vocabulary tile dropped", "iwb",
       [](const Problem& p, const Gradients&) {
         return with_dlogits(p, [&](std::int64_t, std::int64_t v) { return v < (p.shape().vocab - 1) / 64 * 64; });
       }},
      {"one row of dhead dropped", "w",
       [](const Problem& p, Gradients g) {
         const std::int64_t h = p.shape().hidden;
         std::fill(g.dhead.end() - h, g.dhead.end(), 0.0);
         return g;
       }},
      {"last row chunk dropped", "iwb",
       [](const Problem& p, const Gradients&) {
         return with_dlogits(p, [&](std::int64_t i, std::int64_t) { return i < p.shape().rows - 8; });
       }},
      {"target not subtracted", "iwb",
       [](const Problem& p, const Gradients&) {
         return with_dlogits(p, [&](std::int64_t i, std::int64_t v) { return v != p.labels()[index(i)]; });
       }},
      {"dhead summed in bfloat16", "w", [](const Problem& p, Gradients g) { return bfloat16_sums(p, std::move(g)); }},
  };
}

TEST(LinearMetric, EveryMutantIsRejectedByTheGradientsItSpoils) {
  for (Shape shape :
       std::vector<Shape>{{}, {.rows = 64, .vocab = 1000, .hidden = 33, .logit_std = 6}, {.rows = 40, .logit_std = 0.1}}) {
    for (const NumberFormat compute : {NumberFormat::kBfloat16, NumberFormat::kFloat32}) {
      shape.compute = compute;
      const Problem problem(shape);
      const Gradients ideal = problem.ideal(rounding(compute));
      ASSERT_EQ(failures(problem.judge(ideal)), "");
      for (const LinearMutant& mutant : mutants()) {
        SCOPED_TRACE(mutant.name);
        const std::vector<Gate> gates = problem.judge(mutant.apply(problem, ideal));
        const std::string wanted = mutant.gradients;
        EXPECT_EQ(fails(gates, "dhidden"), wanted.find('i') != std::string::npos);
        EXPECT_EQ(fails(gates, "dhead"), wanted.find('w') != std::string::npos);
        EXPECT_EQ(fails(gates, "dbias"), wanted.find('b') != std::string::npos);
      }
    }
  }
}

TEST(LinearMetric, AccumulationIsJudgedWithWhatWasThere) {
  const Problem problem({});
  const Gradients ideal = problem.ideal(rounding(NumberFormat::kBfloat16));
  Gradients before = ideal, sum = ideal;
  const auto fill = [&](std::vector<double>& there, std::vector<double>& total, NumberFormat format) {
    Random random(4, Stream::kWeights, 0);
    for (std::size_t k = 0; k < there.size(); ++k) {
      there[k] = round_to(format, 0.01 * random.next_normal());
      total[k] += there[k];
    }
  };
  for (const NumberFormat format : {NumberFormat::kFloat32, NumberFormat::kBfloat16}) {
    before = sum = ideal;
    fill(before.dhead, sum.dhead, format);
    fill(before.dbias, sum.dbias, NumberFormat::kFloat32);
    EXPECT_EQ(failures(problem.judge(sum, NumberFormat::kFloat32, format, &before)), "");
    const std::vector<Gate> ignored = problem.judge(ideal, NumberFormat::kFloat32, format, &before);
    EXPECT_TRUE(fails(ignored, "dhead"));
    EXPECT_TRUE(fails(ignored, "dbias"));
    const std::vector<Gate> not_asked = problem.judge(sum, NumberFormat::kFloat32, format);
    EXPECT_TRUE(fails(not_asked, "dhead"));
    EXPECT_TRUE(fails(not_asked, "dbias"));
  }
}

TEST(LinearMetric, NotANumberAndWhatShouldBeZeroAreCounted) {
  const Problem problem({});
  const Gradients ideal = problem.ideal(rounding(NumberFormat::kBfloat16));
  Gradients spoiled = ideal;
  spoiled.dhidden[index(3 * problem.shape().hidden)] = 1e-30;  // row 3 is ignored
  EXPECT_EQ(value_of(problem.judge(spoiled), "dhidden/nonzero_where_ignored"), 1);
  spoiled = ideal;
  spoiled.dhidden[0] = NAN;
  spoiled.dhead[5] = INFINITY;
  spoiled.dbias[5] = NAN;
  const std::vector<Gate> gates = problem.judge(spoiled);
  for (const char* name : {"dhidden/nonfinite", "dhead/nonfinite", "dbias/nonfinite"})
    EXPECT_EQ(value_of(gates, name), 1) << name;
}

}  // namespace
}  // namespace tileloss::tools
