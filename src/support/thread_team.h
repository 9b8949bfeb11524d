// A few threads that stay alive between measurements, so that a 1 ms pass is not charged for starting them.
#pragma once

#include <barrier>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace tileloss::tools {

class ThreadTeam {
 public:
  // Throws OutOfMemory if so many cannot be started.
  explicit ThreadTeam(int threads);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  // work(thread) on every thread, the calling one (thread 0) included; returns when all are done and rethrows the first
  // exception.
  void run(const std::function<void(int)>& work);

  // work(index, thread) for every index in [0, count), handed out one by one.
  void for_each(int64_t count, const std::function<void(int64_t, int)>& work);

 private:
  void stop();
  void worker(int thread);
  void run_one(int thread);

  std::barrier<> turn_;  // of all threads, the calling one included: where work begins, and where it ends
  const std::function<void(int)>* work_ = nullptr;  // null at a beginning: the threads end
  std::mutex mutex_;
  std::exception_ptr error_;
  std::vector<std::thread> workers_;
};

}  // namespace tileloss::tools
