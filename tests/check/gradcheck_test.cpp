// tileloss gradcheck, end to end: the built program on small configs.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "support/abi.h"
#include "support/result_writer.h"
#include "support/safetensors.h"
#include "tests/shared/program.h"

namespace tileloss::tools {
namespace {

using test::ProgramResult;
using test::run_program;
using test::TemporaryFolder;

constexpr const char* kSmall =
    "loss: cross_entropy\n"
    "batch_size: 2\nseq_len: 9\nvocab_size: 3001\ndtype: bf16\nseed: 3\nignore_prob: 0.2\n"
    "source: {kind: synthetic, distribution: normal, std: 2}\n"
    "outputs: [logp, lse, entropy, argmax, correct, log_sum_sq_probs, mean_logit]\n";

ProgramResult gradcheck(const TemporaryFolder& folder, const std::string& config, std::vector<std::string> sets = {},
                        bool mutants = false) {
  std::vector<std::string> arguments = {"gradcheck", "--config", folder.write("c.yaml", config).string()};
  for (std::string& set : sets) {
    arguments.emplace_back("--set");
    arguments.push_back(std::move(set));
  }
  if (mutants) arguments.emplace_back("--mutants");
  return run_program(arguments);
}

TEST(Gradcheck, PassesAndSaysSoInTheLastLine) {
  const TemporaryFolder folder;
  const ProgramResult result = gradcheck(folder, kSmall);
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_EQ(result.last_line(), "PASS");
}

TEST(Gradcheck, AGateThatFailsIsNamedAndTheExitCodeIsOne) {
  const TemporaryFolder folder;
  const ProgramResult result = gradcheck(folder, kSmall, {"tolerances.dlogits_max_abs=1e-12"});
  EXPECT_EQ(result.exit_code, 1) << result.out << result.err;
  EXPECT_EQ(result.last_line().rfind("FAIL: ", 0), 0U) << result.last_line();
  EXPECT_NE(result.last_line().find("dlogits_max_abs"), std::string::npos) << result.last_line();
}

TEST(Gradcheck, ConfigErrorsExitWithTwoAndMissingFilesWithThree) {
  const TemporaryFolder folder;
  const ProgramResult unknown = gradcheck(folder, std::string(kSmall) + "lable: 1\n");
  EXPECT_EQ(unknown.exit_code, 2);
  EXPECT_NE(unknown.err.find("c.yaml:10: lable: unknown key"), std::string::npos) << unknown.err;
  EXPECT_EQ(run_program({"gradcheck", "--config", "/nonexistent.yaml"}).exit_code, 3);
  EXPECT_EQ(run_program({"gradcheck"}).exit_code, 2);
  EXPECT_EQ(gradcheck(folder, kSmall, {"kernel.vocab_block=100"}).exit_code, 2);  // the library's own refusal
  EXPECT_EQ(gradcheck(folder, kSmall, {"output=/nonexistent/r.jsonl"}).exit_code, 3);
  EXPECT_EQ(gradcheck(folder, kSmall, {"output=/dev/full"}).exit_code, 3);
}

TEST(Gradcheck, ADeviceThatCannotBeHadIsNamed) {
  const TemporaryFolder folder;
  const ProgramResult unknown = gradcheck(folder, kSmall, {"kernel.device=gpu"});
  EXPECT_EQ(unknown.exit_code, 2);
  EXPECT_NE(unknown.err.find("kernel.device: expected cpu, cuda or cuda:N, got gpu"), std::string::npos) << unknown.err;
  const ProgramResult missing = gradcheck(folder, kSmall, {"kernel.device=cuda:99"});
  EXPECT_EQ(missing.exit_code, 3);
  EXPECT_NE(missing.err.find("device: expected "), std::string::npos) << missing.err;
  EXPECT_NE(missing.err.find("got cuda:99"), std::string::npos) << missing.err;
  const ProgramResult strict = gradcheck(folder, kSmall, {"kernel.device=cuda", "strict=true"});
  EXPECT_EQ(strict.exit_code, 2);
  EXPECT_NE(strict.err.find("strict: expected device cpu"), std::string::npos) << strict.err;
}

TEST(Gradcheck, ImpossibleSizesAreRefusedBeforeAnythingIsAllocated) {
  const TemporaryFolder folder;
  const auto start = std::chrono::steady_clock::now();
  const ProgramResult result = gradcheck(folder, kSmall, {"seq_len=1000000000"});
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));  // drawing the labels alone takes longer
  EXPECT_EQ(result.exit_code, 3) << result.err;
  EXPECT_NE(result.err.find("logits: needs"), std::string::npos) << result.err;
}

