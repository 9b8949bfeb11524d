// The test case and its judgement, without a kernel: outputs written from the oracle pass, corrupted ones do not.
#include "tests/shared/logits_case.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>

namespace tileloss::test {
namespace {

float* floats(const tileloss_vector& vector) { return static_cast<float*>(vector.data); }

void write_row_outputs(LogitsCase& c, std::int64_t row, const oracle::RowOutputs& outputs) {
  const tileloss_args& args = c.args();
  const auto put = [&](const tileloss_vector& vector, double value) {
    if (vector.dtype != TILELOSS_NONE) floats(vector)[row] = static_cast<float>(value);
  };
  put(args.logp, outputs.logp);
  put(args.lse, outputs.lse);
  put(args.entropy, outputs.entropy);
  put(args.log_sum_sq_probs, outputs.log_sum_sq_probs);
  put(args.mean_logit, outputs.mean_logit);
  if (args.argmax.dtype != TILELOSS_NONE) static_cast<std::int64_t*>(args.argmax.data)[row] = outputs.argmax;
  if (args.correct.dtype != TILELOSS_NONE) static_cast<std::uint8_t*>(args.correct.data)[row] = outputs.correct ? 1 : 0;
}

void write_dlogits(LogitsCase& c, std::int64_t row, const std::vector<double>& gradient) {
  void* start = const_cast<void*>(c.dlogits_row(row));
  for (std::int64_t j = 0; j < c.spec().vocab; ++j) {
    oracle::encode_at(c.spec().format, start, j, j < c.valid_columns() ? gradient[static_cast<std::size_t>(j)] : 0.0);
  }
}

// The outputs of a perfect cross_entropy_value_and_grad.
void write_cross_entropy(LogitsCase& c, const tileloss_cross_entropy_options& options) {
  const oracle::CrossEntropyOptions oracle_options = make_oracle_options(options);
  const oracle::CrossEntropy oracle(oracle_options, c.labels(), c.token_weights(), c.class_weights(), c.loss_grad());
  std::vector<oracle::RowLoss> losses;
  oracle::SoftmaxRow softmax;
  oracle::GradientRow gradient;
  for (std::int64_t i = 0; i < c.spec().rows; ++i) {
    const bool ignored = oracle.is_ignored(i);
    const std::int64_t label = ignored ? 0 : c.labels()[static_cast<std::size_t>(i)];
    softmax.compute(oracle_options.transform, c.logits_row(i), label);
    write_row_outputs(c, i, ignored ? oracle::RowOutputs{} : softmax.outputs());
    losses.push_back(oracle.row_loss(i, softmax));
    oracle.row_gradient(i, softmax, gradient);
    write_dlogits(c, i, gradient.gradient);
    if (c.spec().per_row_loss) floats(c.args().loss)[i] = static_cast<float>(losses.back().total());
  }
  if (!c.spec().per_row_loss) floats(c.args().loss)[0] = static_cast<float>(oracle.reduce(losses));
}

LogitsCaseSpec full_spec(oracle::NumberFormat format, bool in_place) {
  LogitsCaseSpec spec;
  spec.rows = 7;
  spec.vocab = 129;
  spec.valid_vocab = 120;
  spec.stride_extra = 13;
  spec.misalignment = 3;
  spec.format = format;
  spec.ignore_prob = 0.3;
  spec.token_weights = true;
  spec.loss_grad = Upstream::kScalar;
  spec.extra_outputs = true;
  spec.in_place = in_place;
  return spec;
}

tileloss_cross_entropy_options full_options() {
  tileloss_cross_entropy_options options;
  tileloss_cross_entropy_options_init(&options);
  options.logit.valid_vocab = 120;
  options.logit.softcap = 20.0;
  options.label_smoothing = 0.1;
  options.z_loss = 1e-3;
  return options;
}

TEST(LogitsCase, APerfectKernelPasses) {
  for (const oracle::NumberFormat format : kFormats) {
    for (const bool in_place : {false, true}) {
      LogitsCase c(full_spec(format, in_place));
      const tileloss_cross_entropy_options options = full_options();
      write_cross_entropy(c, options);
      EXPECT_TRUE(agrees(check_cross_entropy(c, options)));
      EXPECT_FALSE(check_cross_entropy(c, options).mistrusted);
      c.reset();
      EXPECT_FALSE(agrees(check_cross_entropy(c, options)));
    }
  }
}

TEST(LogitsCase, EveryCorruptedOutputIsNamed) {
  const tileloss_cross_entropy_options options = full_options();
  const auto corrupted = [&](const std::function<void(LogitsCase&)>& corrupt) {
    LogitsCase c(full_spec(oracle::NumberFormat::kBfloat16, false));
    write_cross_entropy(c, options);
    corrupt(c);
    std::string failed;
    for (const tools::Gate& gate : check_cross_entropy(c, options).gates) {
      if (!gate.pass) failed += gate.name + " ";
    }
    return failed;
  };
  EXPECT_EQ(corrupted([](LogitsCase& c) { floats(c.args().loss)[0] *= 1.001F; }), "loss ");
  EXPECT_EQ(corrupted([](LogitsCase& c) { floats(c.args().logp)[0] += 0.01F; }), "logp ");
  EXPECT_EQ(corrupted([](LogitsCase& c) { floats(c.args().lse)[6] = NAN; }), "lse/nonfinite ");
  EXPECT_EQ(corrupted([](LogitsCase& c) { floats(c.args().entropy)[1] += 0.01F; }), "entropy ");
  EXPECT_EQ(corrupted([](LogitsCase& c) { floats(c.args().log_sum_sq_probs)[1] += 0.01F; }), "log_sum_sq_probs ");
  EXPECT_EQ(corrupted([](LogitsCase& c) { floats(c.args().mean_logit)[1] += 0.01F; }), "mean_logit ");
  EXPECT_EQ(corrupted([](LogitsCase& c) { static_cast<std::uint8_t*>(c.args().correct.data)[1] ^= 1; }), "correct ");
  EXPECT_EQ(corrupted([](LogitsCase& c) {
              static_cast<std::int64_t*>(c.args().argmax.data)[0] =
                  (static_cast<std::int64_t*>(c.args().argmax.data)[0] + 1) % 120;
            }),
            "argmax ");
  // Padding columns, and the gap between two rows.
  const auto set_dlogit = [](LogitsCase& c, std::int64_t column) {
    oracle::encode_at(c.spec().format, const_cast<void*>(c.dlogits_row(0)), column, 0.5);
  };
  EXPECT_EQ(corrupted([&](LogitsCase& c) { set_dlogit(c, 125); }), "dlogits/nonzero_where_ignored ");
  EXPECT_EQ(corrupted([&](LogitsCase& c) { set_dlogit(c, 130); }), "surroundings_written ");
}

TEST(LogitsCase, IgnoredRowsAndPaddingHoldNaN) {
  LogitsCaseSpec spec = full_spec(oracle::NumberFormat::kFloat32, false);
  spec.rows = 40;
  const LogitsCase c(spec);
  const auto* logits = static_cast<const float*>(c.args().logits.data);
  int ignored = 0;
  for (std::int64_t i = 0; i < spec.rows; ++i) {
    const bool is_ignored = c.labels()[static_cast<std::size_t>(i)] == -100;
    ignored += is_ignored ? 1 : 0;
    EXPECT_EQ(std::isnan(logits[i * c.row_stride()]), is_ignored);
    EXPECT_TRUE(std::isnan(logits[i * c.row_stride() + 120]));
  }
  EXPECT_GT(ignored, 0);
  EXPECT_LT(ignored, 40);
}

TEST(LogitsCase, UpstreamGradientsComeInEveryLayout) {
  for (const Upstream kind : kUpstreams) {
    LogitsCaseSpec spec;
    spec.rows = 5;
    spec.logp_grad = kind;
    const LogitsCase c(spec);
    const tileloss_vector& grad = c.args().logp_grad;
    EXPECT_EQ(grad.dtype == TILELOSS_NONE, kind == Upstream::kAbsent);
    if (kind == Upstream::kAbsent) continue;
    EXPECT_EQ(grad.size, 5);
    for (std::int64_t i = 0; i < 5; ++i) {
      EXPECT_EQ(static_cast<double>(floats(grad)[i * grad.stride]), c.upstream(i).logp);
    }
    EXPECT_EQ(grad.stride, kind == Upstream::kPerRow ? 1 : kind == Upstream::kStrided ? 3 : 0);
  }
}

TEST(LogitsCase, ValuesCanBeSetBeforeItIsSealed) {
  LogitsCaseSpec spec;
  spec.format = oracle::NumberFormat::kBfloat16;
  LogitsCase c(spec, LogitsCase::Open{});
  c.set_logit(2, 5, -INFINITY);
  c.seal();
  EXPECT_EQ(c.logits_row(2)[5], -INFINITY);
}

TEST(LogitsCase, NothingCheckedIsNoPass) { EXPECT_FALSE(agrees(CheckResult{})); }

}  // namespace
}  // namespace tileloss::test
