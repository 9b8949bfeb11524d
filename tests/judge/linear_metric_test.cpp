// The bound of losses fused with the LM head: implementations that are as good as they can be pass, wrong ones do not.
#include "judge/gates/linear_metric.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "tests/judge/linear_problem.h"

namespace tileloss::tools {
namespace {

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

void scale(std::vector<double>& values, double factor) {
  for (double& value : values) value *= factor;
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

const std::vector<Shape>& shapes_with_few_rows() {
  static const std::vector<Shape> kShapes = {{.rows = 1, .vocab = 700},
                                             {.rows = 2, .vocab = 700, .logit_std = 6},
                                             {.rows = 3, .vocab = 50, .hidden = 2},
                                             {.rows = 2, .vocab = 3, .hidden = 1, .logit_std = 0.5},
                                             {.rows = 7, .vocab = 300, .logit_std = 0.1}};
  return kShapes;
}

// Each dlogit is rounded once, but another number than the dlogit: e^(z-m), whose factor is applied afterwards. Of a few
// dlogits each factor has a luck of its own.
TEST(LinearMetric, AnotherSingleRoundingPasses) {
  for (const bool are_few : {false, true}) {
    for (Shape shape : are_few ? shapes_with_few_rows() : shapes()) {
      for (const NumberFormat compute : {NumberFormat::kBfloat16, NumberFormat::kFloat32}) {
        shape.compute = compute;
        const Problem problem(shape);
        for (double factor = 3.7; factor < (are_few ? 7.3 : 3.8); factor += 0.09) {
          const Gradients g = problem.ideal([&](double value) { return round_to(compute, value / factor) * factor; });
          for (const NumberFormat output : {NumberFormat::kFloat32, NumberFormat::kBfloat16, NumberFormat::kFloat16}) {
            EXPECT_EQ(failures(problem.judge(g, output, output)), "") << shape.rows << " " << shape.vocab << " " << shape.hidden;
          }
        }
      }
    }
  }
}

// Where all dlogits of a column are alike, one rounding is a common factor of a row of dhead, and its luck the row's.
TEST(LinearMetric, RoundingsThatAreAllAlikePass) {
  const Problem problem({.rows = 64, .vocab = 900, .logit_std = 0.3, .alike = true});
  for (double factor = 3.7; factor < 7.3; factor += 0.3) {
    const Gradients g = problem.ideal([&](double value) { return round_to(NumberFormat::kBfloat16, value / factor) * factor; });
    EXPECT_EQ(failures(problem.judge(g)), "") << factor;
  }
  Gradients wrong = problem.ideal(rounding(NumberFormat::kBfloat16));
  scale(wrong.dhead, 1.02);
  EXPECT_TRUE(fails(problem.judge(wrong), "dhead"));
}

// The Frobenius gate alone, where only a few dlogits have weight.
TEST(LinearMetric, FewRowsAreJudgedToo) {
  for (Shape shape : shapes_with_few_rows()) {
    for (const NumberFormat compute : {NumberFormat::kBfloat16, NumberFormat::kFloat32}) {
      shape.compute = compute;
      const Problem problem(shape);
      const Gradients ideal = problem.ideal(rounding(compute));
      for (const double factor : {0.5, 0.98, 1.02, -1.0}) {
        Gradients wrong = ideal;
        for (std::vector<double>* values : {&wrong.dhidden, &wrong.dhead, &wrong.dbias}) scale(*values, factor);
        const std::vector<Gate> gates = problem.judge(wrong);
        for (const char* name : {"dhidden/frobenius", "dhead/frobenius", "dbias/frobenius"}) {
          EXPECT_GT(value_of(gates, name), kIdealFactor) << shape.rows << " " << shape.vocab << " times " << factor;
        }
      }
    }
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

// Of the logits, which a softmax cares for only if they differ: terms with a common offset make all of a row large.
TEST(LinearMetric, SumsInFloat32StayWithinALogitsErrorFarFromZeroToo) {
  constexpr std::int64_t kRows = 8, kVocab = 25;
  for (const std::int64_t width : {48, 1536, 4096}) {
    for (const float offset : {0.0F, 0.1F, 1.0F, 10.0F}) {
      std::vector<float> hidden = random_floats(kRows * width, 1, 1, NumberFormat::kFloat32);
      std::vector<float> head = random_floats(kVocab * width, 2, 1, NumberFormat::kFloat32);
      for (std::vector<float>* values : {&hidden, &head}) {
        for (float& value : *values) value += offset;
      }
      const oracle::LinearOperands operands = make_operands({hidden.data(), NumberFormat::kFloat32, kRows, width, width, 1},
                                                            {head.data(), NumberFormat::kFloat32, kVocab, width, width, 1},
                                                            kVocab, {}, NumberFormat::kFloat32, {}, 1);
      const LinearNorms norms(operands);
      std::vector<std::int64_t> rows(kRows);
      std::iota(rows.begin(), rows.end(), 0);
      double worst = 0;
      for_each_linear_row(operands, norms, rows, [&](const LogitsRow& row) {
        for (std::int64_t v = 0; v < kVocab; ++v) {
          float sum = 0;
          for (std::int64_t h = 0; h < width; ++h) sum += hidden[index(row.row * width + h)] * head[index(v * width + h)];
          worst = std::max(worst, std::fabs(static_cast<double>(sum) - row.logits[index(v)]) / row.errors[index(v)]);
        }
      });
      EXPECT_LT(worst, 1) << "H = " << width << ", offset " << offset;
      EXPECT_GT(worst, 0.2) << "H = " << width << ", offset " << offset;
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

TEST(LinearMetric, EveryMutantIsRejectedByTheGradientsItCorrupts) {
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
  Gradients corrupted = ideal;
  corrupted.dhidden[index(3 * problem.shape().hidden)] = 1e-30;  // row 3 is ignored
  EXPECT_EQ(value_of(problem.judge(corrupted), "dhidden/nonzero_where_ignored"), 1);
  corrupted = ideal;
  corrupted.dhidden[0] = NAN;
  corrupted.dhead[5] = INFINITY;
  corrupted.dbias[5] = NAN;
  const std::vector<Gate> gates = problem.judge(corrupted);
  for (const char* name : {"dhidden/nonfinite", "dhead/nonfinite", "dbias/nonfinite"})
    EXPECT_EQ(value_of(gates, name), 1) << name;
}

}  // namespace
}  // namespace tileloss::tools