TEST(Gradcheck, TheResultLineHasEveryMetricAndGate) {
  const TemporaryFolder folder;
  const ProgramResult result = gradcheck(folder, kSmall, {"output=" + (folder.path() / "r.jsonl").string()}, true);
  ASSERT_EQ(result.exit_code, 0) << result.out << result.err;
  const ResultFile file = read_results(folder.path() / "r.jsonl");
  ASSERT_EQ(file.lines.size(), 1U);
  const Json& line = file.lines[0];
  for (const char* key : {"loss_ref", "loss_kernel", "abs_diff_loss", "fwd/logp_max_abs", "fwd/per_loss_max_abs",
                          "dlogits_max_abs", "dlogits_max_rel", "dlogits_mean_abs", "dlogits_ulp_target",
                          "dlogits_ulp_off_target", "dlogits_normwise", "time/ref_s", "time/kernel_s"}) {
    ASSERT_TRUE(line.contains(key)) << key;
    EXPECT_TRUE(line[key].is_number()) << key;
  }
  EXPECT_EQ(line["shape/vocab_size"], 3001);
  EXPECT_EQ(line["shape/rows"], 18);
  EXPECT_EQ(line["kernel/in_place"], false);
  EXPECT_TRUE(line["kernel/isa"].is_string());
  EXPECT_EQ(line["pass"], true);
  EXPECT_GE(line["gates"].size(), 20U);
  for (const Json& gate : line["gates"]) EXPECT_TRUE(gate["pass"].get<bool>()) << gate.dump();
  EXPECT_GE(line["mutants"].size(), 5U);
}

TEST(Gradcheck, TheSameSeedGivesTheSameNumbers) {
  const TemporaryFolder folder;
  const std::string output = "output=" + (folder.path() / "r.jsonl").string();
  ASSERT_EQ(gradcheck(folder, kSmall, {output}).exit_code, 0);
  ASSERT_EQ(gradcheck(folder, kSmall, {output, "kernel.threads=1", "kernel.row_block=1"}).exit_code, 0);
  const ResultFile file = read_results(folder.path() / "r.jsonl");
  for (const char* key : {"loss_ref", "loss_kernel", "dlogits_max_abs", "dlogits_normwise"}) {
    EXPECT_EQ(file.lines[0][key], file.lines[1][key]) << key;
  }
}

TEST(Gradcheck, RealLogitsFromAFilePass) {
  const ProgramResult result =
      run_program({"gradcheck", "--config", TILELOSS_SOURCE_DIR "/configs/gradcheck_ce_safetensors.yaml"});
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_EQ(result.last_line(), "PASS");
}

TEST(Gradcheck, AFileThatDoesNotFitTheConfigIsRefused) {
  const std::string config = TILELOSS_SOURCE_DIR "/configs/gradcheck_ce_safetensors.yaml";
  for (const char* set : {"vocab_size=30000", "dtype=fp32", "seq_len=17", "source.logits=nothing", "source.labels=advantages",
                          "source.path=/dev/null", "valid_vocab=40000"}) {
    const ProgramResult result = run_program({"gradcheck", "--config", config, "--set", set});
    EXPECT_NE(result.exit_code, 0) << set;
    EXPECT_NE(result.exit_code, 1) << set << result.out;
    EXPECT_FALSE(result.err.empty()) << set;
  }
}

// float16 holds no number below 6e-8: the gradient of a mean over a wide softmax is nearly all zeros.
TEST(Gradcheck, AMostlyZeroGradientIsMistrustedUnlessExpected) {
  const TemporaryFolder folder;
  const std::vector<std::string> sets = {"dtype=fp16", "vocab_size=150000", "num_items=1000"};
  const ProgramResult mistrusted = gradcheck(folder, kSmall, sets);
  EXPECT_EQ(mistrusted.exit_code, 1) << mistrusted.out << mistrusted.err;
  EXPECT_EQ(mistrusted.last_line(), "FAIL: mistrusted/zero_fraction");
  EXPECT_EQ(gradcheck(folder, kSmall, {sets[0], sets[1], sets[2], "expect_mostly_zero=true"}).exit_code, 0);
}

