// Threads: the built-in pool, and executors of the caller's.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <thread>

#include "cpu/executor.h"
#include "tests/api/calls.h"

namespace tileloss::test {
namespace {

LogitsCaseSpec large_spec(std::uint64_t seed = 1) {
  return {.rows = 64,
          .vocab = 3000,
          .format = reference::NumberFormat::kBfloat16,
          .seed = seed,
          .ignore_prob = 0.1,
          .extra_outputs = true};
}

tileloss_plan_options with_threads(int threads) {
  tileloss_plan_options wishes = plan_options();
  wishes.threads = threads;
  wishes.row_block = 2;
  return wishes;
}

std::vector<unsigned char> single_threaded_outputs(const LogitsCaseSpec& spec) {
  LogitsCase c(spec);
  EXPECT_TRUE(runs_value_and_grad(c, cross_entropy_options(), with_threads(1)));
  return outputs_of(c.args());
}

TEST(ParallelFor, RunsEveryTaskOnce) {
  for (const std::int64_t count : {0, 1, 2, 3, 17, 100}) {
    for (int repeat = 0; repeat < 20; ++repeat) {
      std::vector<std::atomic<int>> runs(static_cast<std::size_t>(count));
      cpu::parallel_for(
          nullptr, count, [](void* data, std::int64_t i) { ++static_cast<std::atomic<int>*>(data)[i]; }, runs.data());
      for (const std::atomic<int>& n : runs) ASSERT_EQ(n, 1);
    }
  }
}

TEST(ParallelFor, ReturnsWhenAllIsDoneAlsoWhenNested) {
  std::atomic<int> total = 0;
  const auto outer = [](void* data, std::int64_t) {
    cpu::parallel_for(
        nullptr, 4, [](void* inner, std::int64_t) { ++*static_cast<std::atomic<int>*>(inner); }, data);
  };
  cpu::parallel_for(nullptr, 8, outer, &total);
  EXPECT_EQ(total, 32);
}

TEST(DefaultThreads, FollowTheEnvironment) {
  setenv("TILELOSS_NUM_THREADS", "3", 1);
  EXPECT_EQ(tileloss_default_threads(), 3);
  setenv("TILELOSS_NUM_THREADS", "0", 1);
  EXPECT_GE(tileloss_default_threads(), 1);
  setenv("TILELOSS_NUM_THREADS", "many", 1);
  EXPECT_GE(tileloss_default_threads(), 1);
  unsetenv("TILELOSS_NUM_THREADS");
  EXPECT_GE(tileloss_default_threads(), 1);
  EXPECT_LE(tileloss_default_threads(), static_cast<int>(std::thread::hardware_concurrency()));
}

TEST(BuiltInPool, AnyNumberOfThreadsGivesTheSameBits) {
  const auto expected = single_threaded_outputs(large_spec());
  LogitsCase c(large_spec());
  for (int threads = 1; threads <= 16; ++threads) {
    c.reset();
    ASSERT_TRUE(runs_value_and_grad(c, cross_entropy_options(), with_threads(threads)));
    EXPECT_TRUE(same_bits(outputs_of(c.args()), expected)) << threads;
  }
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

// What the child does between fork and _exit must not hang: alarm() ends it, and the parent sees a signal instead of code 0.
int exit_code_of_child(const std::function<bool()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    _exit(body() ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
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

// ------------------------------------------------------------------------------------------------------------- executors

tileloss_executor make_executor(void* context, int threads) {
  tileloss_executor executor;
  tileloss_executor_init(&executor);
  executor.context = context;
  executor.threads = threads;
  return executor;
}

testing::AssertionResult gives_the_same_bits_on(const tileloss_executor& executor) {
  const auto expected = single_threaded_outputs(large_spec());
  LogitsCase c(large_spec());
  tileloss_run run;
  tileloss_run_init(&run);
  run.executor = &executor;
  for (const tileloss_schedule schedule : {TILELOSS_SCHEDULE_STASH, TILELOSS_SCHEDULE_SWEEPS}) {
    c.reset();
    tileloss_plan_options wishes = with_schedule(schedule);
    wishes.row_block = 2;
    tileloss_plan plan{};
    const tileloss_cross_entropy_options options = cross_entropy_options();
    if (auto result = runs("cross_entropy", TILELOSS_VALUE_AND_GRAD, c.args(), &options, wishes, &run, &plan); !result)
      return result;
    if (plan.threads != executor.threads) return testing::AssertionFailure() << "planned " << plan.threads << " threads";
    c.args().dlogits.dtype = TILELOSS_BFLOAT16;
    if (schedule == TILELOSS_SCHEDULE_STASH && outputs_of(c.args()) != expected)
      return testing::AssertionFailure() << "other bits";
    if (auto result = agrees(check_cross_entropy(c, options)); !result) return result;
  }
  return testing::AssertionSuccess();
}

TEST(Executor, ParallelForMayRunTasksInAnyOrder) {
  int calls = 0;
  tileloss_executor executor = make_executor(&calls, 5);
  executor.parallel_for = [](void* context, std::int64_t count, tileloss_task task, void* data) {
    ++*static_cast<int*>(context);
    for (std::int64_t i = count - 1; i >= 0; --i) task(data, i);
  };
  EXPECT_TRUE(gives_the_same_bits_on(executor));
  EXPECT_EQ(calls, 3);  // one of the stash schedule, two sweeps
}

TEST(Executor, ParallelForMayUseThreads) {
  tileloss_executor executor = make_executor(nullptr, 4);
  executor.parallel_for = [](void*, std::int64_t count, tileloss_task task, void* data) {
    std::vector<std::thread> threads;
    for (std::int64_t i = 0; i < count; ++i) threads.emplace_back(task, data, i);
    for (std::thread& t : threads) t.join();
  };
  EXPECT_TRUE(gives_the_same_bits_on(executor));
}

struct Queue {
  std::vector<std::function<void()>> tasks;
  static void push(void* context, tileloss_task task, void* data, std::int64_t index) {
    static_cast<Queue*>(context)->tasks.emplace_back([=] { task(data, index); });
  }
};

// A queue that nobody serves until the call has returned: the caller does all the work, late tasks find nothing, in any order.
TEST(Executor, ScheduledTasksMayRunAfterTheCallHasReturnedAndInReverse) {
  Queue queue;
  tileloss_executor executor = make_executor(&queue, 4);
  executor.schedule = &Queue::push;
  LogitsCase c(large_spec());
  tileloss_run run;
  tileloss_run_init(&run);
  run.executor = &executor;
  const tileloss_cross_entropy_options options = cross_entropy_options();
  tileloss_plan_options wishes = plan_options();
  wishes.row_block = 2;
  ASSERT_TRUE(runs("cross_entropy", TILELOSS_VALUE_AND_GRAD, c.args(), &options, wishes, &run));
  EXPECT_EQ(queue.tasks.size(), 3U);
  const auto expected = single_threaded_outputs(large_spec());
  EXPECT_TRUE(same_bits(outputs_of(c.args()), expected));
  c.reset();
  const auto untouched = outputs_of(c.args());
  for (auto task = queue.tasks.rbegin(); task != queue.tasks.rend(); ++task) (*task)();
  EXPECT_TRUE(same_bits(outputs_of(c.args()), untouched));
}

TEST(Executor, ScheduledTasksMayRunOnThreadsAtAnyTime) {
  std::mutex mutex;
  struct Context {
    std::mutex& mutex;
    std::vector<std::thread> threads;
  } context{mutex, {}};
  tileloss_executor executor = make_executor(&context, 6);
  executor.schedule = [](void* c, tileloss_task task, void* data, std::int64_t index) {
    auto& into = *static_cast<Context*>(c);
    const std::lock_guard<std::mutex> lock(into.mutex);
    into.threads.emplace_back([=] {
      std::this_thread::sleep_for(std::chrono::microseconds(200 * index));
      task(data, index);
    });
  };
  for (int repeat = 0; repeat < 5; ++repeat) EXPECT_TRUE(gives_the_same_bits_on(executor));
  for (std::thread& t : context.threads) t.join();
}

}  // namespace
}  // namespace tileloss::test
