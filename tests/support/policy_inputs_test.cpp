// What the draws of policy losses' inputs offer besides the tensors; those are tested beside the oracle over a case.
#include "support/policy_inputs.h"

#include <gtest/gtest.h>

namespace tileloss::tools {
namespace {

TEST(PolicyInputs, AClearQuantileLiesBetweenTwoEntropies) {
  EXPECT_DOUBLE_EQ(clear_quantile({3, 1, 2, 2, 2}, 0.9), 1 - 0.5 / 4);  // between 1 and 2
  EXPECT_DOUBLE_EQ(clear_quantile({3, 1, 2, 2, 2}, 0.4), 1 - 3.5 / 4);  // between 2 and 3
  EXPECT_EQ(clear_quantile({2, 2, 2}, 0.5), 1);
  EXPECT_EQ(clear_quantile({}, 0.5), 1);
}

}  // namespace
}  // namespace tileloss::tools