TEST(Gradcheck, AResultsFileThatIsNoneIsLeftAlone) {
  const TemporaryFolder folder;
  const std::string text = "precious data without newline";
  const auto path = folder.write("p.txt", text);
  const ProgramResult result = gradcheck(folder, kSmall, {"output=" + path.string()});
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_NE(result.err.find("p.txt:1: not a JSON object"), std::string::npos) << result.err;
  EXPECT_EQ(test::read_text(path), text);
}

TEST(Gradcheck, AnObjectWithoutANewlineIsKeptAndItsOwnTornLineIsDropped) {
  const TemporaryFolder folder;
  const std::string settings = "{\"my\":\"settings\"}";
  const auto path = folder.write("q.json", settings);
  ASSERT_EQ(gradcheck(folder, kSmall, {"output=" + path.string()}).exit_code, 0);
  const std::string text = test::read_text(path);
  EXPECT_EQ(text.substr(0, settings.size() + 1), settings + "\n");
  folder.write("q.json", text.substr(0, text.size() - 2));
  const ProgramResult result = gradcheck(folder, kSmall, {"output=" + path.string()});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_NE(result.err.find("dropped a torn last line"), std::string::npos) << result.err;
  EXPECT_EQ(read_results(path).lines.size(), 2U);
}

TEST(Gradcheck, AFileThatAnotherProcessWritesToIsRefused) {
  const TemporaryFolder folder;
  const ResultWriter writer(folder.path() / "r.jsonl");
  const ProgramResult result = gradcheck(folder, kSmall, {"output=" + (folder.path() / "r.jsonl").string()});
  EXPECT_EQ(result.exit_code, 3) << result.err;
  EXPECT_NE(result.err.find("r.jsonl: another process writes to it"), std::string::npos) << result.err;
}

// Of a section of the config, as the message about an unknown one lists them.
std::vector<std::string> known_keys(const TemporaryFolder& folder, const std::string& config, const std::string& section) {
  const ProgramResult result = gradcheck(folder, config, {section + "unknown_key=1"});
  EXPECT_EQ(result.exit_code, 2) << result.err;
  const std::string before = "known here: ";
  const size_t start = result.err.find(before);
  EXPECT_NE(start, std::string::npos) << result.err;
  std::string list = result.err.substr(start + before.size());
  list.erase(list.find_last_not_of('\n') + 1);
  std::vector<std::string> keys;
  for (const std::string& key : split(list, ',')) keys.push_back(key.substr(key.find_first_not_of(' ')));
  return keys;
}

// Not as a part of a longer one. (std::regex does not compile under sanitizers: GCC 12 warns of its insides.)
bool has_word(const std::string& text, const std::string& word) {
  const auto is_part = [&](size_t at) { return at < text.size() && (std::isalnum(text[at]) != 0 || text[at] == '_'); };
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) {
    if ((at == 0 || !is_part(at - 1)) && !is_part(at + word.size())) return true;
  }
  return false;
}

TEST(Gradcheck, HelpNamesEveryKeyThatIsNotAnOptionOfTheLoss) {
  const TemporaryFolder folder;
  const std::string help = run_program({"gradcheck", "--help"}).out;
  const std::string sizes = "batch_size: 1\nseq_len: 2\nvocab_size: 64\ndtype: bf16\n";
  for (const std::string level : {"logits", "linear"}) {
    for (const std::string loss : {"cross_entropy", "policy_loss"}) {
      const Function function((level == "linear" ? "linear_" : "") + loss);
      for (const std::string source : {"{kind: synthetic}", "{kind: safetensors, path: x}"}) {
        const std::string config = "level: " + level + "\nloss: " + loss + "\nsource: " + source + "\nhidden_size: 8\n" + sizes;
        for (const std::string section : {"", "source.", "kernel.", "tolerances."}) {
          for (const std::string& key : known_keys(folder, config, section)) {
            if (section.empty() && function.find_field(key) != nullptr) continue;
            EXPECT_TRUE(has_word(help, key)) << section << key << " is not in\n" << help;
          }
        }
      }
    }
  }
}

