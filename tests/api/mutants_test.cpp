// The judgement can fail: planted into real kernel output, every mutant is rejected by some gate, in every storage type.
#include "judge/gates/mutants.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "tests/api/calls.h"
#include "tests/shared/gradcheck_call.h"

namespace tileloss::test {
namespace {

using tools::Sets;

class Mutants : public testing::TestWithParam<oracle::NumberFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, Mutants, testing::ValuesIn(kFormats), format_name);

// A last tile of 63 columns; rows in groups; confident rows' labels are their argmax.
constexpr const char* kConfig =
    "loss=cross_entropy batch_size=6 seq_len=7 vocab_size=319 dtype=fp32 ignore_prob=0.1 "
    "kernel.row_groups=true kernel.vocab_block=64 outputs=[logp, lse, entropy, argmax, correct]";

TEST_P(Mutants, AreAllRejected) {
  std::set<std::string> named;
  for (const Sets& family : {Sets{},
                             {"reduction=none", "upstream=per_row"},
                             {"label_smoothing=0.1"},
                             {"softcap=10"},
                             {"loss=logprobs", "upstream=per_row", "source.distribution=confident", "temperature=4"}}) {
    const std::string dtype = std::string("dtype=") + oracle::format_info(GetParam()).name;
    const tools::GradcheckCall check(kConfig, tools::joined(family, {dtype}));
    for (const tools::MutantVerdict& mutant : check.all_mutants()) {
      named.insert(mutant.name);
      EXPECT_TRUE(mutant.planted) << mutant.name;
    }
  }
  EXPECT_EQ(named.size(), tools::all_mutants().size() - 1);  // agreement is of a teacher
}

}  // namespace
}  // namespace tileloss::test
