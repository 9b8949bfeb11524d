// Runs independent tasks on the caller's executor or on the built-in pool.
#pragma once

#include <tileloss/tileloss.h>

#include <cstdint>

namespace tileloss::impl::cpu {

// Threads of the built-in pool, the caller included: TILELOSS_NUM_THREADS, else what affinity and the cgroup's quota allow.
int default_threads();

// task(data, i) for every i in [0, count), the calling thread taking part; returns when all are done. executor null: the pool.
// Tasks must not wait for one another. Never fails: without memory or threads the caller does all the work.
void parallel_for(const tileloss_executor* executor, std::int64_t count, tileloss_task task, void* data);

}  // namespace tileloss::impl::cpu
