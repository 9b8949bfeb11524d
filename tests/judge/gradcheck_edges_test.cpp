// gradcheck's configs of edges against kernels that go wrong there alone: each is rejected, and the right kernel passes.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/shared/gradcheck_call.h"

namespace tileloss::tools {
namespace {

// The gates that fail with this kernel.
Sets failures(const std::string& config_name, const KernelCall& kernel) {
  return GradcheckCall(config_name, {}, kernel).failures();
}

// The shipped kernel with other arguments.
template <class Change>
KernelCall with(const Change& change) {
  return changed([change](Function&, tileloss_args& args) { change(args); });
}

class GradcheckEdges : public testing::TestWithParam<const char*> {};

TEST_P(GradcheckEdges, TheShippedKernelPasses) { EXPECT_EQ(failures(GetParam(), call), std::vector<std::string>()); }

TEST_P(GradcheckEdges, GroupsOfRowsThatStartARowOffAreCaught) {
  const auto logits = with([](tileloss_args& args) { args.row_groups.logits_stride -= args.logits.cols; });
  EXPECT_FALSE(failures(GetParam(), logits).empty());
  const auto dlogits = with([](tileloss_args& args) { args.row_groups.dlogits_stride -= args.logits.cols; });
  EXPECT_FALSE(failures(GetParam(), dlogits).empty());
  const auto every_second = with([](tileloss_args& args) {
    args.row_groups.rows *= 2;
    args.row_groups.logits_stride *= 2;
    args.row_groups.dlogits_stride *= 2;
  });
  EXPECT_FALSE(failures(GetParam(), every_second).empty());
}

TEST_P(GradcheckEdges, AWriteBetweenTheGroupsIsCaught) {
  const KernelCall writes = [](const Function& function, tileloss_pass pass, const tileloss_args& args, const tileloss_plan& plan,
                               const tileloss_run* run) {
    call(function, pass, args, plan, run);
    if (pass == TILELOSS_BACKWARD) {
      static_cast<uint16_t*>(args.dlogits.data)[args.row_groups.dlogits_stride - 1] = 0;
    }
  };
  EXPECT_EQ(failures(GetParam(), writes), std::vector<std::string>{"backward_from_row_state/dlogits/written_between_groups"});
}

// The vocabulary without its last 63 columns, where the label is none of them: what a kernel sees that skips its last tile.
TEST_P(GradcheckEdges, AnUnreadLastTileIsCaught) {
  const KernelCall skips = [](const Function& function, tileloss_pass pass, const tileloss_args& given, const tileloss_plan&,
                              const tileloss_run* run) {
    constexpr int64_t kTail = 63;
    tileloss_args args = given;
    args.logits.cols -= kTail;
    args.dlogits.cols -= given.dlogits.data != nullptr ? kTail : 0;
    std::vector<int64_t> labels(static_cast<const int64_t*>(given.labels.data),
                                static_cast<const int64_t*>(given.labels.data) + given.labels.size);
    for (int64_t& label : labels) label = label >= args.logits.cols ? 0 : label;
    args.labels.data = labels.data();
    call(function, pass, args, make_plan(function, pass, args, {}), run);
  };
  const std::vector<std::string> failed = failures(GetParam(), skips);
  EXPECT_NE(std::find(failed.begin(), failed.end(), "lse"), failed.end());
  EXPECT_GT(failed.size(), 5U);
}

INSTANTIATE_TEST_SUITE_P(Configs, GradcheckEdges, testing::Values("gradcheck_ce_edges.yaml", "gradcheck_policy_edges.yaml"),
                         [](const auto& config) { return std::string(config.index == 0 ? "cross_entropy" : "policy_loss"); });

}  // namespace
}  // namespace tileloss::tools