TEST(Gradcheck, ATensorThatAnOptionNeedsIsAskedForByTheConfigsKeys) {
  const TemporaryFolder folder;
  const std::string base = "loss: policy_loss\nbatch_size: 1\nseq_len: 4\nvocab_size: 64\ndtype: fp32\n";
  for (const std::string level : {"", "level: linear\nhidden_size: 8\n"}) {
    for (const auto& [set, message] :
         {std::pair("beta=1",
                    "ref_logp_noise_scale: expected a number, or source.ref_logp of a file, as beta is not 0, got neither"),
          std::pair("sampler_correction=truncate",
                    "sampler_logp_noise_scale: expected a number, or source.sampler_logp of a file, as sampler_correction is "
                    "not off, got neither")}) {
      const ProgramResult result = gradcheck(folder, base + level, {set});
      EXPECT_EQ(result.exit_code, 2) << result.err;
      EXPECT_NE(result.err.find(message), std::string::npos) << result.err;
    }
  }
}

// Logits [2, 2, 40] and labels of another shape, in a file.
ProgramResult gradcheck_labels(const std::vector<int64_t>& shape) {
  const TemporaryFolder folder;
  const std::vector<float> logits(2 * 2 * 40, 0.5F);
  const std::vector<int64_t> labels(8, 1);
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  write_safetensors(folder.path() / "x.safetensors", {{"logits", "F32", {2, 2, 40}, logits.data(), std::ssize(logits) * 4},
                                                      {"labels", "I64", shape, labels.data(), count * 8}});
  return gradcheck(folder, "loss: cross_entropy\nsource: {kind: safetensors, path: x.safetensors, labels: labels}\n");
}

TEST(Gradcheck, LabelsHaveTheLogitsLeadingDimensionsOrAreFlat) {
  for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{{2, 2}, {4}}) {
    const ProgramResult result = gradcheck_labels(shape);
    EXPECT_EQ(result.exit_code, 0) << result.err;
  }
  for (const auto& [shape, text] : std::vector<std::pair<std::vector<int64_t>, std::string>>{
           {{2, 3}, "[2, 3]"}, {{1, 4}, "[1, 4]"}, {{2, 2, 1}, "[2, 2, 1]"}, {{6}, "[6]"}, {{3}, "[3]"}}) {
    const ProgramResult result = gradcheck_labels(shape);
    EXPECT_EQ(result.exit_code, 2) << text << result.out;
    const std::string message = "labels: expected [2, 2] or [4], as logits is [2, 2, 40], got " + text;
    EXPECT_NE(result.err.find(message), std::string::npos) << result.err;
  }
}

// Three rows of logits in a file, the third ignored.
constexpr int64_t kFileColumns = 40;
ProgramResult gradcheck_rows(float first, float second, const std::vector<std::string>& sets = {}) {
  const TemporaryFolder folder;
  std::vector<float> logits(3 * kFileColumns, second);
  std::fill_n(logits.begin(), kFileColumns, first);
  const std::vector<int64_t> labels = {1, 2, -100};
  write_safetensors(folder.path() / "x.safetensors", {{"logits", "F32", {3, kFileColumns}, logits.data(), std::ssize(logits) * 4},
                                                      {"labels", "I64", {3}, labels.data(), std::ssize(labels) * 8}});
  return gradcheck(folder, "loss: cross_entropy\nsource: {kind: safetensors, path: x.safetensors, labels: labels}\n", sets);
}

TEST(Gradcheck, AFileWithoutOneFiniteRowIsMistrusted) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInfinity = std::numeric_limits<float>::infinity();
  for (const auto& [first, second] : {std::pair(kNan, kNan), {kInfinity, kInfinity}, {-kInfinity, kNan}}) {
    for (const std::vector<std::string>& sets : {std::vector<std::string>{}, {"loss=logprobs"}, {"expect_mostly_zero=true"}}) {
      const ProgramResult result = gradcheck_rows(first, second, sets);
      EXPECT_EQ(result.exit_code, 1) << result.out << result.err;
      EXPECT_EQ(result.last_line(), "FAIL: mistrusted/nonfinite_fraction") << first << second;
    }
  }
}

// Rows of special values are checked beside others.
TEST(Gradcheck, OneFiniteRowIsEnough) {
  for (const float special : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    for (const char* set : {"reduction=none", "loss=logprobs"}) {
      const ProgramResult result = gradcheck_rows(special, 0.5F, {set});
      EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
      EXPECT_NE(result.out.find("mistrusted/nonfinite_fraction"), std::string::npos) << result.out;
    }
  }
}

