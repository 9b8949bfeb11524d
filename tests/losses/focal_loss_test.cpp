// A loss that the library does not know: found, planned, validated and run by name like any other.
#include "tests/losses/focal_loss.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "judge/gates/error_metric.h"
#include "losses/registry.h"
#include "tests/api/calls.h"

namespace tileloss::test {
namespace {

using impl::add_loss;
using impl::find_loss;

using oracle::NumberFormat;

// -(1 - p)^gamma log p, straight from the definition.
double definition(const std::vector<double>& z, std::int64_t label, double gamma) {
  double sum = 0;
  for (const double x : z) sum += std::exp(x - z[0]);
  const double p = std::exp(z[static_cast<std::size_t>(label)] - z[0]) / sum;
  return -std::pow(1 - p, gamma) * std::log(p);
}

double dloss_dlogp(const oracle::SoftmaxRow& row, double gamma) {
  const double q = row.one_minus_p_label(), p = row.p(row.label());
  return -std::pow(q, gamma) + (gamma == 0 ? 0.0 : gamma * std::pow(q, gamma - 1) * p * row.logp());
}

class Focal : public testing::TestWithParam<NumberFormat> {
 protected:
  static void SetUpTestSuite() {
    if (find_loss("focal") == nullptr) add_loss(FocalLoss::info());
  }

  static FocalOptions options() {
    FocalOptions o;
    EXPECT_TRUE(succeeds(tileloss_options_init("focal", &o, sizeof o)));
    return o;
  }

