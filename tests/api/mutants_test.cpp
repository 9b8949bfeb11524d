// The judgement can fail: planted into real kernel output, every mutant is rejected by some gate, in every storage type.
#include "check/judge/mutants.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <string>

#include "check/judge/error_metric.h"
#include "check/oracles/row_outputs.h"
#include "tests/api/calls.h"

namespace tileloss::test {
namespace {

using reference::NumberFormat;
using tools::Mutant;

constexpr std::int64_t kRows = 6, kGroupRows = 3, kVocab = 319, kTile = 64;  // the last tile has 63 columns

// A kernel's outputs with their oracle, row by row; judged with or without a mutant.
struct Experiment {
  // Rows in groups; one row's label is its argmax.
  explicit Experiment(const LogitsCaseSpec& spec) : c(spec, LogitsCase::Open{}) {
    c.set_logit(1, c.labels()[1], 8);
    c.seal();
    c.args().row_groups = {kGroupRows, kGroupRows * c.row_stride(), kGroupRows * c.row_stride()};
  }

  LogitsCase c;
  tileloss_cross_entropy_options options = cross_entropy_options();
  bool is_logprobs = false;

  reference::SoftmaxRow softmax;
  reference::GradientRow gradient;
  tools::MutantContext context;
  std::vector<double> logp;

  void prepare(std::int64_t tile) {
    const tileloss_args& a = c.args();
    for (std::int64_t i = 0; i < c.spec().rows; ++i) logp.push_back(float_at(a.logp, i));
    context.rows = c.spec().rows;
    context.cols = c.valid_columns();
    context.tile = tile;
    context.has_dlogits = true;
    context.has_loss = a.loss.dtype != TILELOSS_NONE;
    context.per_row_loss = c.spec().per_row_loss;
    context.has_logp = true;
    context.has_argmax = true;
    context.entropy_upstream = c.spec().entropy_grad != Upstream::kAbsent;
    context.nonuniform_upstream = is_logprobs || c.spec().loss_grad == Upstream::kPerRow;
    context.kernel_logp = logp;
    context.group_rows = kGroupRows;
    context.kernel_dlogits = [this](std::int64_t row) { return c.dlogits_row(row); };
  }