// Mistakes that no config of full rows of tiles, adjoining rows and labels far from the argmax would show.
TEST(Gradcheck, TheConfigsOfEdgesPlantAndCatchWhatOthersDoNot) {
  const std::pair<const char*, std::vector<std::string>> configs[] = {
      {"gradcheck_ce_edges.yaml", {"partial_tile_skipped", "row_group_off_by_one"}},
      {"gradcheck_policy_edges.yaml", {"partial_tile_skipped", "row_group_off_by_one", "entropy_sign_at_argmax"}}};
  for (const auto& [config, names] : configs) {
    for (const std::string dtype : {"bf16", "fp16", "fp32"}) {
      for (const std::string in_place : {"false", "true"}) {
        const TemporaryFolder folder;
        const ProgramResult result = run_program({"gradcheck", "--config", std::string(TILELOSS_SOURCE_DIR "/configs/") + config,
                                                  "--set", "dtype=" + dtype, "--set", "kernel.in_place=" + in_place, "--set",
                                                  "output=" + (folder.path() / "r.jsonl").string()});
        ASSERT_EQ(result.exit_code, 0) << config << dtype << "\n" << result.out << result.err;
        const Json line = read_results(folder.path() / "r.jsonl").lines.at(0);
        for (const std::string& name : names) {
          const auto found = std::find_if(line["mutants"].begin(), line["mutants"].end(),
                                          [&](const Json& mutant) { return mutant["name"] == name; });
          ASSERT_NE(found, line["mutants"].end()) << name;
          EXPECT_TRUE((*found)["planted"].get<bool>()) << config << dtype << name;
          EXPECT_FALSE((*found)["caught_by"].empty()) << config << dtype << name;
        }
      }
    }
  }
}

struct MutantCase {
  std::string name;
  std::vector<std::string> sets;
  std::vector<std::string> dtypes = {"bf16", "fp16", "fp32"};
};

void PrintTo(const MutantCase& mutant_case, std::ostream* out) { *out << mutant_case.name; }

class GradcheckMutants : public testing::TestWithParam<MutantCase> {};

TEST_P(GradcheckMutants, AreAllCaught) {
  for (const std::string& dtype : GetParam().dtypes) {
    const TemporaryFolder folder;
    std::vector<std::string> sets = GetParam().sets;
    sets.push_back("dtype=" + dtype);
    sets.push_back("output=" + (folder.path() / "r.jsonl").string());
    const ProgramResult result = gradcheck(folder, kSmall, sets, true);
    ASSERT_EQ(result.exit_code, 0) << dtype << "\n" << result.out << result.err;
    int planted = 0;
    const ResultFile file = read_results(folder.path() / "r.jsonl");
    ASSERT_EQ(file.lines.size(), 1U);
    for (const Json& mutant : file.lines[0]["mutants"]) {
      if (!mutant["planted"].get<bool>()) continue;
      ++planted;
      EXPECT_FALSE(mutant["caught_by"].empty()) << dtype << " " << mutant.dump();
    }
    EXPECT_GE(planted, 5) << dtype << "\n" << result.out;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Families, GradcheckMutants,
    testing::Values(
        MutantCase{"plain", {}}, MutantCase{"in_place", {"kernel.in_place=true"}}, MutantCase{"sum", {"reduction=sum"}},
        MutantCase{"none_per_row", {"reduction=none", "upstream=per_row"}},
        MutantCase{"smoothing_z_loss", {"label_smoothing=0.1", "z_loss=1e-3", "reduction=sum"}},
        MutantCase{
            "weights",
            {"token_weights=random", "class_weights=random", "label_smoothing=0.2", "upstream=random", "outputs=[logp, lse]"}},
        MutantCase{"transforms", {"softcap=20", "temperature=0.7", "logit_scale=1.5"}},
        MutantCase{"temperature_on_logprob", {"temperature=0.5", "temperature_on=logprob"}},
        MutantCase{"padding", {"valid_vocab=2900"}},
        // Not float16, which rounds this gradient to zeros.
        MutantCase{"confident", {"source={distribution: confident}", "reduction=sum"}, {"bf16", "fp32"}},
        MutantCase{"logprobs_ones", {"loss=logprobs"}}, MutantCase{"logprobs_per_row", {"loss=logprobs", "upstream=per_row"}},
        MutantCase{"logprobs_in_place", {"loss=logprobs", "upstream=random", "kernel.in_place=true", "temperature=1.3"}}),
    [](const testing::TestParamInfo<MutantCase>& test_case) { return test_case.param.name; });

}  // namespace
}  // namespace tileloss::tools
