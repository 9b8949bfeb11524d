// The bench of the losses fused with the LM head.
#include "support/arg_slots.h"
#include "support/memory.h"
#include "tests/bench/bench_call.h"

namespace tileloss::tools {
namespace {

// What a process needs besides: the threads' stacks; and Linux counts resident pages in batches of 64 a thread.
// Sanitizers keep records of their own.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int64_t kOtherBytes = int64_t{64} << 20;
#else
constexpr int64_t kOtherBytes = 1 << 19;
#endif

std::vector<Json> linear_lines(const std::string& loss, const Sets& sets = {}) {
  return bench_lines("tokens=64 vocab=2000 hidden=64 iters=2", joined({"loss=" + loss}, sets));
}

void expect_linear_figures(const Json& line, double products) {
  expect_figures(line);
  for (const char* key : {"predicted_ms", "tflops", "roof_tflops", "roof_share", "workspace_bytes", "mem_scratch"}) {
    ASSERT_TRUE(line.contains(key) && line[key].is_number()) << key << line;
    EXPECT_GT(number(line, key), 0) << key << line;
  }
  EXPECT_EQ(line["hidden"], 64);
  int64_t parts = 0;
  for (const auto& [name, bytes] : line.at("buffers").items()) parts += bytes.get<int64_t>();
  EXPECT_EQ(parts, line["workspace_bytes"]) << line;
  const double flops = products * 2 * 64 * 64 * 2000;
  EXPECT_NEAR(number(line, "tflops") * number(line, "median_ms") * 1e9, flops, 1e-6 * flops);
  EXPECT_NEAR(number(line, "roof_share"), number(line, "tflops") / number(line, "roof_tflops"), 1e-9);
  EXPECT_GE(number(line, "roof_ms"), flops / number(line, "roof_tflops") / 1e9 * (1 - 1e-9));
  EXPECT_LE(line["mem_scratch"].get<int64_t>(), line["workspace_bytes"].get<int64_t>() + kOtherBytes) << line;
}

TEST(BenchLinear, EveryFunctionAndLayoutHasItsFigures) {
  const std::vector<std::pair<std::string, Sets>> runs = {
      {"linear_cross_entropy", {"options.label_smoothing=0.1", "entropy=true"}},
      {"linear_cross_entropy", {"head_layout=hv", "dhead_dtype=bf16"}},
      {"linear_policy_loss", {"preset=grpo"}},
      {"linear_policy_loss", {"preset=gspo", "dtype=fp32", "isa=baseline"}},
      {"linear_logprobs", {"dtype=fp16"}}};
  for (const auto& [loss, sets] : runs) {
    const std::vector<Json> lines = linear_lines(loss, sets);
    ASSERT_EQ(lines.size(), 2U);
    EXPECT_EQ(lines[0]["pass"], "forward");
    expect_linear_figures(lines[0], 1);
    EXPECT_EQ(lines[1]["pass"], loss == "linear_logprobs" ? "backward" : "value_and_grad");
    expect_linear_figures(lines[1], 3);
    const bool turned = sets.front() == "head_layout=hv";
    EXPECT_EQ(lines[1]["head_layout"], turned ? "hv" : "vh");
    EXPECT_EQ(lines[1]["dhead_dtype"], turned ? "bfloat16" : "float32");
  }
}

TEST(BenchLinear, AFrozenHeadIsOneProductLess) {
  const std::vector<Json> lines = linear_lines("linear_policy_loss", {"preset=grpo", "frozen_head=true"});
  expect_linear_figures(lines.at(1), 2);
  EXPECT_TRUE(lines[1]["dhead_dtype"].is_null());
}

TEST(BenchLinear, ABackwardFromASavedRowStateIsThreeProducts) {
  for (const std::string loss : {"linear_cross_entropy", "linear_policy_loss", "linear_logprobs"}) {
    const std::vector<Json> lines = linear_lines(loss, {"pass=backward"});
    ASSERT_EQ(lines.size(), 1U);
    EXPECT_EQ(lines[0]["pass"], "backward");
    expect_linear_figures(lines[0], 3);
  }
}

TEST(BenchLinear, ATeachersHeadIsAProductOfItsOwn) {
  for (const bool frozen : {false, true}) {
    const std::vector<Json> lines = bench_lines("loss=linear_distillation tokens=40 vocab=500 hidden=32 iters=1",
                                                {frozen ? "frozen_head=true" : "frozen_head=false"});
    ASSERT_EQ(lines.size(), 2U);
    const double product = 2.0 * 40 * 500 * 32;
    for (size_t i = 0; i < 2; ++i) {
      const double products = i == 0 ? 2 : frozen ? 3 : 4;
      EXPECT_NEAR(number(lines[i], "tflops") * number(lines[i], "median_ms") * 1e9, products * product, 1e-6 * product);
    }
  }
}

// The logits are 10 MB in 16 bits, dhead 5 MB, which holds half of them first: a kernel that took either in secret would be seen.
TEST(BenchLinear, TheWorkspaceIsACapOnThePlanAndOnWhatIsMeasured) {
  // How many columns a budget has room for depends on the threads, which have scratch of their own.
  const auto run = [&](const std::string& set) {
    return bench_lines("loss=linear_cross_entropy hidden=64 tokens=256 vocab=20000 iters=1 warmup=0 threads=2", {set}).back();
  };
  const Json stash = run("schedule=stash");
  EXPECT_EQ(stash["schedule"], "stash");
  EXPECT_EQ(stash["kept_columns"], 20000);
  EXPECT_EQ(stash["kept_rows"], 128);
  EXPECT_TRUE(stash["workspace"].is_null());
  EXPECT_GT(stash["workspace_bytes"], 128 * 20'000 * 2);  // the other half
  EXPECT_LE(stash["mem_scratch"].get<int64_t>(), stash["workspace_bytes"].get<int64_t>() + kOtherBytes);
  const Json capped = run("workspace=4MiB");
  EXPECT_EQ(capped["schedule"], "stash");
  EXPECT_GT(capped["kept_columns"], 0);
  EXPECT_LT(capped["kept_columns"], 10000);
  EXPECT_EQ(capped["workspace"], 4 << 20);
  EXPECT_LE(capped["workspace_bytes"], 4 << 20);
  EXPECT_LE(capped["mem_scratch"].get<int64_t>(), (4 << 20) + kOtherBytes);
}

TEST(BenchLinear, WhatDoesNotGoTogetherIsRefusedByName) {
  for (const auto& [text, message] : std::vector<std::pair<std::string, std::string>>{
           {"loss=linear_cross_entropy", "linear_cross_entropy needs the hidden size, got none"},
           {"loss=linear_cross_entropy hidden=64 in_place=true", "linear_cross_entropy has no logits"},
           {"loss=linear_cross_entropy hidden=-1", "hidden"},
           {"loss=linear_cross_entropy hidden=64 head_layout=hw", "head_layout"},
           {"loss=linear_cross_entropy hidden=64 impl=both", "there is no reference for linear_cross_entropy"},
           {"loss=linear_cross_entropy hidden=64 dtype=fp32 dhead_dtype=bf16", "dhead.dtype: expected float32"},
           {"loss=linear_cross_entropy hidden=64 workspace=64MB", "workspace: expected bytes, as 65536"},
           {"loss=linear_cross_entropy hidden=64 workspace=1KiB", "got a budget of 1024"},
           {"loss=linear_soft_cross_entropy hidden=64", "loss: 'linear_soft_cross_entropy' is none of"},
           {"loss=linear_sparse_distillation hidden=64", "loss: 'linear_sparse_distillation' is none of"},
           {"loss=cross_entropy hidden=64", "are for the functions linear_*, got cross_entropy"},
           {"loss=cross_entropy frozen_head=true", "are for the functions linear_*, got cross_entropy"}}) {
    EXPECT_TRUE(is_refused(bench_refusal(text, {"tokens=64", "vocab=2000", "iters=1"}), message));
  }
  const std::string beyond = bench_refusal("loss=linear_cross_entropy tokens=4 vocab=100000000 hidden=16384");
  EXPECT_TRUE(beyond.starts_with("3: head: needs 3276800.0 MB")) << beyond;
}

TEST(ParseBytes, TakesPlainBytesAndBinaryUnits) {
  EXPECT_EQ(parse_bytes("0"), 0);
  EXPECT_EQ(parse_bytes("65536"), 65536);
  EXPECT_EQ(parse_bytes("3KiB"), 3072);
  EXPECT_EQ(parse_bytes("64MiB"), 67'108'864);
  EXPECT_EQ(parse_bytes("2GiB"), 2'147'483'648);
  for (const char* wrong : {"", "MiB", "64MB", "64mib", "1.5GiB", "-1", "64 MiB", "9000000000GiB", "99999999999999999999"})
    EXPECT_FALSE(parse_bytes(wrong)) << wrong;
}

TEST(ArgSlots, AHeadThatLiesAsHVShowsItsColumnsAsRows) {
  tileloss_args args;
  tileloss_args_init(&args);
  float values[6] = {};
  args.head = tileloss_make_matrix(values, TILELOSS_FLOAT32, 3, 2, 1);
  args.head.col_stride = 3;
  args.dhidden = tileloss_make_matrix(values, TILELOSS_FLOAT32, 3, 2, 2);
  int seen = 0;
  for_each_tensor(args, TILELOSS_VALUE_AND_GRAD, [&](TensorView& view) {
    const bool is_head = view.name == std::string("head");
    EXPECT_EQ(view.rows, is_head ? 2 : 3);
    EXPECT_EQ(view.cols, is_head ? 3 : 2);
    EXPECT_EQ(view.stride, is_head ? 3 : 2);
    view.stride = 17;
    ++seen;
  });
  EXPECT_EQ(seen, 2);
  EXPECT_EQ(args.head.row_stride, 1);
  EXPECT_EQ(args.head.col_stride, 17);
  EXPECT_EQ(args.dhidden.row_stride, 17);
  EXPECT_EQ(args.dhidden.col_stride, 1);
}

}  // namespace
}  // namespace tileloss::tools
