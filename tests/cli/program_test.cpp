// The `tileloss` program from outside: help, exit codes, bench, info, signals.
#include "tests/shared/program.h"

#include <gtest/gtest.h>

#include <csignal>
#include <fstream>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>

#include "backends/cpu/isa/isa.h"
#include "bench/matmul_roof.h"
#include "bench/roofs.h"
#include "support/format.h"
#include "support/memory.h"
#include "support/signals.h"
#include "tests/shared/child_process.h"
#include "tests/shared/resource_limit.h"

namespace tileloss::tools {
namespace {

using test::Program;
using test::ProgramResult;
using test::run_program;
using test::TemporaryFolder;
using Json = nlohmann::ordered_json;

std::vector<Json> json_lines(const std::string& text) {
  std::vector<Json> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(Json::parse(line));
  return lines;
}

TEST(Program, HelpIsEverywhereAndExitsWithZero) {
  for (const std::vector<std::string>& arguments : std::vector<std::vector<std::string>>{
           {"--help"}, {"gradcheck", "--help"}, {"bench", "--help"}, {"sweep", "--help"}, {"info", "--help"}}) {
    const ProgramResult result = run_program(arguments);
    EXPECT_EQ(result.exit_code, 0);
    EXPECT_NE(result.out.find("Usage:"), std::string::npos) << result.out;
  }
}

TEST(Program, NoSubcommandPrintsHelpAndExitsWithTwo) {
  const ProgramResult result = run_program({});
  EXPECT_EQ(result.exit_code, 2);
  for (const char* name : {"gradcheck", "bench", "sweep", "info"})
    EXPECT_NE(result.out.find(name), std::string::npos) << result.out;
}

TEST(Program, WrongFlagsExitWithTwo) {
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{{"sing"},
                                             {"bench", "--tokens", "0"},
                                             {"bench", "--tokens", "x"},
                                             {"bench", "--dtype", "int8"},
                                             {"bench", "--isa", "mmx"},
                                             {"bench", "--set", "lable=1"},
                                             {"bench", "--set", "label_smoothing=2"},
                                             {"bench", "--loss", "focal"},
                                             {"bench", "--vocab-block", "100", "--tokens", "4", "--vocab", "256"},
                                             {"info", "--x"}}) {
    const ProgramResult result = run_program(arguments);
    EXPECT_EQ(result.exit_code, 2) << arguments.back() << result.err;
    EXPECT_FALSE(result.err.empty());
  }
}

TEST(Program, AFullStandardOutputExitsWithThree) {
  const ProgramResult result = Program({"gradcheck", "--help"}, {.out = "/dev/full"}).wait();
  const ProgramResult bench = Program({"bench", "--tokens", "4", "--vocab", "256", "--iters", "1"}, {.out = "/dev/full"}).wait();
  EXPECT_EQ(bench.exit_code, 3) << bench.err;
  EXPECT_EQ(result.exit_code, 3) << result.err;
}

TEST(Program, NumbersOutOfRangeAreRefusedWithTheirFlag) {
  for (const auto& [flag, value] : std::vector<std::pair<std::string, std::string>>{
           {"--seed", "-1"}, {"--threads", "1025"}, {"--threads", "-1"}, {"--iters", "0"}}) {
    const ProgramResult result = run_program({"bench", "--tokens", "4", "--vocab", "64", "--iters", "1", flag, value});
    EXPECT_EQ(result.exit_code, 2) << flag << result.err;
    EXPECT_NE(result.err.find(flag), std::string::npos) << flag << result.err;
  }
}

TEST(Program, WrongFlagsAreOneLineWithWhatWasExpectedAndGiven) {
  for (const auto& [arguments, message] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"sing"}, "unknown command sing"},
           {{"gradchek"}, "unknown command gradchek; did you mean gradcheck?"},
           {{"audit", "--list"}, "audit is a command of the Python package"},
           {{"gradcheck", "--confg", "x"}, "unknown flag --confg; did you mean --config?"},
           {{"bench", "--tokesn=3"}, "unknown flag --tokesn; did you mean --tokens?"},
           {{"gradcheck", "--impl=torch"}, "--impl is a flag of the Python package's command: `pip install '.[check]'`"},
           {{"bench", "--frontnd", "jax"}, "unknown flag --frontnd; did you mean --frontend?"},
           {{"bench", "--entirely-else"}, "unknown flag --entirely-else\n"},
           {{"gradcheck"}, "--config is required"},
           {{"bench", "--tokens"}, "--tokens"},
           {{"bench", "--tokens", "1e3"}, "--tokens: expected an integer from 1 to 2147483648, got '1e3'"},
           {{"bench", "--tokens", "0x10"}, "--tokens: expected an integer from 1 to 2147483648, got '0x10'"},
           {{"bench", "--tokens", ""}, "--tokens: expected an integer from 1 to 2147483648, got ''"},
           {{"bench", "--tokens", "2147483649"}, "--tokens: expected an integer from 1 to 2147483648, got '2147483649'"},
           {{"bench", "--iters", "99999999999999999999"},
            "--iters: expected an integer from 1 to 1000000, got '99999999999999999999'"},
           {{"bench", "--device", "cuda:x"}, "--device: expected cpu, cuda or cuda:N, got cuda:x"},
           {{"bench", "--device", "cuda", "--impl", "both"}, "--device: the reference runs on the cpu alone"},
           {{"bench", "--cuda-kernel", "cluster"}, "cuda_kernel: expected auto on cpu from logits, got cluster"},
           {{"bench", "--impl", "fast"}, "--impl: expected one of kernel, reference, both, got 'fast'"}}) {
    const ProgramResult result = run_program(arguments);
    EXPECT_EQ(result.exit_code, 2) << result.err;
    EXPECT_EQ(result.out, "");
    EXPECT_EQ(result.err.rfind("tileloss: ", 0), 0U) << result.err;
    EXPECT_NE(result.err.find(message), std::string::npos) << result.err;
    EXPECT_EQ(result.err.find('\n'), result.err.size() - 1) << result.err;
  }
}

