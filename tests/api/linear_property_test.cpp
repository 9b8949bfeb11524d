// Random shapes, layouts, options and workspaces of the functions with LM heads, all pairs of them: every case must agree with
// the oracle in the workspace that was planned.
// On toy and cuda: RandomLinear.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "tests/api/kept_calls.h"
#include "tests/api/random_options.h"
#include "tests/shared/linear_pair_case.h"

namespace tileloss::test {
namespace {

constexpr int kLinearCases = 200;

std::vector<Factor> head_factors(const std::vector<Factor>& more) {
  return with_factors({{"rows", {"0", "1", "7", "33", "70"}},
                       {"vocab", {"1", "2", "17", "64", "127", "300", "1000"}},
                       {"hidden", {"1", "7", "33", "64"}},
                       {"valid_vocab", {"all", "half", "one_fewer"}},
                       {"hidden_layout", {"0", "1", "2"}},
                       {"head_layout", {"0", "1", "2"}},
                       {"misalignment", {"0", "1", "3"}},
                       {"flush", {"right", "left"}},
                       {"ignored", {"0", "0.3", "0.9", "1"}},
                       {"compute", {"0", "1", "2"}},  // none, float32, bfloat16
                       {"logit_std", {"0.01", "2", "30"}},
                       {"bias", {"no", "float32", "bfloat16", "float16"}},
                       {"gradients", {"all", "dhidden", "dhead", "dbias", "no_dhidden", "no_dhead", "no_dbias"}},
                       {"float32_dhidden", {"no", "yes"}},
                       {"float32_dhead", {"no", "yes"}},
                       {"float32_dbias", {"no", "yes"}},
                       {"accumulate", {"no", "yes"}},
                       {"threads", {"1", "3"}},
                       {"reduction", {"none", "sum", "mean"}},
                       {"token_weights", {"no", "yes"}},
                       {"logit_scale", {"1", "3"}},
                       {"softcap", {"0", "30"}},
                       {"temperature", {"1", "0.6"}}},
                      more);
}

// Of every third case, some of the head's columns are a low-rank part. The toy has none.
std::int64_t rank_of(std::int64_t hidden, std::uint64_t seed) {
  const char* const device = std::getenv("TILELOSS_TEST_DEVICE");
  if (seed % 3 != 0 || (device != nullptr && std::string_view(device) == "toy")) return 0;
  return std::min(hidden - 1, static_cast<std::int64_t>(1 + seed % 11));
}

LinearCaseSpec spec_of(const PairwiseSampler& s, NumberFormat format, std::uint64_t seed) {
  const std::int64_t vocab = s.integer("vocab");
  const std::string bias = s.level("bias"), gradients = s.level("gradients");
  const auto has = [&](const std::string& gradient) {
    return gradients == "all" || gradients == gradient || (gradients.rfind("no_", 0) == 0 && gradients != "no_" + gradient);
  };
  return {.row = {.rows = s.integer("rows"),
                  .vocab = vocab,
                  .valid_vocab = valid_of(s, vocab),
                  .misalignment = s.integer("misalignment"),
                  .flush = s.is("flush", "left") ? Flush::kLeft : Flush::kRight,
                  .seed = seed,
                  .ignore_prob = s.number("ignored"),
                  .token_weights = s.is("token_weights", "yes"),
                  .per_row_loss = s.is("reduction", "none")},
          .hidden = s.integer("hidden"),
          .rank = rank_of(s.integer("hidden"), seed),
          .format = format,
          .head_format = format,
          .compute_dtype = static_cast<tileloss_dtype>(s.integer("compute")),
          .hidden_layout = static_cast<MatrixLayout>(s.integer("hidden_layout")),
          .head_layout = static_cast<MatrixLayout>(s.integer("head_layout")),
          .logit_std = s.number("logit_std"),
          .bias = bias != "no",
          .bias_format = bias == "bfloat16"  ? NumberFormat::kBfloat16
                         : bias == "float16" ? NumberFormat::kFloat16
                                             : NumberFormat::kFloat32,
          .dhidden = has("dhidden"),
          .dhead = has("dhead"),
          .dbias = has("dbias"),
          .float32_dhidden = s.is("float32_dhidden", "yes"),
          .float32_dhead = s.is("float32_dhead", "yes"),
          .float32_dbias = s.is("float32_dbias", "yes"),
          .accumulate = s.is("accumulate", "yes")};
}

// The options of the logits and of the reduction.
template <class Options>
Options options_of(const PairwiseSampler& s, const LinearCaseSpec& spec) {
  Options options;
  options.logit.logit_scale = s.number("logit_scale");
  options.logit.softcap = s.number("softcap");
  options.logit.temperature.value = s.number("temperature");
  options.logit.valid_vocab = spec.row.valid_vocab;
  options.reduction = s.is("reduction", "none")  ? TILELOSS_REDUCTION_NONE
                      : s.is("reduction", "sum") ? TILELOSS_REDUCTION_SUM
                                                 : TILELOSS_REDUCTION_MEAN;
  return options;
}

class RandomLinear : public testing::TestWithParam<NumberFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, RandomLinear, testing::ValuesIn(kFormats), format_name);

TEST_P(RandomLinear, CrossEntropyAgreesForAllPairs) {
  PairwiseSampler sampler(
      head_factors({{"head_format", {"float32", "bfloat16", "float16"}},
                    {"label_logit", {"0", "25"}},
                    {"kept", {"all", "0.7", "0.4", "rows", "recompute", "sweeps"}},
                    {"class_weights", {"no", "yes"}},
                    {"loss_grad", {"absent", "scalar", "per_row", "strided", "broadcast"}},
                    {"outputs", {"none", "all"}},
                    {"label_smoothing", {"0", "0.1", "1"}},
                    {"z_loss", {"0", "0.3"}}}),
      [] {
        // Hidden states of thousands, which lead to gradients beyond float16.
        std::vector<Forbidden> forbidden = {
            {"logit_std", "0.01", "label_logit", "25"}, {"rows", "0", "kept", "0.7"}, {"rows", "0", "kept", "0.4"}};
        for (const Forbidden& f : loss_forbidden()) forbidden.push_back(f);
        return forbidden;
      }(),
      13);
  int partly_kept = 0, in_dhead = 0, in_chunks = 0;
  const auto agree = [&](const PairwiseSampler& s, std::uint64_t number) {
    LinearCaseSpec spec = spec_of(s, GetParam(), 2000 + number);
    spec.head_format = s.is("head_format", "float32")    ? NumberFormat::kFloat32
                       : s.is("head_format", "bfloat16") ? NumberFormat::kBfloat16
                                                         : NumberFormat::kFloat16;
    spec.label_logit = s.number("label_logit");
    spec.row.class_weights = s.is("class_weights", "yes");
    spec.row.loss_grad = upstream_named(s.level("loss_grad"));
    spec.row.row_outputs = spec.row.extra_outputs = s.is("outputs", "all");
    LinearCase c(spec);
    auto options = options_of<tileloss_cross_entropy_options>(s, spec);
    options.label_smoothing = s.number("label_smoothing");
    options.z_loss = s.number("z_loss");
    tileloss_plan_options hints = stash_of_columns();
    if (s.is("kept", "rows")) hints.cpu.row_block = 16;
    if (s.is("kept", "recompute")) hints.cpu.schedule = TILELOSS_SCHEDULE_RECOMPUTE;
    if (s.is("kept", "sweeps")) hints.cpu.schedule = TILELOSS_SCHEDULE_SWEEPS;
    if (s.is("kept", "0.7") || s.is("kept", "0.4")) {
      hints.workspace_bytes = budget_for(run_within(c, options, hints).plan, s.number("kept"));
    }
    // So little that not a tile would be kept: the planner may take recompute.
    if (hints.workspace_bytes > 0) hints.cpu.schedule = TILELOSS_SCHEDULE_AUTO;
    if (hints.workspace_bytes == 0) hints.cpu.threads = static_cast<std::int32_t>(s.integer("threads"));
    const KeptRun r = run_within(c, options, hints);
    const std::int64_t valid = spec.row.valid_vocab < 0 ? spec.row.vocab : spec.row.valid_vocab;
    partly_kept += r.plan.cpu.kept_columns > 0 && r.plan.cpu.kept_columns < valid ? 1 : 0;
    in_dhead += r.plan.cpu.kept_rows > 0 ? 1 : 0;
    in_chunks += r.plan.cpu.row_block < spec.row.rows ? 1 : 0;
    return agrees(check_linear_cross_entropy(c, options));
  };
  expect_all_pairs_agree("linear_cross_entropy", GetParam(), sampler, kLinearCases, agree);
  EXPECT_GT(partly_kept, kLinearCases / 20);
  EXPECT_GT(in_dhead, 0);
  EXPECT_GT(in_chunks, 0);
}

TEST_P(RandomLinear, DistillationAgreesForAllPairs) {
  std::vector<Forbidden> forbidden;
  forbid_beta(forbidden, {"0.1"});
  PairwiseSampler sampler(head_factors({{"vocab", {"2", "17", "64", "300", "1000"}},
                                        {"rows", {"1", "7", "33", "70"}},
                                        {"teacher_hidden", {"1", "9", "40"}},
                                        {"teacher_layout", {"0", "1", "2"}},
                                        {"teacher_logit_std", {"0.01", "2", "10"}},
                                        {"teacher", {"other", "the_student"}},
                                        {"teacher_bias", {"no", "yes"}},
                                        {"row_block", {"0", "16"}},
                                        {"divergence", {"0", "1", "2", "3", "4", "5", "6"}},
                                        {"beta", {"0.5", "0.1"}},
                                        {"weights", {"0", "0.3"}},
                                        {"squared", {"no", "yes"}},
                                        {"teacher_softcap", {"absent", "0", "20"}},
                                        {"teacher_temperature", {"absent", "2"}},
                                        {"label_temperature", {"absent", "0.5", "3"}}}),
                          forbidden, 17);
  int in_dhead = 0, in_chunks = 0;
  const auto agree = [&](const PairwiseSampler& s, std::uint64_t number) {
    LinearPairSpec spec{.student = spec_of(s, GetParam(), 3000 + number),
                        .teacher_hidden = s.integer("teacher_hidden"),
                        .teacher_layout = static_cast<MatrixLayout>(s.integer("teacher_layout")),
                        .teacher_logit_std = s.number("teacher_logit_std"),
                        .teacher_bias = s.is("teacher_bias", "yes"),
                        .teacher_is_student = s.is("teacher", "the_student")};
    if (spec.teacher_is_student) spec.student.rank = 0;
    spec.student.row.extra_outputs = true;
    LinearPair c(spec);
    auto options = c.student().with_linear(options_of<tileloss_distillation_options>(s, spec.student));
    options.divergence = static_cast<std::int32_t>(s.integer("divergence"));
    options.beta = s.number("beta");
    set_weights(options, s.number("weights"));
    if (!s.is("label_temperature", "absent")) options.label_temperature.value = s.number("label_temperature");
    options.scale_by_temperature_squared = s.is("squared", "yes") ? 1 : 0;
    if (!s.is("teacher_softcap", "absent")) options.teacher_softcap = s.number("teacher_softcap");
    if (!s.is("teacher_temperature", "absent")) options.teacher_temperature.value = s.number("teacher_temperature");
    tileloss_plan_options hints = plan_options();
    hints.cpu.threads = static_cast<std::int32_t>(s.integer("threads"));
    hints.cpu.row_block = s.integer("row_block");
    auto plan = init<tileloss_plan>();
    const auto ran = runs("linear_distillation", kBoth, c.args(), &options, hints, nullptr, &plan);
    if (!ran) return ran;
    in_dhead += plan.cpu.kept_rows > 0 ? 1 : 0;
    in_chunks += plan.cpu.row_block < spec.student.row.rows ? 1 : 0;
    return agrees(c.check(options));
  };
  expect_all_pairs_agree("linear_distillation", GetParam(), sampler, kLinearCases, agree);
  EXPECT_GT(in_dhead, 0);
  EXPECT_GT(in_chunks, 0);
}

}  // namespace
}  // namespace tileloss::test
