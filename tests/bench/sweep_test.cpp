// The sweep's config, loop, results file and report, with shell scripts in place of cases.
#include "bench/sweep.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "bench/sweep_case.h"
#include "bench/sweep_report.h"
#include "support/exit_codes.h"
#include "tests/bench/sweep_support.h"
#include "tests/shared/resource_limit.h"

namespace tileloss::tools {
namespace {

using test::FileSizeLimit;
using test::kCheapCases;
using test::kCheapSweep;
using test::read_text;
using test::results_by_case;
using test::TemporaryFolder;

SweepConfig config_of(const TemporaryFolder& folder, const std::string& text, const std::vector<std::string>& sets = {}) {
  return read_sweep_config(folder.write("c.yaml", text), sets);
}

std::string config_error(const std::string& text, const std::vector<std::string>& sets = {}) {
  const TemporaryFolder folder;
  try {
    config_of(folder, text, sets);
  } catch (const ToolError& error) {
    EXPECT_EQ(error.code(), kExitUsage) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "accepted: " << text;
  return "";
}

// Every figure that the report reads.
constexpr const char* kOkReport =
    R"({"status":"ok","isa":"baseline","threads":1,"schedule":"stash","row_block":8,"vocab_block":64,)"
    R"("min_ms":1,"median_ms":2,"gb_per_s":3})";

// The case's text is the script's $1.
std::vector<std::string> script_command(const std::string& script) { return {"/bin/sh", "-c", script, "case"}; }
std::vector<std::string> ok_command() { return script_command(std::string("echo '") + kOkReport + "'"); }

struct SweepResult {
  int exit_code = -1;
  std::string out;
  std::string err;
};

SweepResult sweep(const SweepConfig& config, const std::vector<std::string>& command) {
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  SweepResult result;
  try {
    result.exit_code = run_sweep(config, command);
  } catch (const ToolError& error) {
    result.exit_code = error.code();
    result.err = error.what();
  }
  std::fflush(stdout);
  result.out = testing::internal::GetCapturedStdout();
  result.err += testing::internal::GetCapturedStderr();
  return result;
}

TEST(SweepConfig, MakesEveryCombinationOnceInOrder) {
  const TemporaryFolder folder;
  const SweepConfig config = config_of(folder, kCheapSweep);
  ASSERT_EQ(config.cases.size(), kCheapCases);
  std::map<std::string, int> seen;
  for (const Json& sweep_case : config.cases) ++seen[sweep_case.dump()];
  EXPECT_EQ(seen.size(), kCheapCases);
  EXPECT_EQ(config.cases[0]["vocab_block"], 64);
  EXPECT_EQ(config.cases[1]["vocab_block"], 128);
  EXPECT_EQ(config.cases[2]["threads"], 2);
  EXPECT_EQ(config.cases[6]["tokens"], 5);
  EXPECT_EQ(config.cases[6]["vocab"], 512);
  EXPECT_EQ(config.cases[12]["loss"], "logprobs");
  EXPECT_EQ(config.output, folder.path() / "r.jsonl");
}

TEST(SweepConfig, OptionsBelongToTheLossAndSettingsToTheCase) {
  const TemporaryFolder folder;
  const SweepConfig config =
      config_of(folder,
                "loss: [cross_entropy, {name: cross_entropy, label_smoothing: 0.1, reduction: sum}]\nshape: 2x64\ndtype: fp16\n"
                "in_place: true\niters: 7\nwarmup: 2\nseed: 5\nisa: baseline\nrow_block: 3\nschedule: recompute\n");
  ASSERT_EQ(config.cases.size(), 2U);
  EXPECT_TRUE(config.cases[0]["options"].empty());
  const BenchSettings settings = bench_settings(config.cases[1]);
  EXPECT_EQ(settings.loss, "cross_entropy");
  std::vector<std::string> options;
  for (const ConfigNode& option : settings.options.children) options.push_back(option.key + "=" + option.text);
  std::sort(options.begin(), options.end());
  EXPECT_EQ(options, (std::vector<std::string>{"label_smoothing=0.1", "reduction=sum"}));
  EXPECT_EQ(settings.tokens, 2);
  EXPECT_EQ(settings.vocab, 64);
  EXPECT_EQ(settings.dtype, reference::NumberFormat::kFloat16);
  EXPECT_TRUE(settings.in_place);
  EXPECT_EQ(settings.iterations, 7);
  EXPECT_EQ(settings.warmup, 2);
  EXPECT_EQ(settings.seed, 5U);
  EXPECT_EQ(settings.kernel.isa, "baseline");
  EXPECT_EQ(settings.kernel.row_block, 3);
  EXPECT_EQ(settings.kernel.schedule, "recompute");
}

TEST(SweepConfig, APresetTravelsAsTheOptionsThatItSets) {
  const TemporaryFolder folder;
  for (const std::string& preset : Function("policy_loss").presets()) {
    const SweepConfig config =
        config_of(folder, "loss: {name: policy_loss, epsilon_high: 0.2, preset: " + preset + "}\nshape: 2x64\ndtype: bf16\n");
    const BenchSettings settings = bench_settings(config.cases.at(0));
    ConfigReader reader(settings.options);
    Function function(settings.loss);
    function.read_options(reader);
    reader.finish();
    Function direct("policy_loss");
    const ConfigNode direct_node = parse_overrides({"preset=" + preset, "epsilon_high=0.2"});
    ConfigReader direct_reader(direct_node);
    direct.read_options(direct_reader);
    EXPECT_EQ(function.to_json(), direct.to_json()) << preset;
    EXPECT_EQ(config.cases[0]["preset"], preset);
    EXPECT_NE(describe_work(config.cases[0]).find("policy_loss preset=" + preset), std::string::npos);
  }
}

TEST(SweepConfig, AFunctionWithoutALossIsTimedInItsBackward) {
  const TemporaryFolder folder;
  const SweepConfig config = config_of(folder, "loss: [logprobs, cross_entropy]\nshape: 2x64\ndtype: bf16\n");
  EXPECT_EQ(config.cases[0]["pass"], "backward");
  EXPECT_EQ(config.cases[1]["pass"], "value_and_grad");
}

TEST(SweepConfig, ABackwardIsACaseOnceEvenWhereItIsTheOnlyGradient) {
  const TemporaryFolder folder;
  const SweepConfig config =
      config_of(folder, "loss: [logprobs, cross_entropy]\nshape: 2x64\ndtype: bf16\npass: [value_and_grad, backward]\n");
  ASSERT_EQ(config.cases.size(), 3U);
  EXPECT_EQ(config.cases[0]["pass"], "backward");
  EXPECT_EQ(config.cases[1]["pass"], "value_and_grad");
  EXPECT_EQ(config.cases[2]["pass"], "backward");
}

TEST(SweepConfig, ASetReplacesAListAndTheOutputIsNamedAfterTheConfig) {
  const TemporaryFolder folder;
  const SweepConfig config = config_of(folder, "loss: cross_entropy\nshape: 2x64\ndtype: bf16\nthreads: [1, 2, 3]\n",
                                       {"threads=[4,5]", "time_limit_s=1.5", "memory_limit_mb=100"});
  ASSERT_EQ(config.cases.size(), 2U);
  EXPECT_EQ(config.cases[1]["threads"], 5);
  EXPECT_EQ(config.limits.seconds, 1.5);
  EXPECT_EQ(config.limits.memory_mb, 100);
  EXPECT_EQ(config.output, "c.jsonl");
}

TEST(SweepConfig, MistakesAreNamedWithKeyAndLine) {
  const std::string base = "shape: 2x64\ndtype: bf16\nloss: cross_entropy\n";
  const std::vector<std::pair<std::string, std::vector<std::string>>> mistakes = {
      {"dtype: bf16\nloss: cross_entropy\n", {"shape: required"}},
      {"dtype: bf16\nshape: 2x64\n", {"loss: required"}},
      {base + "threads: []\n", {"c.yaml:4", "threads", "empty list"}},
      {base + "threads: 1025\n", {"c.yaml:4", "threads", "expected 0 to 1024"}},
      {base + "threads: [1,\n  x]\n", {"c.yaml:5", "threads", "expected an integer", "'x'"}},
      {base + "threads: [1, 2, 1]\n", {"c.yaml:4", "threads", "twice"}},
      {base + "threads: [-1]\n", {"c.yaml:4", "threads", "out of range"}},
      {base + "isa: [mmx]\n", {"c.yaml:4", "isa", "'mmx' is none of"}},
      {base + "pass: sideways\n", {"c.yaml:4", "pass", "'sideways' is none of forward, backward, value_and_grad"}},
      {base + "blocks: 3\n", {"c.yaml:4", "blocks: unknown key"}},
      {base + "time_limit_s: 0\n", {"c.yaml:4", "time_limit_s", "out of range"}},
      {"shape: 2x64\ndtype: [bf16, bfloat16]\nloss: cross_entropy\n", {"c.yaml:2", "dtype", "twice"}},
      {"shape: 2x64\ndtype: bf16\nloss: focal\n", {"c.yaml:3", "loss", "'focal' is none of"}},
      {"shape: 2x64\ndtype: bf16\nloss: {name: cross_entropy, smoothing: 0.1}\n", {"c.yaml:3", "loss.smoothing: unknown key"}},
      {"shape: 2x64\ndtype: bf16\nloss:\n  - {label_smoothing: 0.1}\n", {"c.yaml:4", "loss.name: required"}},
      {"shape: 2x64\ndtype: bf16\nloss: [cross_entropy, {name: cross_entropy}]\n", {"c.yaml:3", "loss", "twice"}},
  };
  for (const auto& [text, words] : mistakes) {
    const std::string message = config_error(text);
    for (const std::string& word : words) EXPECT_NE(message.find(word), std::string::npos) << word << " in: " << message;
  }
}

TEST(SweepConfig, AShapeIsTwoCounts) {
  for (const char* shape : {"64", "64x", "x64", "64x64x64", "0x64", "64x-1", "64 x 64", "2x3000000000", "axb", "1.5x64"}) {
    const std::string message = config_error("loss: cross_entropy\ndtype: bf16\nshape: " + std::string(shape) + "\n");
    EXPECT_NE(message.find("TOKENSxVOCAB"), std::string::npos) << message;
  }
}

TEST(SweepConfig, TooManyCombinationsAreRefused) {
  std::string numbers = "[0";
  for (int i = 1; i < 400; ++i) numbers += "," + std::to_string(i);
  const std::string message =
      config_error("loss: cross_entropy\nshape: 2x64\ndtype: bf16\n", {"threads=" + numbers + "]", "row_block=" + numbers + "]"});
  EXPECT_NE(message.find("more than 100000 cases"), std::string::npos) << message;
}

// Case by threads: fine, a crash, a hang, memory, a failure, silence, fine.
TEST(Sweep, GoesOnAfterEveryKindOfFailureAndRecordsIt) {
  const TemporaryFolder folder;
  const std::string script = std::string("case \"$1\" in *'\"threads\":2,'*) kill -SEGV $$;; *'\"threads\":3,'*) sleep 300;;") +
                             " *'\"threads\":4,'*) echo '{\"status\":\"out_of_memory\",\"message\":\"logits\"}';;" +
                             " *'\"threads\":5,'*) exit 9;; *'\"threads\":6,'*) ;; *) echo '" + kOkReport + "';; esac";
  const SweepConfig config = config_of(folder,
                                       "loss: cross_entropy\nshape: 2x64\ndtype: bf16\nthreads: [1, 2, 3, 4, 5, 6, 7]\n"
                                       "time_limit_s: 4\noutput: r.jsonl\n");
  const SweepResult result = sweep(config, script_command(script));
  EXPECT_EQ(result.exit_code, kExitCheckFailed) << result.err;
  const std::vector<Json> lines = read_results(config.output).lines;
  const std::vector<std::string> expected = {"ok", "crashed", "timeout", "out_of_memory", "error", "error", "ok"};
  ASSERT_EQ(lines.size(), expected.size());
  for (size_t i = 0; i < lines.size(); ++i) {
    EXPECT_EQ(lines[i]["status"], expected[i]) << lines[i];
    EXPECT_EQ(lines[i]["case"], config.cases[i]);
    EXPECT_EQ(lines[i].contains("message"), expected[i] != "ok");
    EXPECT_NE(result.err.find("[" + std::to_string(i + 1) + "/7]"), std::string::npos) << result.err;
  }
  EXPECT_NE(result.out.find("crashed: 1\nerror: 2\nok: 2\nout_of_memory: 1\ntimeout: 1\n"), std::string::npos) << result.out;

  // A failed case has its line as well: nothing is left to do, nothing is added.
  const std::string before = read_text(config.output);
  EXPECT_EQ(sweep(config, script_command("exit 1")).exit_code, kExitCheckFailed);
  EXPECT_EQ(read_text(config.output), before);
}

TEST(Sweep, GoesOnFromAFileCutAnywhere) {
  const TemporaryFolder folder;
  const SweepConfig config = config_of(folder, kCheapSweep);
  ASSERT_EQ(sweep(config, ok_command()).exit_code, kExitPass);
  const std::string whole = read_text(config.output);
  for (size_t tenth = 0; tenth < 10; ++tenth) {
    const std::string cut = whole.substr(0, whole.size() * tenth / 10 + tenth);
    folder.write("r.jsonl", cut);
    const std::string rest = cut.substr(cut.rfind('\n') + 1);
    const bool torn = !rest.empty() && !Json::accept(rest);
    const SweepResult result = sweep(config, ok_command());
    EXPECT_EQ(result.exit_code, kExitPass) << result.err;
    EXPECT_EQ(result.err.find("dropped a torn last line") != std::string::npos, torn) << result.err;
    EXPECT_EQ(read_text(config.output).substr(0, cut.rfind('\n') + 1), cut.substr(0, cut.rfind('\n') + 1));
    const auto results = results_by_case(config.output);
    EXPECT_EQ(results.size(), kCheapCases);
    for (const auto& [sweep_case, count] : results) EXPECT_EQ(count, 1) << sweep_case;
  }
}

TEST(Sweep, ACompleteLastLineWithoutItsNewlineIsNotMeasuredAgain) {
  const TemporaryFolder folder;
  const SweepConfig config = config_of(folder, kCheapSweep);
  ASSERT_EQ(sweep(config, ok_command()).exit_code, kExitPass);
  const std::string whole = read_text(config.output);
  folder.write("r.jsonl", whole.substr(0, whole.size() - 1));
  const SweepResult result = sweep(config, script_command("exit 1"));
  EXPECT_EQ(result.exit_code, kExitPass);
  EXPECT_EQ(result.err, "");
  EXPECT_EQ(read_text(config.output), whole);
}

TEST(Sweep, OtherSettingsAreOtherCasesAndOldLinesAreKept) {
  const TemporaryFolder folder;
  sweep(config_of(folder, kCheapSweep), ok_command());
  const std::string before = read_text(folder.path() / "r.jsonl");
  const SweepResult result = sweep(config_of(folder, kCheapSweep, {"iters=2", "threads=[1]"}), ok_command());
  EXPECT_EQ(result.exit_code, kExitPass);
  EXPECT_NE(result.out.find("note: 24 results there belong to other settings"), std::string::npos) << result.out;
  const std::string after = read_text(folder.path() / "r.jsonl");
  EXPECT_EQ(after.substr(0, before.size()), before);
  EXPECT_EQ(results_by_case(folder.path() / "r.jsonl").size(), kCheapCases + 8);
}

TEST(Sweep, LinesOfAnotherKindAreRefusedAndKept) {
  const TemporaryFolder folder;
  const SweepConfig config = config_of(folder, kCheapSweep);
  const std::string good = "{\"case\":{\"a\":1},\"status\":\"timeout\"}\n";
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"{\"tool\":\"gradcheck\"}\n", "not a sweep's result"},
      {good + "{\"case\":3,\"status\":\"timeout\"}\n", "r.jsonl:2: not a sweep's result: no case"},
      {good + "{\"case\":{}}\n", "r.jsonl:2: not a sweep's result: no status"},
      {"{\"case\":{},\"status\":\"ok\"}\n", "r.jsonl:1: not a sweep's result: no isa"},
      {good + good, "r.jsonl:2: a second result of the case"},
      {"nonsense\n" + good, "r.jsonl:1: not a JSON object"},
      {good + "precious data without newline", "r.jsonl:2: not a JSON object"},
      {good + "{\"my\":\"settings\"}", "r.jsonl:2: not a sweep's result: no case"}};
  for (const auto& [text, word] : bad) {
    folder.write("r.jsonl", text);
    const SweepResult result = sweep(config, ok_command());
    EXPECT_EQ(result.exit_code, kExitUsage);
    EXPECT_NE(result.err.find(word), std::string::npos) << result.err;
    EXPECT_EQ(read_text(config.output), text);
  }
}

// What the report divides by.
TEST(Sweep, TimesThatAreNoneAreRefusedWithTheirLine) {
  const TemporaryFolder folder;
  const SweepConfig config = config_of(folder, "loss: cross_entropy\nshape: 2x64\ndtype: bf16\noutput: r.jsonl\n");
  for (const char* key : {"median_ms", "min_ms"}) {
    for (const char* value : {"0", "-1.5", "\"2\"", "null"}) {
      Json line = {{"case", config.cases.at(0)}};
      line.update(Json::parse(kOkReport));
      line[key] = Json::parse(value);
      const std::string text = "{\"case\":{\"a\":1},\"status\":\"timeout\"}\n" + line.dump() + "\n";
      folder.write("r.jsonl", text);
      const SweepResult result = sweep(config, ok_command());
      EXPECT_EQ(result.exit_code, kExitUsage) << result.err;
      const std::string message =
          std::string("r.jsonl:2: not a sweep's result: ") + key + ": expected a number above 0, got " + value;
      EXPECT_NE(result.err.find(message), std::string::npos) << result.err;
      EXPECT_EQ(read_text(config.output), text);
    }
  }
}

TEST(Sweep, AFullDiskLeavesEarlierResultsAndAResumeCompletesThem) {
  const TemporaryFolder folder;
  const SweepConfig config = config_of(folder, kCheapSweep);
  const SweepResult result = [&] {
    const FileSizeLimit limit(3000);
    return sweep(config, ok_command());
  }();
  EXPECT_EQ(result.exit_code, kExitEnvironment);
  EXPECT_NE(result.err.find("r.jsonl: cannot write"), std::string::npos) << result.err;
  const ResultFile left = read_results(config.output);
  EXPECT_GT(left.lines.size(), 2U);
  EXPECT_LT(left.lines.size(), kCheapCases);
  EXPECT_EQ(left.torn_bytes, 0);
  EXPECT_EQ(sweep(config, ok_command()).exit_code, kExitPass);
  EXPECT_EQ(results_by_case(config.output).size(), kCheapCases);
  EXPECT_EQ(read_results(config.output).lines.size(), kCheapCases);
}

TEST(Sweep, ShowsABarOnATerminalAndKeepsFailuresThere) {
  const TemporaryFolder folder;
  const int terminal = posix_openpt(O_RDWR | O_NOCTTY);
  ASSERT_GE(terminal, 0);
  ASSERT_EQ(grantpt(terminal), 0);
  ASSERT_EQ(unlockpt(terminal), 0);
  const int other_end = open(ptsname(terminal), O_RDWR | O_NOCTTY);
  ASSERT_GE(other_end, 0);
  const int before = dup(STDERR_FILENO);
  dup2(other_end, STDERR_FILENO);
  testing::internal::CaptureStdout();
  const std::string script = std::string("case \"$1\" in *'\"threads\":2,'*) exit 9;; *) echo '") + kOkReport + "';; esac";
  run_sweep(config_of(folder, "loss: cross_entropy\nshape: 2x64\ndtype: bf16\nthreads: [1, 2]\noutput: r.jsonl\n"),
            script_command(script));
  dup2(before, STDERR_FILENO);
  close(before);
  testing::internal::GetCapturedStdout();
  close(other_end);
  std::string shown;
  char buffer[4096];
  for (ssize_t count = 0; (count = read(terminal, buffer, sizeof buffer)) > 0;) shown.append(buffer, static_cast<size_t>(count));
  close(terminal);
  ASSERT_GT(shown.size(), 4U);
  EXPECT_NE(shown.find("\r\033[K[------------------------] 0/2 cross_entropy"), std::string::npos) << shown;
  EXPECT_NE(shown.find("\r\033[K[############------------] 1/2 "), std::string::npos) << shown;
  EXPECT_NE(shown.find("[2/2] cross_entropy [2, 64] bfloat16 value_and_grad threads=2: error: exit code 9\r\n"),
            std::string::npos)
      << shown;
  EXPECT_EQ(shown.find("threads=1: 2 ms"), std::string::npos) << shown;
  EXPECT_EQ(shown.substr(shown.size() - 4), "\r\033[K");
}

Json line_of(Json sweep_case, double median_ms) {
  Json line = {{"case", std::move(sweep_case)}};
  line.update(Json::parse(kOkReport));
  line["median_ms"] = median_ms;
  return line;
}

TEST(SweepReport, NamesTheBestOfEachGroupAndWhatMatters) {
  const TemporaryFolder folder;
  const SweepConfig config = config_of(folder,
                                       "loss: cross_entropy\nshape: 2x64\ndtype: [bf16, fp32]\nrow_block: [1, 2]\n"
                                       "vocab_block: [64, 128]\n");
  ASSERT_EQ(config.cases.size(), 8U);
  const double medians[] = {4, 2, 4.04, 2.02, 10, 30, 10, 0};  // bf16: 1x64, 1x128, 2x64, 2x128; then fp32, the last crashed
  std::vector<Json> lines;
  for (size_t i = 0; i < 8; ++i) lines.push_back(line_of(config.cases[i], medians[i]));
  lines[7] = {{"case", config.cases[7]}, {"status", "crashed"}, {"message", "signal 11"}};
  const std::string report = sweep_report(lines);
  for (const char* word : {"cross_entropy [2, 64] bfloat16 value_and_grad\n", "best: row_block=1 vocab_block=128: 2 ms\n",
                           "cross_entropy [2, 64] float32 value_and_grad\n", "best: row_block=1 vocab_block=64: 10 ms\n",
                           "crashed", "row_block: 1.010 x, at most 1.010 x\n", "vocab_block: 2.000 x, at most 3.000 x\n"}) {
    EXPECT_NE(report.find(word), std::string::npos) << word << " in\n" << report;
  }
  // Bars are in proportion: 2 of 4.04 ms are 20 of 40 characters.
  EXPECT_NE(report.find(" " + std::string(20, '#') + " best\n"), std::string::npos) << report;
  EXPECT_NE(report.find(" " + std::string(40, '#') + "\n"), std::string::npos) << report;
}

TEST(SweepReport, AGroupWithoutAResultHasNoBest) {
  const TemporaryFolder folder;
  const SweepConfig config = config_of(folder, "loss: cross_entropy\nshape: 2x64\ndtype: bf16\n");
  const std::string report = sweep_report({{{"case", config.cases[0]}, {"status", "timeout"}, {"message", "killed"}}});
  EXPECT_NE(report.find("best: none\n"), std::string::npos) << report;
}

}  // namespace
}  // namespace tileloss::tools
