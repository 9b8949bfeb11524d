// The exp of the sweeps, value by value: of rows with two columns, 0 at the label and x, the state's sum is exp(x) and nothing
// else.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <limits>
#include <vector>

#include "tests/api/calls.h"

namespace tileloss::test {
namespace {

using oracle::NumberFormat;

class SweepExp : public testing::TestWithParam<NumberFormat> {
 protected:
  // exp(x) for each x <= 0, a number of the format; or of what the softcap makes of x. The label's column is the maximum.
  static std::vector<float> exp(const std::vector<double>& x, double softcap = 0) {
    const auto rows = static_cast<std::int64_t>(x.size());
    std::vector<double> values;
    for (const double v : x) values.insert(values.end(), {0.0, v});
    std::vector<unsigned char> logits(values.size() * oracle::format_info(GetParam()).bytes);
    oracle::encode_row(GetParam(), values, logits.data());
    const std::vector<std::int32_t> labels(x.size(), 0);
    RowStateArrays state(rows);
    tileloss_args args;
    tileloss_args_init(&args);
    args.logits = tileloss_make_matrix(logits.data(), abi_dtype(GetParam()), rows, 2, 2);
    args.labels = tileloss_make_vector(labels.data(), TILELOSS_INT32, rows);
    args.row_state = &state.get();
    tileloss_logprobs_options options = logprobs_options();
    options.logit.softcap = softcap;
    EXPECT_TRUE(succeeds(tileloss_logprobs(&args, &options, nullptr, nullptr)));
    return state.floats()[1];
  }

  // `count` numbers of the format in [from, to].
  static std::vector<double> numbers(double from, double to, int count) {
    std::vector<double> x;
    for (int i = 0; i <= count; ++i) {
      unsigned char bits[4] = {};
      oracle::encode_at(GetParam(), bits, 0, from + (to - from) * i / count);
      x.push_back(oracle::decode_at(GetParam(), bits, 0));
    }
    return x;
  }
};
INSTANTIATE_TEST_SUITE_P(Formats, SweepExp, testing::ValuesIn(kFormats),
                         [](const auto& param) { return std::string(oracle::format_info(param.param).name); });

// In units in the last place: a constant for the exponential itself (under 16-bit storage a polynomial one term shorter, or a
// table), and 1.25 |x| for the exponent x log2(e), which is rounded to float32 once and whose log2(e) is a float32 too.
TEST_P(SweepExp, StaysWithinItsStatedErrorOverItsRange) {
  const double constant = GetParam() == NumberFormat::kFloat32 ? 1.1 : 6.5;
  for (const auto& [from, to] :
       {std::pair{-1e-3, 0.0}, {-1.0, -1e-3}, {-4.0, -1.0}, {-16.0, -4.0}, {-50.0, -16.0}, {-85.2, -50.0}}) {
    const std::vector<double> x = numbers(from, to, 100000);
    const std::vector<float> e = exp(x);
    double worst = 0, worst_of_allowed = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double exact = std::exp(x[i]);
      const double ulps = std::fabs(e[i] - exact) / std::ldexp(1.0, std::ilogb(exact) - 23);
      worst = std::max(worst, ulps);
      worst_of_allowed = std::max(worst_of_allowed, ulps / (constant + 1.25 * std::fabs(x[i])));
    }
    std::printf("%s exp on [%g, %g]: at most %.2f ULP, %.2f of what is allowed\n", oracle::format_info(GetParam()).name, from, to,
                worst, worst_of_allowed);
    EXPECT_LE(worst_of_allowed, 1);
  }
}

TEST_P(SweepExp, IsExactAtZero) { EXPECT_EQ(exp({0.0, -0.0}), (std::vector<float>{1, 1})); }

TEST_P(SweepExp, UnderflowsToZeroAndNothingElse) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  for (const float e : exp({-104, -128, -1000, -65504, -1e15, -1.2345678e30, -2e38, -kInf})) EXPECT_EQ(e, 0.0F);
  // Between 8 times the smallest normal number and 0 a flush is allowed, anything else is not.
  const std::vector<double> x = numbers(-104, -85.2, 2000);
  const std::vector<float> e = exp(x);
  for (std::size_t i = 0; i < x.size(); ++i) {
    EXPECT_GE(e[i], 0.0F);
    EXPECT_LE(std::fabs(e[i] - std::exp(x[i])), 8.08 * static_cast<double>(std::numeric_limits<float>::min())) << x[i];
  }
}

// Where |x| is so large that its exponent has no digits behind the point, and with a softcap that of tanh.
TEST_P(SweepExp, IsThatOfTheCapForHugeLogits) {
  for (const float e : exp({-65504, -1e15, -1.2345678e30, -2e38}, 8)) EXPECT_NEAR(e / std::exp(-8.0), 1, 1e-6);
}

}  // namespace
}  // namespace tileloss::test
