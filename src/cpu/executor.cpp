#include "cpu/executor.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <new>
#include <string>

#include "cpu/pool.h"

namespace tileloss::cpu {
namespace {

int affinity_threads() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

// The quota in CPUs, rounded up; `otherwise` if there is none. cgroup v2: "max 100000" or "200000 100000" in cpu.max.
int quota_threads(int otherwise) {
  double quota = -1, period = -1;
  if (std::ifstream v2("/sys/fs/cgroup/cpu.max"); v2) {
    std::string first;
    v2 >> first >> period;
    if (first != "max" && !first.empty()) quota = std::strtod(first.c_str(), nullptr);
  } else {
    std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") >> quota;
    std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_period_us") >> period;
  }
  if (!(quota > 0) || !(period > 0)) return otherwise;
  return std::max(1, static_cast<int>((quota + period - 1) / period));
}

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
    const long n = std::strtol(forced, nullptr, 10);
    if (n >= 1) return static_cast<int>(std::min(n, 1024L));
  }
  // Read once, without a guard that a fork could find locked: two threads may both read it.
  static std::atomic<int> quota{0};
  int limit = quota.load(std::memory_order_relaxed);
  if (limit == 0) {
    limit = quota_threads(1 << 20);
    quota.store(limit, std::memory_order_relaxed);
  }
  return std::min(affinity_threads(), limit);
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

}  // namespace tileloss::cpu
