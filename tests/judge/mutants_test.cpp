// Every mutant, planted into real kernels' output, is rejected, by the gate that watches what it alters. Families of options
// beyond these: GradcheckMutants (gradcheck_test.cpp).
#include "judge/gates/mutants.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "tests/shared/gradcheck_call.h"
#include "tests/shared/input_families.h"

namespace tileloss::tools {
namespace {

// A last tile of 63 columns; rows in groups; confident rows' labels are their argmax.
constexpr const char* kConfig =
    "loss=cross_entropy batch_size=6 seq_len=7 vocab_size=319 ignore_prob=0.1 "
    "kernel.row_groups=true kernel.vocab_block=64 outputs=[logp, lse, entropy, argmax, correct]";

TEST(Mutants, OfRealKernelsAreAllRejected) {
  for (const oracle::NumberFormat format : test::kFormats) {
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

TEST(Mutants, AreCaughtByTheGateThatWatchesTheirOutput) {
  const std::vector<MutantVerdict> mutants = GradcheckCall(kConfig, {"dtype=bf16"}).mutants();
  for (const auto& [name, gate] : {std::pair("gradient_halved", "/dlogits/ulp_off_target"),
                                   {"off_target_zeroed", "/dlogits/ulp_off_target"},
                                   {"target_not_subtracted", "/dlogits/ulp_target"},
                                   {"last_tile_dropped", "/dlogits/ulp_off_target"},
                                   {"partial_tile_skipped", "/dlogits/ulp_off_target"},
                                   {"row_group_off_by_one", "/dlogits/ulp_off_target"},
                                   {"last_tile_twice", "logp"},
                                   {"loss_halved", "loss"},
                                   {"logp_of_neighbour", "logp"},
                                   {"argmax_off_by_one", "argmax"}}) {
    EXPECT_TRUE(is_caught(mutants, name, gate)) << name;
  }
}

TEST(Mutants, ApplyOnlyWhereTheirOutputIs) {
  MutantContext nothing;
  nothing.cols = 703;
  nothing.rows = 6;
  for (const Mutant& mutant : all_mutants()) EXPECT_FALSE(mutant.applies(nothing)) << mutant.name;
}

TEST(Mutants, WhatChangesNothingVisibleIsNotPlanted) {
  MutantContext context;
  context.cols = 703;
  std::vector<float> zeros(703, 0.0F);
  MutantRow row{0, oracle::NumberFormat::kFloat32, zeros.data(), nullptr};
  for (const Mutant& mutant : all_mutants()) {
    if (!std::set<std::string>{"gradient_halved", "gradient_zero", "gradient_negated", "loss_halved"}.contains(mutant.name))
      continue;
    EXPECT_FALSE(mutant.apply_row(context, {}, row)) << mutant.name;
  }
}

}  // namespace
}  // namespace tileloss::tools
