// A call on a host's thread with little stack: what a call needs of it is in docs/users/c.md.
#include <gtest/gtest.h>
#include <pthread.h>

#include <functional>

#include "tests/api/calls.h"
#include "tests/shared/linear_case.h"

namespace tileloss::test {
namespace {

// Sanitizers put more on the stack, their run time too.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::size_t kStackBytes = 512 << 10;
#else
constexpr std::size_t kStackBytes = 64 << 10;
#endif

void on_small_stack(std::function<void()> call) {
  pthread_attr_t attributes;
  ASSERT_EQ(pthread_attr_init(&attributes), 0);
  ASSERT_EQ(pthread_attr_setstacksize(&attributes, kStackBytes), 0);
  pthread_t thread;
  const auto run = [](void* data) -> void* {
    (*static_cast<std::function<void()>*>(data))();
    return nullptr;
  };
  ASSERT_EQ(pthread_create(&thread, &attributes, run, &call), 0);
  ASSERT_EQ(pthread_join(thread, nullptr), 0);
  pthread_attr_destroy(&attributes);
}

class SmallStack : public testing::TestWithParam<oracle::NumberFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, SmallStack, testing::ValuesIn(kFormats), format_name);

// Large blocks, some of whose logits reach the cap.
TEST_P(SmallStack, SoftCappedLogits) {
  const tileloss_cross_entropy_options options{.logit = {.softcap = 3}, .label_smoothing = 0.1};
  for (const tileloss_schedule schedule : kSchedules) {
    tileloss_plan_options hints = with_schedule(schedule);
    hints.cpu.vocab_block = 8192;
    hints.cpu.threads = 1;
    LogitsCase c({.rows = 2, .vocab = 9000, .format = GetParam(), .extra_outputs = true});
    on_small_stack([&] { EXPECT_TRUE(runs_value_and_grad(c, options, hints)); });
    EXPECT_TRUE(agrees(check_cross_entropy(c, options))) << "schedule " << schedule;
  }
}

TEST_P(SmallStack, WithTheLmHead) {
  for (const double softcap : {0.0, 3.0}) {
    LinearCase c({.row = {.rows = 40, .vocab = 600}, .hidden = 33, .format = GetParam(), .head_format = GetParam()});
    const tileloss_cross_entropy_options options{.logit = {.softcap = softcap}};
    tileloss_plan_options hints = plan_options();
    hints.cpu.threads = 1;
    on_small_stack([&] { EXPECT_TRUE(runs("linear_cross_entropy", TILELOSS_VALUE_AND_GRAD, c.args(), &options, hints)); });
    EXPECT_TRUE(agrees(check_linear_cross_entropy(c, options))) << "softcap " << softcap;
  }
}

}  // namespace
}  // namespace tileloss::test
