// The built-in thread pool.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <iterator>
#include <thread>

#include "backends/cpu/threads/executor.h"
#include "tests/backends/cpu/thread_calls.h"
#include "tests/shared/child_process.h"

namespace tileloss::test {
namespace {

TEST(ParallelFor, RunsEveryTaskOnce) {
  for (const std::int64_t count : {0, 1, 2, 3, 17, 100}) {
    for (int repeat = 0; repeat < 20; ++repeat) {
      std::vector<std::atomic<int>> runs(static_cast<std::size_t>(count));
      impl::cpu::parallel_for(
          nullptr, count, [](void* data, std::int64_t i) { ++static_cast<std::atomic<int>*>(data)[i]; }, runs.data());
      for (const std::atomic<int>& n : runs) ASSERT_EQ(n, 1);
    }
  }
}

TEST(ParallelFor, ReturnsWhenAllIsDoneAlsoWhenNested) {
  std::atomic<int> total = 0;
  const auto outer = [](void* data, std::int64_t) {
    impl::cpu::parallel_for(
        nullptr, 4, [](void* inner, std::int64_t) { ++*static_cast<std::atomic<int>*>(inner); }, data);
  };
  impl::cpu::parallel_for(nullptr, 8, outer, &total);
  EXPECT_EQ(total, 32);
}

TEST(BuiltInPool, CallsFromSeveralThreadsAtOnceDoNotDisturbEachOther) {
  constexpr int kCallers = 6;
  std::vector<std::vector<unsigned char>> expected;
  for (int k = 0; k < kCallers; ++k) expected.push_back(single_threaded_outputs(large_spec(static_cast<std::uint64_t>(k))));
  std::atomic<int> wrong = 0, failed = 0;
  std::vector<std::thread> callers;
  for (int k = 0; k < kCallers; ++k) {
    callers.emplace_back([&, k] {
      LogitsCase c(large_spec(static_cast<std::uint64_t>(k)));
      for (int repeat = 0; repeat < 10; ++repeat) {
        c.reset();
        if (!runs_value_and_grad(c, cross_entropy_options(), with_threads(4))) ++failed;
        if (outputs_of(c.args()) != expected[static_cast<std::size_t>(k)]) ++wrong;
      }
    });
  }
  for (std::thread& t : callers) t.join();
  EXPECT_EQ(failed, 0);
  EXPECT_EQ(wrong, 0);
}

TEST(BuiltInPool, EachThreadHasItsOwnErrorMessage) {
  tileloss_args args;
  tileloss_args_init(&args);
  EXPECT_EQ(tileloss_call("no_such_loss", TILELOSS_FORWARD, &args, nullptr, nullptr, nullptr), TILELOSS_INVALID_ARGUMENT);
  const std::string here = tileloss_last_error();
  std::string there = "unset";
  std::thread([&] { there = tileloss_last_error(); }).join();
  EXPECT_EQ(there, "");
  EXPECT_NE(here, "");
  EXPECT_EQ(here, tileloss_last_error());
}

// Under ThreadSanitizer this needs TSAN_OPTIONS=die_after_fork=0, as the preset sets.
TEST(BuiltInPool, WorksInAForkedChild) {
  const auto expected = single_threaded_outputs(large_spec());
  LogitsCase c(large_spec());
  const auto right = [&] {
    c.reset();
    return static_cast<bool>(runs_value_and_grad(c, cross_entropy_options(), with_threads(4))) &&
           outputs_of(c.args()) == expected;
  };
  ASSERT_TRUE(right());  // the parent's pool is running
  for (int repeat = 0; repeat < 5; ++repeat) {
    EXPECT_EQ(exit_code_of_child(right), 0);
    EXPECT_EQ(exit_code_of_child([&] { return exit_code_of_child(right) == 0; }), 0);  // and in a grandchild
    EXPECT_TRUE(right());
  }
}

TEST(BuiltInPool, WorksInAChildForkedWhileOtherThreadsCall) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer ends a forked child whose new thread gets the id of a joinable thread of the parent";
#endif
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "AddressSanitizer's allocator does not survive a fork while another thread is inside it";
#endif
  const auto expected = single_threaded_outputs(large_spec());
  std::atomic<bool> stop = false;
  std::thread busy([&] {
    LogitsCase c(large_spec(2));
    while (!stop) EXPECT_TRUE(runs_value_and_grad(c, cross_entropy_options(), with_threads(4)));
  });
  LogitsCase c(large_spec());
  for (int repeat = 0; repeat < 10; ++repeat) {
    const int code = exit_code_of_child([&] {
      return static_cast<bool>(runs_value_and_grad(c, cross_entropy_options(), with_threads(4))) &&
             outputs_of(c.args()) == expected;
    });
    EXPECT_EQ(code, 0);
  }
  stop = true;
  busy.join();
}

std::ptrdiff_t threads_of_this_process() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/task"), std::filesystem::directory_iterator());
}

// ThreadSanitizer has a thread of its own, in a child from its first new thread on.
#ifdef __SANITIZE_THREAD__
constexpr std::ptrdiff_t kSanitizersThreads = 1;
#else
constexpr std::ptrdiff_t kSanitizersThreads = 0;
#endif

// In a child, as the pool of this process may have been of use to other tests.
TEST(BuiltInPool, HasNoMoreThreadsThanTheEnvironmentAllows) {
  const int code = exit_code_of_child([] {
    setenv("TILELOSS_NUM_THREADS", "3", 1);
    LogitsCase c(large_spec());
    const std::ptrdiff_t before = threads_of_this_process();
    for (int repeat = 0; repeat < 20; ++repeat) {
      c.reset();
      if (!runs_value_and_grad(c, cross_entropy_options(), plan_options())) return false;
    }
    const std::ptrdiff_t started = threads_of_this_process() - before;
    return 1 <= started && started <= 2 + kSanitizersThreads;
  });
  EXPECT_EQ(code, 0);
}

TEST(BuiltInPool, OneThreadIsTheCallersOwn) {
  const int code = exit_code_of_child([] {
    setenv("TILELOSS_NUM_THREADS", "1", 1);
    LogitsCase c(large_spec());
    const std::ptrdiff_t before = threads_of_this_process();
    return runs_value_and_grad(c, cross_entropy_options(), plan_options()) && threads_of_this_process() == before;
  });
  EXPECT_EQ(code, 0);
}

std::chrono::microseconds processor_time() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return std::chrono::seconds(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         std::chrono::microseconds(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

TEST(BuiltInPool, IdleThreadsSleep) {
  LogitsCase c(large_spec());
  ASSERT_TRUE(runs_value_and_grad(c, cross_entropy_options(), with_threads(8)));
  // A helper may still be on its way to sleep: the best of some tries. One spinning thread would take 20 ms of each.
  auto least = std::chrono::microseconds::max();
  for (int repeat = 0; repeat < 5; ++repeat) {
    const auto before = processor_time();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    least = std::min(least, processor_time() - before);
  }
  EXPECT_LT(least, std::chrono::milliseconds(4));
}

}  // namespace
}  // namespace tileloss::test
