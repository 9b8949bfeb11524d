#include "backends/cpu/threads/executor.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>

#include "backends/cpu/threads/cpu_quota.h"
#include "backends/cpu/threads/pool.h"

namespace tileloss::impl::cpu {
namespace {

// One parallel_for. Shared by the caller and the helpers it called for; the last one to leave deletes it, so a helper that
// arrives after the work is done finds nothing to do and nothing freed.
class Job {
 public:
  Job(std::int64_t count, tileloss_task task, void* data, std::int64_t helpers)
      : count_(count), task_(task), data_(data), users_(helpers + 1) {}

  static void help(void* job, std::int64_t) {
    static_cast<Job*>(job)->work();
    static_cast<Job*>(job)->leave();
  }
  void work() {
    for (std::int64_t i = next_.fetch_add(1, std::memory_order_relaxed); i < count_;
         i = next_.fetch_add(1, std::memory_order_relaxed)) {
      task_(data_, i);
      if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) done_.notify_all();
    }
  }
  void wait() {
    for (std::int64_t done = done_.load(std::memory_order_acquire); done != count_;
         done = done_.load(std::memory_order_acquire)) {
      done_.wait(done, std::memory_order_acquire);
    }
  }
  void leave() {
    if (users_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

 private:
  const std::int64_t count_;
  const tileloss_task task_;
  void* const data_;
  std::atomic<std::int64_t> next_{0};
  std::atomic<std::int64_t> done_{0};
  std::atomic<std::int64_t> users_;
};

}  // namespace

int default_threads() {
  if (const char* forced = std::getenv("TILELOSS_NUM_THREADS"); forced != nullptr) {
    char* end = nullptr;
    const long n = std::strtol(forced, &end, 10);
    if (n >= 1 && *end == '\0') return static_cast<int>(std::min(n, 1024L));
  }
  // Read once, without a guard that a fork could find locked: two threads may both read it. The mask is asked for each time.
  constexpr int kUnread = -1;
  static std::atomic<int> quota{kUnread};
  int limit = quota.load(std::memory_order_relaxed);
  if (limit == kUnread) {
    limit = cgroup_cpus();
    quota.store(limit, std::memory_order_relaxed);
  }
  return limit > 0 ? std::min(affinity_cpus(), limit) : affinity_cpus();
}

void parallel_for(const tileloss_executor* executor, std::int64_t count, tileloss_task task, void* data) {
  if (count <= 0) return;
  if (count > 1 && executor != nullptr && executor->parallel_for != nullptr) {
    executor->parallel_for(executor->context, count, task, data);
    return;
  }
  Job* job = nullptr;
  if (count > 1) job = new (std::nothrow) Job(count, task, data, count - 1);
  if (job == nullptr) {
    for (std::int64_t i = 0; i < count; ++i) task(data, i);
    return;
  }
  for (std::int64_t i = 1; i < count; ++i) {
    if (executor != nullptr) {
      executor->schedule(executor->context, &Job::help, job, i);
    } else if (!Pool::instance().schedule(&Job::help, job, i, count - 1)) {
      job->leave();  // the helper that will not come
    }
  }
  job->work();
  job->wait();
  job->leave();
}

}  // namespace tileloss::impl::cpu
