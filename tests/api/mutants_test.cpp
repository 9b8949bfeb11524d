// The judgement can fail: planted into real kernel output, every mutant is rejected by some gate, in every storage type.
#include "check/judge/mutants.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "support/result_writer.h"
#include "tests/api/calls.h"
#include "tests/shared/program.h"

namespace tileloss::test {
namespace {

class Mutants : public testing::TestWithParam<reference::NumberFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, Mutants, testing::ValuesIn(kFormats), format_name);

// A last tile of 63 columns; rows in groups; confident rows' labels are their argmax.
constexpr const char* kConfig =
    "loss: cross_entropy\nbatch_size: 6\nseq_len: 7\nvocab_size: 319\ndtype: fp32\nignore_prob: 0.1\nmutants: true\n"
    "kernel: {row_groups: true, vocab_block: 64}\noutputs: [logp, lse, entropy, argmax, correct]\n";

TEST_P(Mutants, AreAllRejected) {
  const std::vector<std::vector<std::string>> families = {
      {},
      {"reduction=none", "upstream=per_row"},
      {"label_smoothing=0.1"},
      {"softcap=10"},
      {"loss=logprobs", "upstream=per_row", "source={kind: synthetic, distribution: confident}", "temperature=4"}};
  std::set<std::string> named;
  for (const std::vector<std::string>& family : families) {
    const TemporaryFolder folder;
    const auto output = folder.path() / "r.jsonl";
    std::vector<std::string> arguments = {"gradcheck", "--config", folder.write("c.yaml", kConfig).string()};
    for (const std::string& set : {"output=" + output.string(), std::string("dtype=") + reference::format_info(GetParam()).name})
      arguments.insert(arguments.end(), {"--set", set});
    for (const std::string& set : family) arguments.insert(arguments.end(), {"--set", set});
    const ProgramResult result = run_program(arguments);
    ASSERT_EQ(result.exit_code, 0) << result.out << result.err;
    const tools::ResultFile file = tools::read_results(output);
    for (const tools::Json& mutant : file.lines.at(0).at("mutants")) {
      named.insert(mutant["name"]);
      EXPECT_TRUE(mutant["planted"]) << mutant;
      EXPECT_FALSE(mutant["caught_by"].empty()) << mutant;
    }
  }
  EXPECT_EQ(named.size(), tools::all_mutants().size() - 1);  // agreement is of a teacher
}

}  // namespace
}  // namespace tileloss::test