TEST(Bench, NumbersAreDecimalWithLeadingZerosToo) {
  const ProgramResult result =
      run_program({"bench", "--tokens", "010", "--vocab", "0080", "--iters", "08", "--warmup", "00", "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const Json line = json_lines(result.out).back();
  EXPECT_EQ(line["tokens"], 10);
  EXPECT_EQ(line["vocab"], 80);
  EXPECT_EQ(line["iters"], 8);
}

void expect_bench_line(const Json& line) {
  for (const char* key : {"loss", "pass", "dtype", "isa", "impl", "schedule"}) EXPECT_TRUE(line.at(key).is_string()) << key;
  EXPECT_TRUE(line.contains("hidden"));
  for (const char* key : {"tokens", "vocab", "threads", "first_call_s", "median_ms", "min_ms", "mean_ms", "mem_after_alloc",
                          "mem_peak", "gb_per_s", "in_place_ms", "copy_ms", "read_ms", "exp_ms", "roof_ms", "ratio_to_roof"}) {
    ASSERT_TRUE(line.contains(key) && line[key].is_number()) << key;
    EXPECT_GT(line[key].get<double>(), 0) << key;
  }
  EXPECT_LE(line["min_ms"], line["median_ms"]);
  EXPECT_GE(line["mem_peak"], line["mem_after_alloc"]);
  EXPECT_NEAR(line["ratio_to_roof"].get<double>(), line["median_ms"].get<double>() / line["roof_ms"].get<double>(), 1e-9);
}

TEST(Bench, JsonHasEveryFieldAndValueAndGradComesLast) {
  for (const bool in_place : {false, true}) {
    std::vector<std::string> arguments = {
        "bench",   "--loss", "cross_entropy", "--tokens", "70",      "--vocab", "5003",
        "--dtype", "bf16",   "--impl",        "both",     "--iters", "3",       "--warmup",
        "1",       "--json", "--entropy",     "--seed",   "9",       "--set",   "label_smoothing=0.1"};
    if (in_place) arguments.emplace_back("--in-place");
    const ProgramResult result = run_program(arguments);
    ASSERT_EQ(result.exit_code, 0) << result.err;
    const std::vector<Json> lines = json_lines(result.out);
    ASSERT_EQ(lines.size(), 4U);
    for (const Json& line : lines) {
      expect_bench_line(line);
      EXPECT_EQ(line["tokens"], 70);
      EXPECT_EQ(line["seed"], 9);
      EXPECT_EQ(line["in_place"], in_place);
      EXPECT_EQ(line["options"]["label_smoothing"], 0.1);
      const bool writes = line["pass"] == "value_and_grad";
      const char* memory = !writes ? "read_ms" : in_place ? "in_place_ms" : "copy_ms";
      EXPECT_EQ(line["roof_ms"], std::max(line[memory], line["exp_ms"]));
    }
    EXPECT_EQ(lines.back()["pass"], "value_and_grad");
    EXPECT_EQ(lines.back()["impl"], "kernel");
    EXPECT_GT(lines.back()["speedup_over_reference"], 0.0);
  }
}

TEST(Bench, LogprobsAndTheTableWork) {
  const ProgramResult result =
      run_program({"bench", "--loss", "logprobs", "--tokens", "16", "--vocab", "1000", "--dtype", "fp32", "--iters", "2"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  for (const char* word : {"forward", "backward", "ratio", "kernel"})
    EXPECT_NE(result.out.find(word), std::string::npos) << result.out;
}

TEST(Bench, OnePassAloneIsTimedAgainstItsRoof) {
  for (const std::string pass : {"forward", "backward", "value_and_grad"}) {
    for (const bool in_place : {false, true}) {
      for (const std::vector<std::string>& loss :
           std::vector<std::vector<std::string>>{{"--loss", "cross_entropy", "--set", "label_smoothing=0.1"},
                                                 {"--loss", "policy_loss", "--preset", "gspo", "--set", "entropy_coef=0.01"}}) {
        std::vector<std::string> arguments = {"bench", "--pass",  pass, "--tokens", "70", "--vocab",
                                              "5003",  "--iters", "2",  "--warmup", "0",  "--json"};
        arguments.insert(arguments.end(), loss.begin(), loss.end());
        if (in_place) arguments.emplace_back("--in-place");
        const ProgramResult result = run_program(arguments);
        ASSERT_EQ(result.exit_code, 0) << result.err;
        const std::vector<Json> lines = json_lines(result.out);
        ASSERT_EQ(lines.size(), 1U) << result.out;
        expect_bench_line(lines[0]);
        EXPECT_EQ(lines[0]["pass"], pass);
        const char* memory = pass == "forward" ? "read_ms" : in_place ? "in_place_ms" : "copy_ms";
        EXPECT_EQ(lines[0]["roof_ms"], std::max(lines[0][memory], lines[0]["exp_ms"]));
      }
    }
  }
}

TEST(Bench, APassThatTheFunctionOrTheReferenceLacksIsRefused) {
  for (const auto& [arguments, message] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"--pass", "sideways"}, "--pass: expected one of forward, backward, value_and_grad, got 'sideways'"},
           {{"--pass", "value_and_grad", "--loss", "logprobs"},
            "--pass: expected forward or backward, as logprobs is no loss, got value_and_grad"},
           {{"--pass", "backward", "--impl", "both"}, "--impl: the reference has no backward from a row state"}}) {
    std::vector<std::string> all = {"bench", "--tokens", "4", "--vocab", "64", "--iters", "1"};
    all.insert(all.end(), arguments.begin(), arguments.end());
    const ProgramResult result = run_program(all);
    EXPECT_EQ(result.exit_code, 2) << message;
    EXPECT_NE(result.err.find(message), std::string::npos) << result.err;
  }
}

TEST(Bench, TooLittleMemoryIsAnEnvironmentErrorNamingTheBytes) {
  const ProgramResult result = run_program({"bench", "--tokens", "100000000", "--vocab", "151936"});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_NE(result.err.find("logits: needs 30387200.0 MB"), std::string::npos) << result.err;
  // 2^63 bytes, and 2^64: more than an int64_t counts.
  for (const auto& [dtype, megabytes] : {std::pair("bf16", "9223372036854.8"), std::pair("fp32", "18446744073709.6")}) {
    const ProgramResult huge = run_program({"bench", "--tokens", "2147483648", "--vocab", "2147483648", "--dtype", dtype});
    EXPECT_EQ(huge.exit_code, 3);
    EXPECT_NE(huge.err.find(std::string("logits: needs ") + megabytes + " MB"), std::string::npos) << huge.err;
  }
}

// 36 bytes a row, of which the logits are 2. The limit stops a program that allocates first.
TEST(Bench, RowsThatDoNotFitAreRefusedBeforeAnythingIsAllocated) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitized program takes terabytes of address space";
#endif
  constexpr int64_t kRows = int64_t{1} << 31;
  if (available_bytes() > 32 * kRows) GTEST_SKIP() << "they fit";
  if (available_bytes() < 6 * kRows) GTEST_SKIP() << "not even the logits fit";
  const test::AddressSpaceLimit limit(1 << 30);
  const ProgramResult result = run_program({"bench", "--tokens", "2147483648", "--vocab", "1", "--threads", "1"});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_NE(result.err.find(": needs "), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("of memory are available beside"), std::string::npos) << result.err;
}