  // Names of the gates that failed; sets `planted` if the mutant changed anything.
  std::string judge(const Mutant* mutant, bool& planted) {
    const reference::CrossEntropyOptions oracle_options = make_oracle_options(options);
    const reference::CrossEntropy oracle(oracle_options, c.labels(), {}, {}, c.loss_grad());
    tools::GradientMetric gradients(c.spec().format);
    tools::OutputMetric losses("loss"), logps("logp"), lses("lse");
    tools::ExactMetric argmaxes("argmax");
    std::vector<reference::RowLoss> row_losses;
    const tileloss_args& a = c.args();
    planted = false;
    for (std::int64_t i = 0; i < c.spec().rows; ++i) {
      softmax.compute(oracle_options.transform, c.logits_row(i), c.labels()[static_cast<std::size_t>(i)]);
      if (is_logprobs) {
        reference::logprobs_gradient(softmax, c.upstream(i), gradient);
      } else {
        oracle.row_gradient(i, softmax, gradient);
        row_losses.push_back(oracle.row_loss(i, softmax));
      }
      const auto* kernel_row = static_cast<const unsigned char*>(c.dlogits_row(i));
      std::vector<unsigned char> row(
          kernel_row, kernel_row + static_cast<std::size_t>(kVocab) * reference::format_info(c.spec().format).bytes);
      float loss = context.per_row_loss ? float_at(a.loss, i) : 0, row_logp = float_at(a.logp, i), lse = float_at(a.lse, i);
      std::int64_t argmax = static_cast<const std::int64_t*>(a.argmax.data)[i];
      if (mutant != nullptr && mutant->apply_row != nullptr) {
        tools::MutantRowOracle row_oracle{&softmax, &gradient, 1, 1, c.upstream(i), c.upstream(0)};
        if (!is_logprobs) {
          row_oracle.loss_upstream = oracle.upstream(i);
          row_oracle.first_loss_upstream = oracle.upstream(0);
        }
        tools::MutantRow outputs{i, c.spec().format, row.data(), context.per_row_loss ? &loss : nullptr};
        outputs.outputs[tools::kLogp] = row_logp;
        outputs.outputs[tools::kLse] = lse;
        outputs.outputs[tools::kArgmax] = static_cast<double>(argmax);
        planted |= mutant->apply_row(context, row_oracle, outputs);
        row_logp = static_cast<float>(*outputs.outputs[tools::kLogp]);
        lse = static_cast<float>(*outputs.outputs[tools::kLse]);
        argmax = static_cast<std::int64_t>(*outputs.outputs[tools::kArgmax]);
      }
      gradients.add_row(i, row.data(), kVocab, tools::make_row_reference(softmax, gradient));
      const tools::OutputMagnitudes magnitudes = tools::output_magnitudes(softmax);
      logps.add(i, row_logp, softmax.outputs().logp, magnitudes[tools::kLogp]);
      lses.add(i, lse, softmax.outputs().lse, magnitudes[tools::kLse]);
      if (context.per_row_loss) losses.add(i, loss, row_losses.back().total(), tools::loss_magnitude(softmax, row_losses.back()));
      argmaxes.add(i, argmax, softmax.outputs().argmax);
    }
    if (context.has_loss && !context.per_row_loss) {
      float loss = float_at(a.loss, 0);
      if (mutant != nullptr && mutant->apply_loss != nullptr) planted |= mutant->apply_loss(context, &loss);
      losses.add(-1, loss, oracle.reduce(row_losses), 0);
    }
    std::string failed;
    for (const auto& gates : {gradients.gates(), logps.gates(), lses.gates(),
                              context.has_loss ? losses.gates() : std::vector<tools::Gate>{}, argmaxes.gates()}) {
      for (const tools::Gate& gate : gates) {
        if (!gate.pass) failed += (failed.empty() ? "" : " ") + gate.name;
      }
    }
    return failed;
  }
};

class Mutants : public testing::TestWithParam<NumberFormat> {
 protected:
  // Runs the kernel as `e` says, then plants every mutant; remembers the gates that caught each.
  void expect_rejections(Experiment& e, const std::string& family) {
    tileloss_plan_options wishes = plan_options();
    wishes.vocab_block = kTile;
    tileloss_logprobs_options logprobs = logprobs_options();
    logprobs.logit = e.options.logit;
    if (e.is_logprobs) {
      const tileloss_args all = e.c.args();
      e.c.args().dlogits = {};
      e.c.args().logp_grad = e.c.args().lse_grad = e.c.args().entropy_grad = {};
      ASSERT_TRUE(runs("logprobs", TILELOSS_FORWARD, e.c.args(), &logprobs, wishes));
      e.c.args() = all;
      ASSERT_TRUE(runs("logprobs", TILELOSS_BACKWARD, e.c.args(), &logprobs, wishes));
    } else {
      ASSERT_TRUE(runs_value_and_grad(e.c, e.options, wishes));
    }
    e.prepare(kTile);
    bool planted = false;
    ASSERT_EQ(e.judge(nullptr, planted), "") << family << ": the kernel's own output";
    for (const Mutant& mutant : tools::all_mutants()) {
      if (!mutant.applies(e.context)) continue;
      const std::string gates = e.judge(&mutant, planted);
      EXPECT_TRUE(planted) << family << ": " << mutant.name << " changed nothing";
      EXPECT_NE(gates, "") << family << ": " << mutant.name << " (" << mutant.description << ") was let through";
      caught_[mutant.name] += " [" + family + "] " + gates;
    }
  }

  std::map<std::string, std::string> caught_;
};
INSTANTIATE_TEST_SUITE_P(Formats, Mutants, testing::ValuesIn(kFormats),
                         [](const auto& param) { return std::string(reference::format_info(param.param).name); });

TEST_P(Mutants, AreAllRejected) {
  const LogitsCaseSpec base{.rows = kRows, .vocab = kVocab, .format = GetParam(), .extra_outputs = true};
  LogitsCaseSpec per_row = base;
  per_row.per_row_loss = true;
  per_row.loss_grad = Upstream::kPerRow;
  LogitsCaseSpec upstream = base;
  upstream.loss = false;
  upstream.logp_grad = upstream.lse_grad = upstream.entropy_grad = Upstream::kPerRow;
  for (const int family : {0, 1, 2, 3, 4}) {
    Experiment e(family == 1 ? per_row : family == 4 ? upstream : base);
    const char* const names[] = {"mean", "none", "smoothed", "softcap", "logprobs"};
    if (family == 1) e.options.reduction = TILELOSS_REDUCTION_NONE;
    if (family == 2) e.options.label_smoothing = 0.1;
    if (family == 3) e.options.logit.softcap = 10;
    e.is_logprobs = family == 4;
    expect_rejections(e, names[family]);
  }
  for (const Mutant& mutant : tools::all_mutants()) {
    if (std::string(mutant.name) == "agreement_flipped") continue;  // of functions with a teacher
    EXPECT_TRUE(caught_.contains(mutant.name)) << mutant.name << " was never planted";
    std::printf("%-26s %s\n", mutant.name, caught_[mutant.name].c_str());
  }
}

}  // namespace
}  // namespace tileloss::test
