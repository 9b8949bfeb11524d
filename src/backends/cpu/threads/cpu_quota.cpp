#include "backends/cpu/threads/cpu_quota.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <fstream>

namespace tileloss::impl::cpu {
namespace {

constexpr int kUnlimited = 1 << 20;  // more CPUs than any machine has

int cpus_of(double quota, double period) {
  if (!(quota > 0) || !(period > 0)) return kUnlimited;
  return static_cast<int>(std::clamp((quota + period - 1) / period, 1.0, static_cast<double>(kUnlimited)));
}

// "max 100000" or "200000 100000".
int version_2_cpus(const std::string& folder) {
  std::ifstream file(folder + "/cpu.max");
  std::string quota;
  double period = -1;
  file >> quota >> period;
  return cpus_of(std::strtod(quota.c_str(), nullptr), period);  // "max" reads as 0
}

// A quota of -1 is none.
int version_1_cpus(const std::string& folder) {
  double quota = -1, period = -1;
  std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;
  std::ifstream(folder + "/cpu.cfs_period_us") >> period;
  return cpus_of(quota, period);
}

// The limits of `group` and of every group above it. In a container /proc may name the group as the host sees it, of which only
// the last parts, or the root, are mounted: folders that are not there limit nothing.
int limit_up_from(const std::string& hierarchy, std::string group, int (*cpus_in)(const std::string& folder)) {
  int limit = kUnlimited;
  for (;;) {
    while (!group.empty() && group.back() == '/') group.pop_back();
    limit = std::min(limit, cpus_in(hierarchy + group));
    if (group.empty()) return limit;
    group.resize(group.find_last_of('/') == std::string::npos ? 0 : group.find_last_of('/'));
  }
}

bool names_cpu(const std::string& controllers) { return ("," + controllers + ",").find(",cpu,") != std::string::npos; }

}  // namespace

int affinity_cpus() {
  // The kernel refuses a mask smaller than its own, so a machine of more than CPU_SETSIZE = 1024 CPUs needs another try.
  for (int cpus = CPU_SETSIZE; cpus <= kUnlimited; cpus *= 2) {
    cpu_set_t* set = CPU_ALLOC(static_cast<std::size_t>(cpus));
    if (set == nullptr) return 1;
    const std::size_t bytes = CPU_ALLOC_SIZE(static_cast<std::size_t>(cpus));
    const int result = sched_getaffinity(0, bytes, set);
    const int error = errno;
    const int count = result == 0 ? CPU_COUNT_S(bytes, set) : 0;
    CPU_FREE(set);
    if (result == 0) return std::max(1, count);
    if (error != EINVAL) return 1;
  }
  return 1;
}

int cgroup_cpus(const std::string& root) {
  // Each line is id:controllers:path; version 2 has id 0 and no controllers.
  std::ifstream groups(root + "/proc/self/cgroup");
  int limit = kUnlimited;
  for (std::string line; std::getline(groups, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string group = line.substr(second + 1);
    if (controllers.empty()) {
      limit = std::min(limit, limit_up_from(root + "/sys/fs/cgroup", group, &version_2_cpus));
      limit = std::min(limit, limit_up_from(root + "/sys/fs/cgroup/unified", group, &version_2_cpus));
    } else if (names_cpu(controllers)) {
      limit = std::min(limit, limit_up_from(root + "/sys/fs/cgroup/cpu", group, &version_1_cpus));
      limit = std::min(limit, limit_up_from(root + "/sys/fs/cgroup/" + controllers, group, &version_1_cpus));
    }
  }
  return limit == kUnlimited ? 0 : limit;
}

}  // namespace tileloss::impl::cpu
