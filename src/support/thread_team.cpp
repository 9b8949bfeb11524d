#include "support/thread_team.h"

#include <algorithm>
#include <atomic>
#include <system_error>
#include <utility>

#include "support/exit_codes.h"
#include "support/format.h"

namespace tileloss::tools {

ThreadTeam::ThreadTeam(int threads) : turn_(std::max(threads, 1)) {
  const auto end_those_there = [&] {
    for (int missing = size(); missing < threads; ++missing) turn_.arrive_and_drop();
    stop();
  };
  try {
    for (int thread = 1; thread < threads; ++thread) workers_.emplace_back([this, thread] { worker(thread); });
  } catch (const std::system_error& error) {
    end_those_there();
    throw OutOfMemory(formatted("threads: {} wanted, but no more than {} can be started: {}", threads, size(), error.what()));
  } catch (...) {
    end_those_there();
    throw;
  }
}

ThreadTeam::~ThreadTeam() { stop(); }

void ThreadTeam::stop() {
  work_ = nullptr;
  turn_.arrive_and_wait();
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
  for (;;) {
    turn_.arrive_and_wait();
    if (work_ == nullptr) return;
    run_one(thread);
    turn_.arrive_and_wait();
  }
}

void ThreadTeam::run(const std::function<void(int)>& work) {
  work_ = &work;
  turn_.arrive_and_wait();
  run_one(0);
  turn_.arrive_and_wait();
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void ThreadTeam::for_each(int64_t count, const std::function<void(int64_t, int)>& work) {
  std::atomic<int64_t> next = 0;
  run([&](int thread) {
    for (int64_t index = next++; index < count; index = next++) work(index, thread);
  });
}

}  // namespace tileloss::tools
