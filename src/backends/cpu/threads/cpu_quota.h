// How many CPUs the process may use: its affinity mask, and the CPU bandwidth of its control groups.
#pragma once

#include <string>

namespace tileloss::impl::cpu {

// CPUs in the calling thread's affinity mask; 1 if the kernel does not say.
int affinity_cpus();

// The smallest CPU quota of the process's control group and of all groups above it, in CPUs, rounded up; 0 if there is none.
// Control groups of version 1, 2 and the hybrid of both; `root` stands before /proc and /sys.
int cgroup_cpus(const std::string& root = "");

}  // namespace tileloss::impl::cpu
