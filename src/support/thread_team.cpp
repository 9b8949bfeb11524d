#include "support/thread_team.h"

#include <atomic>
#include <exception>
#include <system_error>

#include "support/exit_codes.h"
#include "support/format.h"

namespace tileloss::tools {

ThreadTeam::ThreadTeam(int threads) {
  try {
    for (int thread = 1; thread < threads; ++thread) workers_.emplace_back([this, thread] { worker(thread); });
  } catch (const std::system_error& error) {
    const size_t started = workers_.size();
    stop();
    throw OutOfMemory(
        formatted("threads: {} wanted, but no more than {} can be started: {}", threads, started + 1, error.what()));
  } catch (...) {
    stop();
    throw;
  }
}

ThreadTeam::~ThreadTeam() { stop(); }

void ThreadTeam::stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadTeam::run_one(int thread) {
  try {
    (*work_)(thread);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = std::current_exception();
  }
}

void ThreadTeam::worker(int thread) {
  uint64_t seen = 0;
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return stop_ || generation_ != seen; });
      if (stop_) return;
      seen = generation_;
    }
    run_one(thread);
    {
      const std::lock_guard lock(mutex_);
      --running_;
    }
    done_.notify_one();
  }
}

void ThreadTeam::run(const std::function<void(int)>& work) {
  {
    const std::lock_guard lock(mutex_);
    work_ = &work;
    error_ = nullptr;
    running_ = static_cast<int>(workers_.size());
    ++generation_;
  }
  wake_.notify_all();
  run_one(0);
  std::unique_lock lock(mutex_);
  done_.wait(lock, [&] { return running_ == 0; });
  if (error_) std::rethrow_exception(error_);
}

void ThreadTeam::for_each(int64_t count, const std::function<void(int64_t, int)>& work) {
  std::atomic<int64_t> next = 0;
  run([&](int thread) {
    for (int64_t index = next++; index < count; index = next++) work(index, thread);
  });
}

}  // namespace tileloss::tools
