// The built-in thread pool: a queue and sleeping threads, started as they are first needed.
#pragma once

#include <tileloss/tileloss.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>

namespace tileloss::impl::cpu {

class Pool {
 public:
  // The process's pool. After fork() the child gets a new one: the parent's threads are not there, and its locks may be held.
  static Pool& instance();

  // Queues task(data, index) for some thread, starting one if none is idle and there are fewer than `max_threads`. False if there
  // is no thread to run it and none can be started.
  bool schedule(tileloss_task task, void* data, std::int64_t index, std::int64_t max_threads);

 private:
  struct Item {
    tileloss_task task;
    void* data;
    std::int64_t index;
  };
  void run();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Item> queue_;
  std::int64_t threads_ = 0;
  std::int64_t idle_ = 0;
};

}  // namespace tileloss::impl::cpu
