// Every mutant of a perfect kernel (the oracle's values, rounded once) is rejected by the metric, for every dtype, output and
// family of options; and the perfect kernel itself passes. Planted into real kernel output, every mutant is rejected, too.
#include "judge/gates/mutants.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "judge/gates/error_metric.h"
#include "judge/oracles/row_outputs.h"
#include "support/synthetic.h"
#include "tests/shared/gradcheck_call.h"
#include "tests/shared/input_families.h"

namespace tileloss::tools {
namespace {

using oracle::NumberFormat;

constexpr std::int64_t kRows = 6;
constexpr std::int64_t kColumns = 703;  // 63 more than a multiple of 64
constexpr std::int64_t kGroupRows = 3;
constexpr std::int64_t kCorrectRow = 2;  // its label is its argmax, where there is an entropy
constexpr std::int64_t kTile = 256;

struct Family {
  std::string name;
  bool logprobs = false;
  oracle::CrossEntropyOptions options;
  bool per_row_upstream = false;
  bool entropy = false;
  const char* distribution = "normal";
};

std::vector<Family> families() {
  std::vector<Family> all;
  const auto add = [&](const char* name, auto&& change) {
    Family family;
    family.name = name;
    change(family);
    all.push_back(family);
  };
  const auto none = [](Family& family) {
    family.options.reduction = oracle::Reduction::kNone;
    family.per_row_upstream = true;
  };
  add("mean", [](Family&) {});
  add("sum", [](Family& family) { family.options.reduction = oracle::Reduction::kSum; });
  add("none", none);
  add("smoothing", [](Family& family) { family.options.label_smoothing = 0.1; });
  add("z_loss", [](Family& family) { family.options.z_loss = 1e-2; });
  add("softcap", [](Family& family) { family.options.transform = {1.0, 5.0, 1.0, oracle::TemperatureOn::kLogits}; });
  add("temperature", [](Family& family) { family.options.transform = {1.0, 0.0, 0.7, oracle::TemperatureOn::kLogits}; });
  add("on_logprob", [](Family& family) { family.options.transform = {1.0, 0.0, 0.7, oracle::TemperatureOn::kLogprob}; });
  add("confident", [](Family& family) { family.distribution = "confident"; });
  add("none_wide", [&](Family& family) {
    none(family);
    family.distribution = "wide";
  });
  add("logprobs", [](Family& family) { family.logprobs = family.per_row_upstream = true; });
  add("logprobs_entropy", [](Family& family) { family.logprobs = family.per_row_upstream = family.entropy = true; });
  return all;
}

// A perfect kernel's outputs.
struct KernelRun {
  MutantContext context;
  std::vector<std::int64_t> labels;
  std::vector<double> loss_grad;
  std::vector<oracle::RowUpstream> upstream;
  std::vector<oracle::SoftmaxRow> softmax;
  std::vector<oracle::GradientRow> gradients;
  std::vector<oracle::RowLoss> losses;
  std::vector<std::vector<unsigned char>> dlogits;
  std::vector<double> logp;
  std::vector<float> lse, row_loss;
  std::vector<std::int64_t> argmax;
  float loss = 0.0F;
  double loss_reference = 0.0;
};

void run_row(const Family& family, NumberFormat format, const oracle::CrossEntropy& oracle, std::int64_t row, KernelRun& run) {
  const auto i = static_cast<std::size_t>(row);
  const std::size_t bytes = kColumns * oracle::format_info(format).bytes;
  std::vector<unsigned char> stored(bytes);
  fill_logits_row(*find_distribution(family.distribution), 9, row, run.labels[i], format, stored.data(), kColumns);
  std::vector<double> logits(kColumns);
  oracle::decode_row(format, stored.data(), logits);
  if (family.entropy && row == kCorrectRow) {
    run.labels[i] = std::max_element(logits.begin(), logits.end()) - logits.begin();
  }
  run.softmax[i].compute(family.options.transform, logits, run.labels[i]);
  run.losses[i] = oracle.row_loss(row, run.softmax[i]);
  if (family.logprobs) {
    oracle::logprobs_gradient(run.softmax[i], run.upstream[i], run.gradients[i]);
  } else {
    oracle.row_gradient(row, run.softmax[i], run.gradients[i]);
  }
  run.dlogits[i].resize(bytes);
  oracle::encode_row(format, run.gradients[i].gradient, run.dlogits[i].data());
  const oracle::RowOutputs outputs = run.softmax[i].outputs();
  run.logp[i] = static_cast<double>(static_cast<float>(outputs.logp));
  run.lse[i] = static_cast<float>(outputs.lse);
  run.row_loss[i] = static_cast<float>(run.losses[i].total());
  run.argmax[i] = outputs.argmax;
}

KernelRun run_perfect_kernel(const Family& family, NumberFormat format) {
  KernelRun run;
  run.labels = make_labels({kColumns, 0.0, -100}, 9, kRows);
  for (std::int64_t i = 0; family.per_row_upstream && i < kRows; ++i) run.loss_grad.push_back(1.0 + 0.5 * static_cast<double>(i));
  for (std::int64_t i = 0; i < kRows; ++i) {
    const double step = static_cast<double>(i);
    run.upstream.push_back({family.entropy ? 0.5 : 1.0 + 0.5 * step, family.entropy ? 0.25 : 0.0, family.entropy ? 0.8 : 0.0});
    if (family.entropy) run.upstream.back().logp += 0.3 * step;
  }
  run.softmax.resize(kRows);
  run.gradients.resize(kRows);
  run.losses.resize(kRows);
  run.dlogits.resize(kRows);
  run.logp.resize(kRows);
  run.lse.resize(kRows);
  run.row_loss.resize(kRows);
  run.argmax.resize(kRows);
  const bool per_row = family.options.reduction == oracle::Reduction::kNone;
  const std::span<const double> grad = family.logprobs ? std::span<const double>{} : std::span<const double>(run.loss_grad);
  const oracle::CrossEntropy oracle(family.options, run.labels, {}, {}, grad);
  for (std::int64_t i = 0; i < kRows; ++i) run_row(family, format, oracle, i, run);
  run.loss_reference = oracle.reduce(run.losses);
  run.loss = static_cast<float>(run.loss_reference);
  run.context = {kRows,   kColumns, kTile, true, !family.logprobs, per_row, true, true, family.entropy, family.per_row_upstream,
                 run.logp};
  run.context.group_rows = kGroupRows;
  run.context.has_agreement = true;
  return run;
}

struct Verdict {
  bool planted = false;
  std::set<std::string> failed_gates;
};

const Mutant& mutant_named(std::string_view name) {
  const auto found = std::ranges::find(all_mutants(), name, [](const Mutant& mutant) { return std::string_view(mutant.name); });
  EXPECT_NE(found, all_mutants().end()) << name;
  return *found;
}

// `mutant` null: the outputs as they are.
Verdict judge(const Family& family, NumberFormat format, const KernelRun& run, const Mutant* mutant) {
  Verdict verdict;
  MutantContext context = run.context;
  context.kernel_dlogits = [&](std::int64_t row) { return run.dlogits[static_cast<std::size_t>(row)].data(); };
  GradientMetric dlogits_metric(format);
  OutputMetric logp_metric("logp"), lse_metric("lse"), loss_metric("loss");
  OutputMetric argmax_metric("argmax", true), agreement_metric("agreement", true);
  for (std::size_t i = 0; i < kRows; ++i) {
    std::vector<unsigned char> dlogits = run.dlogits[i];
    float logp = static_cast<float>(run.logp[i]), lse = run.lse[i], loss = run.row_loss[i];
    std::int64_t argmax = run.argmax[i];
    MutantRow row{static_cast<std::int64_t>(i), format, dlogits.data(), run.context.per_row_loss ? &loss : nullptr};
    row.outputs[kLogp] = logp;
    row.outputs[kLse] = lse;
    row.outputs[kArgmax] = static_cast<double>(argmax);
    row.outputs[kAgreement] = 1;
    MutantRowOracle oracle;
    oracle.softmax = &run.softmax[i];
    oracle.gradient = &run.gradients[i];
    if (family.logprobs) {
      oracle.upstream = run.upstream[i];
      oracle.first_upstream = run.upstream[0];
    } else if (!run.loss_grad.empty()) {
      oracle.loss_upstream = run.loss_grad[i];
      oracle.first_loss_upstream = run.loss_grad[0];
    }
    if (mutant != nullptr) verdict.planted |= mutant->apply_row(context, oracle, row);
    logp = static_cast<float>(*row.outputs[kLogp]);
    lse = static_cast<float>(*row.outputs[kLse]);
    argmax = static_cast<std::int64_t>(*row.outputs[kArgmax]);
    agreement_metric.add(row.row, *row.outputs[kAgreement], 1);
    dlogits_metric.add_row(row.row, dlogits.data(), kColumns, make_row_reference(run.softmax[i], run.gradients[i]));
    const oracle::RowOutputs outputs = run.softmax[i].outputs();
    const OutputMagnitudes magnitudes = output_magnitudes(run.softmax[i]);
    logp_metric.add(row.row, logp, outputs.logp, magnitudes[kLogp]);
    lse_metric.add(row.row, lse, outputs.lse, magnitudes[kLse]);
    argmax_metric.add(row.row, argmax_agrees(run.softmax[i], argmax) ? 1 : 0, 1);
    if (run.context.per_row_loss) {
      loss_metric.add(row.row, loss, run.losses[i].total(), loss_magnitude(run.softmax[i], run.losses[i]));
    }
  }
  float loss = run.loss;
  if (!run.context.per_row_loss && run.context.has_loss) {
    if (mutant != nullptr) verdict.planted |= mutant->apply_loss(&loss);
    loss_metric.add(-1, loss, run.loss_reference, 0.0);
  }
  for (const auto& gates : {dlogits_metric.gates(), logp_metric.gates(), lse_metric.gates(), loss_metric.gates(),
                            argmax_metric.gates(), agreement_metric.gates()}) {
    for (const Gate& gate : gates) {
      if (!gate.pass) verdict.failed_gates.insert(gate.name);
    }
  }
  return verdict;
}

TEST(Mutants, EachIsRejectedForEveryFormatAndFamily) {
  std::map<std::string, int> planted;
  for (const Family& family : families()) {
    for (const NumberFormat format : test::kFormats) {
      SCOPED_TRACE(family.name + " " + oracle::format_info(format).name);
      const KernelRun run = run_perfect_kernel(family, format);
      EXPECT_TRUE(judge(family, format, run, nullptr).failed_gates.empty());
      for (const Mutant& mutant : all_mutants()) {
        if (!mutant.applies(run.context)) continue;
        const Verdict verdict = judge(family, format, run, &mutant);
        if (!verdict.planted) continue;
        ++planted[std::string(mutant.name) + " " + oracle::format_info(format).name];
        EXPECT_FALSE(verdict.failed_gates.empty()) << mutant.name;
      }
    }
  }
  // Each of them, in each format, has been there at least once.
  EXPECT_EQ(planted.size(), all_mutants().size() * test::kFormats.size());
  for (const auto& [name, count] : planted) EXPECT_GT(count, 0) << name;
}

TEST(Mutants, AreCaughtByTheGateThatWatchesTheirOutput) {
  const Family mean;
  const std::map<std::string, std::string> expected{{"gradient_halved", "dlogits/ulp_off_target"},
                                                    {"off_target_zeroed", "dlogits/ulp_off_target"},
                                                    {"target_not_subtracted", "dlogits/ulp_target"},
                                                    {"last_tile_dropped", "dlogits/ulp_off_target"},
                                                    {"partial_tile_skipped", "dlogits/ulp_off_target"},
                                                    {"row_group_off_by_one", "dlogits/ulp_off_target"},
                                                    {"last_tile_twice", "logp"},
                                                    {"loss_halved", "loss"},
                                                    {"logp_of_neighbour", "logp"},
                                                    {"argmax_off_by_one", "argmax"},
                                                    {"agreement_flipped", "agreement"}};
  const KernelRun run = run_perfect_kernel(mean, NumberFormat::kBfloat16);
  for (const auto& [name, gate] : expected)
    EXPECT_TRUE(judge(mean, NumberFormat::kBfloat16, run, &mutant_named(name)).failed_gates.contains(gate)) << name;
}

TEST(Mutants, ApplyOnlyWhereTheirOutputIs) {
  MutantContext nothing;
  nothing.cols = kColumns;
  nothing.rows = kRows;
  for (const Mutant& mutant : all_mutants()) EXPECT_FALSE(mutant.applies(nothing)) << mutant.name;
}

TEST(Mutants, WhatChangesNothingVisibleIsNotPlanted) {
  KernelRun run = run_perfect_kernel({}, NumberFormat::kFloat32);
  std::vector<float> zeros(kColumns, 0.0F);
  MutantRow row{0, NumberFormat::kFloat32, zeros.data(), nullptr};
  const MutantRowOracle oracle{&run.softmax[0], &run.gradients[0], 1.0, 1.0, {}, {}};
  EXPECT_FALSE(mutant_named("gradient_halved").apply_row(run.context, oracle, row));
  EXPECT_FALSE(mutant_named("gradient_zero").apply_row(run.context, oracle, row));
  EXPECT_FALSE(mutant_named("gradient_negated").apply_row(run.context, oracle, row));
  EXPECT_FALSE(mutant_named("loss_halved").apply_row(run.context, oracle, row));
}

// A last tile of 63 columns; rows in groups; confident rows' labels are their argmax.
TEST(Mutants, OfRealKernelsAreAllRejected) {
  constexpr const char* kConfig =
      "loss=cross_entropy batch_size=6 seq_len=7 vocab_size=319 ignore_prob=0.1 "
      "kernel.row_groups=true kernel.vocab_block=64 outputs=[logp, lse, entropy, argmax, correct]";
  for (const NumberFormat format : test::kFormats) {
    const std::string dtype = std::string("dtype=") + oracle::format_info(format).name;
    std::set<std::string> named;
    for (const Sets& family : {Sets{},
                               {"reduction=none", "upstream=per_row"},
                               {"label_smoothing=0.1"},
                               {"softcap=10"},
                               {"loss=logprobs", "upstream=per_row", "source.distribution=confident", "temperature=4"}}) {
      for (const MutantVerdict& mutant : GradcheckCall(kConfig, joined(family, {dtype})).all_mutants()) {
        named.insert(mutant.name);
        EXPECT_TRUE(mutant.planted) << mutant.name << ", " << dtype;
      }
    }
    EXPECT_EQ(named.size(), all_mutants().size() - 1);  // agreement is of a teacher
  }
}

}  // namespace
}  // namespace tileloss::tools