  // The case's dlogits and loss against the oracle: the chain rule through logp, whose gradient the oracle knows.
  static testing::AssertionResult agrees_with_oracle(const LogitsCase& c, const FocalOptions& o, bool has_loss) {
    tools::GradientMetric gradients(c.spec().format);
    tools::OutputMetric losses("loss");
    oracle::SoftmaxRow row;
    oracle::GradientRow gradient;
    double used = 0, sum = 0;
    for (const std::int64_t label : c.labels()) used += label == o.logit.ignore_index ? 0 : 1;
    const double scale = o.reduction == TILELOSS_REDUCTION_MEAN ? 1 / used : 1;
    for (std::int64_t i = 0; i < c.spec().rows; ++i) {
      const std::int64_t label = c.labels()[static_cast<std::size_t>(i)];
      if (label == o.logit.ignore_index) {
        gradients.add_ignored_row(i, c.dlogits_row(i), c.spec().vocab);
        continue;
      }
      row.compute(make_transform(o.logit), c.logits_row(i), label);
      const double loss = -std::pow(row.one_minus_p_label(), o.gamma) * row.logp();
      sum += scale * loss;
      if (c.spec().per_row_loss && has_loss) losses.add(i, float_at(c.args().loss, i), loss, std::fabs(loss));
      const double upstream = c.loss_grad().empty() ? 1 : c.loss_grad()[c.spec().per_row_loss ? static_cast<std::size_t>(i) : 0];
      oracle::logprobs_gradient(row, {upstream * scale * dloss_dlogp(row, o.gamma), 0, 0}, gradient);
      gradients.add_row(i, c.dlogits_row(i), c.spec().vocab, tools::make_row_reference(row, gradient));
    }
    if (!c.spec().per_row_loss && has_loss) losses.add(-1, float_at(c.args().loss, 0), sum, std::fabs(sum));
    CheckResult result{gradients.gates(), gradients.mistrusted()};
    if (has_loss) {
      for (const tools::Gate& gate : losses.gates()) result.gates.push_back(gate);
    }
    return agrees(result);
  }
};
INSTANTIATE_TEST_SUITE_P(Formats, Focal, testing::ValuesIn(kFormats), format_name);

TEST_F(Focal, GradientThroughLogpIsThatOfTheDefinition) {
  const std::vector<double> z = {0.3, -1.2, 2.0, 0.9};
  for (const double gamma : {0.0, 0.5, 1.0, 2.0, 5.0}) {
    for (std::int64_t label = 0; label < 4; ++label) {
      oracle::SoftmaxRow row;
      row.compute({}, z, label);
      oracle::GradientRow gradient;
      oracle::logprobs_gradient(row, {dloss_dlogp(row, gamma), 0, 0}, gradient);
      for (std::size_t j = 0; j < z.size(); ++j) {
        std::vector<double> up = z, down = z;
        const double h = 1e-5;
        up[j] += h;
        down[j] -= h;
        EXPECT_NEAR(gradient.gradient[j], (definition(up, label, gamma) - definition(down, label, gamma)) / (2 * h), 1e-9);
      }
    }
  }
}

TEST_F(Focal, IsFoundThroughTheIntrospectionWithItsOptions) {
  bool found = false;
  for (std::int64_t i = 0; i < tileloss_function_count(); ++i) {
    tileloss_function_info info;
    info.struct_size = sizeof info;
    ASSERT_TRUE(succeeds(tileloss_get_function_info(i, &info)));
    if (std::strcmp(info.name, "focal") != 0) continue;
    found = true;
    EXPECT_EQ(info.options_size, sizeof(FocalOptions));
    EXPECT_EQ(info.is_loss, 1);
    std::vector<std::string> names;
    for (std::int64_t k = 0; k < info.num_fields; ++k) names.emplace_back(info.fields[k].name);
    const std::vector<std::string> expected = {"logit_scale",  "softcap",     "temperature", "temperature_on", "valid_vocab",
                                               "ignore_index", "vocab_start", "vocab_total", "gamma",          "reduction"};
    EXPECT_EQ(names, expected);
    EXPECT_EQ(info.fields[8].offset, offsetof(FocalOptions, gamma));
    EXPECT_EQ(info.fields[8].default_value, 2);
    EXPECT_STREQ(info.fields[9].choices, "none|sum|mean");
  }
  EXPECT_TRUE(found);
}

TEST_F(Focal, DefaultsAreThoseOfItsFields) {
  const FocalOptions o = options();
  EXPECT_EQ(o.struct_size, sizeof o);
  EXPECT_EQ(o.gamma, 2);
  EXPECT_EQ(o.reduction, TILELOSS_REDUCTION_MEAN);
  EXPECT_EQ(o.logit.temperature.value, 1);
  EXPECT_EQ(o.logit.ignore_index, -100);
}

TEST_F(Focal, ItsOptionsAndTensorsAreValidated) {
  LogitsCase c({.rows = 2, .vocab = 10});
  FocalOptions o = options();
  o.gamma = -1;
  EXPECT_EQ(tileloss_call("focal", TILELOSS_VALUE_AND_GRAD, &c.args(), &o, nullptr, nullptr), TILELOSS_INVALID_ARGUMENT);
  EXPECT_STREQ(tileloss_last_error(), "gamma: expected a number >= 0, got -1");
  LogitsCase weighted({.rows = 2, .vocab = 10, .token_weights = true});
  EXPECT_EQ(tileloss_call("focal", TILELOSS_VALUE_AND_GRAD, &weighted.args(), nullptr, nullptr, nullptr),
            TILELOSS_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tileloss_last_error()).find("token_weights"), std::string::npos);
}

TEST_P(Focal, ValueAndGradAgreesInEverySchedule) {
  for (const double gamma : {0.0, 1.0, 2.0, 3.5}) {
    for (const tileloss_schedule schedule : kSchedules) {
      for (const bool in_place : {false, true}) {
        LogitsCase c({.rows = 9,
                      .vocab = 2100,
                      .format = GetParam(),
                      .ignore_prob = 0.3,
                      .loss_grad = Upstream::kScalar,
                      .in_place = in_place});
        FocalOptions o = options();
        o.gamma = gamma;
        o.logit.temperature.value = 0.5;
        ASSERT_TRUE(runs("focal", TILELOSS_VALUE_AND_GRAD, c.args(), &o, with_schedule(schedule)));
        ASSERT_TRUE(agrees_with_oracle(c, o, true));
      }
    }
  }
}

TEST_P(Focal, PerRowLossesTakeAnUpstreamGradientPerRow) {
  LogitsCase c({.rows = 9, .vocab = 300, .format = GetParam(), .loss_grad = Upstream::kStrided, .per_row_loss = true});
  FocalOptions o = options();
  o.reduction = TILELOSS_REDUCTION_NONE;
  ASSERT_TRUE(runs("focal", TILELOSS_VALUE_AND_GRAD, c.args(), &o, plan_options()));
  ASSERT_TRUE(agrees_with_oracle(c, o, true));
}

TEST_P(Focal, BackwardFromTheForwardsStateAndWithoutItAgree) {
  LogitsCase c({.rows = 9, .vocab = 2100, .format = GetParam(), .ignore_prob = 0.3});
  const FocalOptions o = options();
  const tileloss_matrix dlogits = c.args().dlogits;
  RowStateArrays state(9);
  c.args().dlogits = {};
  c.args().row_state = &state.get();
  ASSERT_TRUE(runs("focal", TILELOSS_FORWARD, c.args(), &o, plan_options()));
  c.args().dlogits = dlogits;
  ASSERT_TRUE(runs("focal", TILELOSS_BACKWARD, c.args(), &o, plan_options()));
  ASSERT_TRUE(agrees_with_oracle(c, o, true));
  c.reset();
  c.args().row_state = nullptr;
  ASSERT_TRUE(runs("focal", TILELOSS_BACKWARD, c.args(), &o, plan_options()));
  ASSERT_TRUE(agrees_with_oracle(c, o, false));
  for (const unsigned char byte : bytes_of(c.args().loss)) EXPECT_EQ(byte, 0xff);  // a backward writes no value
}

}  // namespace
}  // namespace tileloss::test
