// Executors of the caller's: tasks reordered, late, or all on one thread.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "tests/backends/cpu/thread_calls.h"

namespace tileloss::test {
namespace {

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
    tileloss_plan_options hints = with_schedule(schedule);
    hints.cpu.row_block = 2;
    tileloss_plan plan{};
    const tileloss_cross_entropy_options options = cross_entropy_options();
    if (auto result = runs("cross_entropy", TILELOSS_VALUE_AND_GRAD, c.args(), &options, hints, &run, &plan); !result)
      return result;
    if (plan.cpu.threads != executor.threads) return testing::AssertionFailure() << "planned " << plan.cpu.threads << " threads";
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
  tileloss_plan_options hints = plan_options();
  hints.cpu.row_block = 2;
  ASSERT_TRUE(runs("cross_entropy", TILELOSS_VALUE_AND_GRAD, c.args(), &options, hints, &run));
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

// Fewer threads than promised: everything that is scheduled runs on one, the last first, while several callers are at work.
class OneSlowThread {
 public:
  OneSlowThread() : executor_(make_executor(this, 6)), thread_([this] { serve(); }) {
    executor_.schedule = [](void* context, tileloss_task task, void* data, std::int64_t index) {
      auto& self = *static_cast<OneSlowThread*>(context);
      const std::lock_guard<std::mutex> lock(self.mutex_);
      self.tasks_.emplace_back([=] { task(data, index); });
      self.wake_.notify_one();
    };
  }
  ~OneSlowThread() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }
  OneSlowThread(const OneSlowThread&) = delete;
  OneSlowThread& operator=(const OneSlowThread&) = delete;

  const tileloss_executor& executor() const { return executor_; }
  std::int64_t served() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return served_;
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return stop_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const std::function<void()> task = std::move(tasks_.back());
      tasks_.pop_back();
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      task();
      lock.lock();
      ++served_;
    }
  }

  tileloss_executor executor_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::function<void()>> tasks_;
  bool stop_ = false;
  std::int64_t served_ = 0;
  std::thread thread_;
};

TEST(Executor, ScheduledTasksOfSeveralCallersMayAllRunOnOneThread) {
  std::atomic<int> failed = 0;
  std::int64_t served = 0;
  {
    OneSlowThread slow;
    std::vector<std::thread> callers;
    for (int k = 0; k < 3; ++k) {
      callers.emplace_back([&] {
        for (int repeat = 0; repeat < 3; ++repeat) failed += gives_the_same_bits_on(slow.executor()) ? 0 : 1;
      });
    }
    for (std::thread& t : callers) t.join();
    served = slow.served();
  }
  EXPECT_EQ(failed, 0);
  EXPECT_GT(served, 0);
}

TEST(Executor, ScheduleMayRunTheTaskAtOnce) {
  tileloss_executor executor = make_executor(nullptr, 4);
  executor.schedule = [](void*, tileloss_task task, void* data, std::int64_t index) { task(data, index); };
  EXPECT_TRUE(gives_the_same_bits_on(executor));
}

}  // namespace
}  // namespace tileloss::test
