#include "support/progress.h"

#include <gtest/gtest.h>

namespace tileloss::tools {
namespace {

constexpr Progress::Pace kAtOnce{.first_bar = 0, .between_bars = 0, .between_lines = 0};

std::string stderr_of_two_steps(const Progress::Pace& pace) {
  testing::internal::CaptureStderr();
  {
    Progress progress("oracle", 2, pace);
    progress.step();
    progress.step();
  }
  return testing::internal::GetCapturedStderr();
}

TEST(Progress, IsLinesOfJsonWhereThereIsNoTerminal) {
  EXPECT_EQ(stderr_of_two_steps(kAtOnce),
            "{\"progress\":\"oracle\",\"done\":1,\"total\":2}\n{\"progress\":\"oracle\",\"done\":2,\"total\":2}\n");
}

TEST(Progress, SaysNothingOfShortWork) { EXPECT_EQ(stderr_of_two_steps({}), ""); }

}  // namespace
}  // namespace tileloss::tools