TEST(Info, JsonNamesWhatTheMachineHas) {
  const ProgramResult result = run_program({"info", "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const Json info = Json::parse(result.out);
  EXPECT_EQ(info["functions"][0], "logprobs");
  EXPECT_EQ(info["isa_available"][0], "baseline");
  EXPECT_GE(info["threads"], 1);
  for (const char* roof : {"exp_g_per_s", "products_bfloat16_tflops", "products_float32_tflops"})
    EXPECT_GT(info["roofs"][roof], 0.0) << roof;
  for (const char* key : {"version", "build", "cpu", "amx", "isa_chosen", "TILELOSS_ISA", "caches"})
    EXPECT_TRUE(info.contains(key)) << key;
  EXPECT_EQ(info["devices"]["cpu"], 1);
  if (!info["devices"].contains("cuda")) {
    EXPECT_TRUE(info["devices_note"].get<std::string>().starts_with(", not cuda (libtileloss_cuda.so: ")) << info;
  }
}

#ifdef __x86_64__
// A libtileloss_cuda.so whose two devices are the host, beside a link to the program, and as both are installed, started by its
// path or through PATH.
TEST(Info, ListsDevices) {
  namespace fs = std::filesystem;
  const fs::path built = test::built("cuda_on_host");
  const TemporaryFolder folder;
  fs::create_directories(folder.path() / "bin");
  fs::create_directories(folder.path() / "lib");
  fs::copy_file(test::built("tileloss"), folder.path() / "bin" / "tileloss");
  fs::create_symlink(built / "libtileloss_cuda.so", folder.path() / "lib" / "libtileloss_cuda.so");
  const fs::path installed = folder.path() / "bin" / "tileloss";
  const ProgramResult info = Program({"info"}, {}, built / "tileloss").wait();
  EXPECT_NE(info.out.find(" cpu, 2 cuda\n"), std::string::npos) << info.out << info.err;
  // Who has found two refuses a third, without the seconds that info takes.
  const std::pair<std::string, std::vector<std::string>> starts[] = {
      {installed, {"bench", "--device=cuda:2"}},
      {"/usr/bin/env", {"PATH=" + installed.parent_path().string(), "tileloss", "bench", "--device=cuda:2"}}};
  for (const auto& [program, arguments] : starts) {
    const ProgramResult result = Program(arguments, {}, program).wait();
    EXPECT_NE(result.err.find("expected cuda:0 to cuda:1, got cuda:2"), std::string::npos) << program << result.err;
  }
  // One that is there and cannot be opened is not taken for one that is missing.
  fs::remove(folder.path() / "lib" / "libtileloss_cuda.so");
  std::ofstream(folder.path() / "lib" / "libtileloss_cuda.so") << "no library";
  const ProgramResult result = Program({"bench", "--device=cuda"}, {}, installed).wait();
  EXPECT_NE(result.err.find("libtileloss_cuda.so: file too short"), std::string::npos) << result.err;
}
#endif

// Until it has come so far, a signal ends a program without a word.
void wait_for_handler(const Program& program, int signal) {
  const std::string status = formatted("/proc/{}/status", program.child());
  for (int i = 0; i < 30'000; ++i, usleep(10'000)) {
    const std::string text = test::read_text(status);
    const size_t caught = text.find("SigCgt:");
    if (caught != std::string::npos && (std::stoull(text.substr(caught + 7), nullptr, 16) >> (signal - 1) & 1) != 0) return;
  }
  ADD_FAILURE() << "no handler";
}

// The bench would run for hours; a signal ends it soon, with what was measured so far printed whole.
TEST(Signals, StopTheBenchWithTheirExitCode) {
  for (const int signal : {SIGINT, SIGTERM}) {
    Program program({"bench", "--tokens", "64", "--vocab", "4096", "--iters", "1000000", "--json"});
    wait_for_handler(program, signal);
    usleep(1'500'000);
    ASSERT_EQ(kill(program.child(), signal), 0);
    const ProgramResult result = program.wait();
    EXPECT_EQ(result.exit_code, 128 + signal) << result.err;
    EXPECT_NE(result.err.find("stopped by"), std::string::npos) << result.err;
    for (const Json& line : json_lines(result.out)) expect_bench_line(line);
  }
}

// The reference ends after 5 calls, the kernel's millionth is never reached.
TEST(Signals, RoofsThatWereNotMeasuredAgainAreNeitherSteadyNorNot) {
  std::vector<Json> lines;
  for (const useconds_t milliseconds : {1500, 6000, 24000}) {
    Program program({"bench", "--tokens", "64", "--vocab", "4096", "--iters", "1000000", "--json", "--impl", "both"});
    usleep(milliseconds * 1000);
    ASSERT_EQ(kill(program.child(), SIGINT), 0);
    lines = json_lines(program.wait().out);
    if (!lines.empty()) break;
  }
  ASSERT_FALSE(lines.empty());
  for (const Json& line : lines) {
    EXPECT_TRUE(line.at("roofs_difference").is_null()) << line;
    EXPECT_TRUE(line.at("roofs_steady").is_null()) << line;
  }
}

TEST(Signals, StopInfo) {
  for (const int signal : {SIGINT, SIGTERM}) {
    Program program({"info"});
    wait_for_handler(program, signal);
    ASSERT_EQ(kill(program.child(), signal), 0);
    const ProgramResult result = program.wait();
    EXPECT_EQ(result.exit_code, 128 + signal) << result.out << result.err;
    EXPECT_EQ(result.out, "");
  }
}

// Where bench and info spend their last seconds.
TEST(Signals, StopTheRoofs) {
  const auto stopped_by = [](const std::function<void()>& measure) {
    return test::exit_code_of_child([&] {
      install_signal_handlers();
      std::raise(SIGTERM);
      try {
        measure();
      } catch (const Stopped& stopped) {
        return stopped.signal == SIGTERM;
      }
      return false;
    });
  };
  EXPECT_EQ(stopped_by([] {
              std::vector<char> bytes(1 << 16);
              RoofMeter(1).measure(bytes.data(), nullptr, std::ssize(bytes), std::ssize(bytes), 1);
            }),
            0);
  EXPECT_EQ(stopped_by([] {
              ThreadTeam team(1);
              MatmulRoof(impl::cpu::kernels(TILELOSS_ISA_BASELINE).matmul, impl::cpu::Compute::kFloat32).tflops(team, 1);
            }),
            0);
}

TEST(Signals, LeaveEarlierResultsIntact) {
  const TemporaryFolder folder;
  const auto output = folder.write("r.jsonl", "{\"earlier\":1}\n");
  const auto config = folder.write("c.yaml",
                                   "loss: cross_entropy\nbatch_size: 1\nseq_len: 20000\nvocab_size: 20000\ndtype: bf16\n"
                                   "output: r.jsonl\n");
  Program program({"gradcheck", "--config", config.string()});
  usleep(500'000);
  ASSERT_EQ(kill(program.child(), SIGINT), 0);
  const ProgramResult result = program.wait();
  EXPECT_EQ(result.exit_code, 130) << result.out << result.err;
  EXPECT_EQ(test::read_text(output), "{\"earlier\":1}\n");
}

}  // namespace
}  // namespace tileloss::tools
