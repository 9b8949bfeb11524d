#include "backends/cpu/threads/pool.h"

#include <pthread.h>

#include <atomic>
#include <exception>
#include <new>
#include <thread>

namespace tileloss::impl::cpu {
namespace {

// Never deleted: its threads sleep on it until the process ends.
std::atomic<Pool*> current{nullptr};

void drop_after_fork() { current.store(nullptr, std::memory_order_relaxed); }

// At load, not at first use: a fork during the initialisation of a local static would leave its guard locked in the child.
[[maybe_unused]] const int is_registered = pthread_atfork(nullptr, nullptr, &drop_after_fork);

}  // namespace

Pool& Pool::instance() {
  Pool* pool = current.load(std::memory_order_acquire);
  if (pool != nullptr) return *pool;
  auto* fresh = new Pool;
  if (current.compare_exchange_strong(pool, fresh, std::memory_order_acq_rel)) return *fresh;
  delete fresh;
  return *pool;
}

bool Pool::schedule(tileloss_task task, void* data, std::int64_t index, std::int64_t max_threads) {
  const std::lock_guard<std::mutex> lock(mutex_);
  try {
    queue_.push_back({task, data, index});
  } catch (const std::bad_alloc&) {
    return false;
  }
  try {
    if (idle_ < static_cast<std::int64_t>(queue_.size()) && threads_ < max_threads) {
      std::thread([this] { run(); }).detach();
      ++threads_;
    }
  } catch (const std::exception&) {  // no thread to be had: those that are there do it
    if (threads_ == 0) {
      queue_.pop_back();
      return false;
    }
  }
  wake_.notify_one();
  return true;
}

void Pool::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    ++idle_;
    wake_.wait(lock, [this] { return !queue_.empty(); });
    --idle_;
    const Item item = queue_.front();
    queue_.pop_front();
    lock.unlock();
    item.task(item.data, item.index);
    lock.lock();
  }
}

}  // namespace tileloss::impl::cpu
