// tileloss bench and sweep of the losses fused with the LM head, from outside.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "support/arg_slots.h"
#include "support/memory.h"
#include "tests/bench/sweep_support.h"
#include "tests/shared/program.h"

namespace tileloss::tools {
namespace {

using test::ProgramResult;
using test::run_program;
using test::TemporaryFolder;

// What a process needs besides: the threads' stacks; and Linux counts resident pages in batches of 64 a thread.
// Sanitizers keep records of their own.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int64_t kOtherBytes = int64_t{64} << 20;
#else
constexpr int64_t kOtherBytes = 1 << 19;
#endif

ProgramResult bench(const std::string& loss, const std::vector<std::string>& more) {
  std::vector<std::string> arguments = {"bench", "--loss", loss, "--tokens", "64", "--vocab", "2000", "--iters", "2"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return run_program(arguments);
}

// Forward, then value_and_grad or backward.
std::vector<Json> bench_lines(const std::string& loss, std::vector<std::string> more) {
  more.insert(more.end(), {"--json", "--hidden", "64"});
  const ProgramResult result = bench(loss, more);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  std::vector<Json> lines;
  std::istringstream in(result.out);
  for (std::string line; std::getline(in, line);) lines.push_back(Json::parse(line));
  EXPECT_EQ(lines.size(), 2U) << result.out;
  lines.resize(2);
  return lines;
}

void expect_figures(const Json& line, double products) {
  for (const char* key : {"median_ms", "predicted_ms", "tflops", "roof_tflops", "roof_share", "workspace_bytes", "mem_scratch",
                          "read_ms", "copy_ms", "roof_ms", "ratio_to_roof"}) {
    ASSERT_TRUE(line.contains(key) && line[key].is_number()) << key << line;
    EXPECT_GT(line[key].get<double>(), 0) << key << line;
  }
  EXPECT_EQ(line["hidden"], 64);
  int64_t parts = 0;
  for (const auto& [name, bytes] : line.at("buffers").items()) parts += bytes.get<int64_t>();
  EXPECT_EQ(parts, line["workspace_bytes"]) << line;
  const double flops = products * 2 * 64 * 64 * 2000;
  const double tflops = line["tflops"].get<double>(), roof = line["roof_tflops"].get<double>();
  EXPECT_NEAR(tflops * line["median_ms"].get<double>() * 1e9, flops, 1e-6 * flops);
  EXPECT_NEAR(line["roof_share"].get<double>(), tflops / roof, 1e-9);
  EXPECT_GE(line["roof_ms"].get<double>(), flops / roof / 1e9 * (1 - 1e-9));
  EXPECT_LE(line["mem_scratch"].get<int64_t>(), line["workspace_bytes"].get<int64_t>() + kOtherBytes) << line;
}

TEST(BenchLinear, EveryFunctionAndLayoutHasItsFigures) {
  const std::vector<std::pair<std::string, std::vector<std::string>>> runs = {
      {"linear_cross_entropy", {"--set", "label_smoothing=0.1", "--entropy"}},
      {"linear_cross_entropy", {"--head-layout", "hv", "--dhead-dtype", "bf16"}},
      {"linear_policy_loss", {"--preset", "grpo"}},
      {"linear_policy_loss", {"--preset", "gspo", "--dtype", "fp32", "--isa", "baseline"}},
      {"linear_logprobs", {"--dtype", "fp16"}}};
  for (const auto& [loss, more] : runs) {
    const std::vector<Json> lines = bench_lines(loss, more);
    EXPECT_EQ(lines[0]["pass"], "forward");
    expect_figures(lines[0], 1);
    EXPECT_EQ(lines[1]["pass"], loss == "linear_logprobs" ? "backward" : "value_and_grad");
    expect_figures(lines[1], 3);
    const bool turned = more.front() == "--head-layout";
    EXPECT_EQ(lines[1]["head_layout"], turned ? "hv" : "vh");
    EXPECT_EQ(lines[1]["dhead_dtype"], turned ? "bfloat16" : "float32");
  }
}

TEST(BenchLinear, AFrozenHeadIsOneProductLess) {
  const std::vector<Json> lines = bench_lines("linear_policy_loss", {"--preset", "grpo", "--frozen-head"});
  expect_figures(lines[1], 2);
  EXPECT_TRUE(lines[1]["dhead_dtype"].is_null());
}

TEST(BenchLinear, ABackwardFromASavedRowStateIsThreeProducts) {
  for (const std::string loss : {"linear_cross_entropy", "linear_policy_loss", "linear_logprobs"}) {
    const ProgramResult result = bench(loss, {"--hidden", "64", "--json", "--pass", "backward"});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    const Json line = Json::parse(result.out);
    EXPECT_EQ(line["pass"], "backward");
    expect_figures(line, 3);
  }
}

// The logits are 10 MB in 16 bits, dhead 5 MB, which holds half of them first: a kernel that took either in secret would be seen.
TEST(BenchLinear, TheWorkspaceIsACapOnThePlanAndOnWhatIsMeasured) {
  // How many columns a budget has room for depends on the threads, which have scratch of their own.
  const std::vector<std::string> shape = {"--tokens", "256",      "--vocab", "20000",     "--iters",
                                          "1",        "--warmup", "0",       "--threads", "2"};
  const auto run = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"bench", "--loss", "linear_cross_entropy", "--hidden", "64", "--json"};
    arguments.insert(arguments.end(), shape.begin(), shape.end());
    arguments.insert(arguments.end(), more.begin(), more.end());
    const ProgramResult result = run_program(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return Json::parse(result.last_line());
  };
  const Json stash = run({"--schedule", "stash"});
  EXPECT_EQ(stash["schedule"], "stash");
  EXPECT_EQ(stash["kept_columns"], 20000);
  EXPECT_EQ(stash["kept_rows"], 128);
  EXPECT_TRUE(stash["workspace"].is_null());
  EXPECT_GT(stash["workspace_bytes"], 128 * 20'000 * 2);  // the other half
  EXPECT_LE(stash["mem_scratch"].get<int64_t>(), stash["workspace_bytes"].get<int64_t>() + kOtherBytes);
  const Json capped = run({"--workspace", "4MiB"});
  EXPECT_EQ(capped["schedule"], "stash");
  EXPECT_GT(capped["kept_columns"], 0);
  EXPECT_LT(capped["kept_columns"], 10000);
  EXPECT_EQ(capped["workspace"], 4 << 20);
  EXPECT_LE(capped["workspace_bytes"], 4 << 20);
  EXPECT_LE(capped["mem_scratch"].get<int64_t>(), (4 << 20) + kOtherBytes);
}

TEST(BenchLinear, TheTableNamesRoofShareAndMemory) {
  const ProgramResult result = bench("linear_cross_entropy", {"--hidden", "64", "--head-layout", "hv", "--frozen-head"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  for (const char* word : {"[64, 64] x [64, 2000], frozen head", "products, in L1", "TFLOP/s", "of roof", "part of its workspace",
                           "workspace MB", "measured MB", "value_and_grad"})
    EXPECT_NE(result.out.find(word), std::string::npos) << word << result.out;
}

TEST(BenchLinear, WhatDoesNotGoTogetherIsRefusedByName) {
  const struct {
    std::string loss;
    std::vector<std::string> flags;
    const char* message;
  } cases[] = {
      {"linear_cross_entropy", {}, "--hidden: linear_cross_entropy needs the hidden size, got none"},
      {"linear_cross_entropy", {"--hidden", "64", "--in-place"}, "--in-place: linear_cross_entropy has no logits"},
      {"linear_cross_entropy", {"--hidden", "0"}, "--hidden"},
      {"linear_cross_entropy", {"--hidden", "64", "--head-layout", "hw"}, "--head-layout"},
      {"linear_cross_entropy", {"--hidden", "64", "--impl", "both"}, "there is no reference for linear_cross_entropy"},
      {"linear_cross_entropy", {"--hidden", "64", "--dtype", "fp32", "--dhead-dtype", "bf16"}, "dhead.dtype: expected float32"},
      {"linear_cross_entropy", {"--hidden", "64", "--workspace", "64MB"}, "--workspace: expected bytes, as 65536"},
      {"linear_cross_entropy", {"--hidden", "64", "--workspace", "1KiB"}, "got a budget of 1024"},
      {"cross_entropy", {"--hidden", "64"}, "are for the functions linear_*, got cross_entropy"},
      {"cross_entropy", {"--frozen-head"}, "are for the functions linear_*, got cross_entropy"},
  };
  for (const auto& [loss, flags, message] : cases) {
    const ProgramResult result = bench(loss, flags);
    EXPECT_EQ(result.exit_code, 2) << message;
    EXPECT_NE(result.err.find(message), std::string::npos) << message << "\n" << result.err;
  }
}

TEST(BenchLinear, AHeadBeyondTheMachineIsAnEnvironmentError) {
  const ProgramResult result =
      run_program({"bench", "--loss", "linear_cross_entropy", "--tokens", "4", "--vocab", "100000000", "--hidden", "16384"});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_NE(result.err.find("head: needs 3276800.0 MB"), std::string::npos) << result.err;
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

constexpr const char* kLinearSweep =
    "loss: linear_cross_entropy\nshape: 64x2000\nhidden: 64\ndtype: bf16\niters: 1\nwarmup: 0\ntime_limit_s: 60\n"
    "workspace: [1MiB, 0]\noutput: r.jsonl\n";

ProgramResult sweep(const TemporaryFolder& folder, const std::vector<std::string>& sets) {
  std::vector<std::string> arguments = {"sweep", "--config", folder.write("c.yaml", kLinearSweep).string()};
  for (const std::string& set : sets) arguments.insert(arguments.end(), {"--set", set});
  return run_program(arguments);
}

TEST(SweepLinear, MeasuresEveryWorkspaceAndNamesTheBest) {
  const TemporaryFolder folder;
  const ProgramResult result = sweep(folder, {});
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_EQ(result.last_line(), "ok: 2");
  for (const char* text : {"linear_cross_entropy [64, 2000] bfloat16 value_and_grad hidden 64\n", "TFLOP/s", "best: workspace="})
    EXPECT_NE(result.out.find(text), std::string::npos) << text << result.out;
  const std::vector<Json> lines = read_results(folder.path() / "r.jsonl").lines;
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_EQ(lines[0]["case"]["workspace"], 1 << 20);
  EXPECT_LE(lines[0]["workspace_bytes"], 1 << 20);
  EXPECT_EQ(lines[0]["schedule"], "stash");
  EXPECT_EQ(lines[1]["case"]["workspace"], 0);
  for (const Json& line : lines) EXPECT_GT(line["tflops"].get<double>(), 0);
}

TEST(SweepLinear, ATransposedHeadAndFunctionsWithoutALossWork) {
  const TemporaryFolder folder;
  const ProgramResult result = sweep(folder, {"loss=linear_logprobs", "head_layout=hv", "workspace=0"});
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_NE(result.out.find("linear_logprobs [64, 2000] bfloat16 backward hidden 64"), std::string::npos) << result.out;
}

TEST(SweepLinear, ABackwardFromASavedRowStateIsACase) {
  const TemporaryFolder folder;
  const ProgramResult result = sweep(folder, {"pass=[value_and_grad, backward]", "workspace=0"});
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  for (const char* text : {"linear_cross_entropy [64, 2000] bfloat16 value_and_grad hidden 64\n",
                           "linear_cross_entropy [64, 2000] bfloat16 backward hidden 64\n"})
    EXPECT_NE(result.out.find(text), std::string::npos) << text << result.out;
}

TEST(SweepLinear, WrongKeysAreRefusedByName) {
  const struct {
    const char* set;
    const char* message;
  } cases[] = {{"hidden=0", "hidden: linear_cross_entropy needs the hidden size, got none"},
               {"workspace=[1MB]", "workspace: expected bytes, as 65536"},
               {"head_layout=hw", "head_layout"},
               {"in_place=true", "in_place: linear_cross_entropy has no logits"},
               {"loss=cross_entropy", "hidden: cross_entropy takes logits"}};
  for (const auto& [set, message] : cases) {
    const TemporaryFolder folder;
    const ProgramResult result = sweep(folder, {set});
    EXPECT_EQ(result.exit_code, 2) << set;
    EXPECT_NE(result.err.find(message), std::string::npos) << message << "\n" << result.err;
  }
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
