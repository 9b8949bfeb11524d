#include "support/progress.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

namespace tileloss::tools {
namespace {

TEST(Progress, IsToldNowAndThenWhileSomebodyListens) {
  std::vector<std::string> told;
  const auto listen = [&](const char* work, int64_t done, int64_t total) {
    told.push_back(work + (" " + std::to_string(done)) + " of " + std::to_string(total));
  };
  {
    const ProgressTo listening(listen);
    Progress progress("oracle", 4);
    progress.step();
    EXPECT_TRUE(told.empty());  // short work is not worth a word
    std::this_thread::sleep_for(std::chrono::milliseconds(150));
    progress.step();
    progress.step();
  }
  Progress("oracle", 1).step();
  EXPECT_EQ(told, std::vector<std::string>{"oracle 2 of 4"});
}

}  // namespace
}  // namespace tileloss::tools
