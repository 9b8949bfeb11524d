// How many threads the library takes by itself: the environment variable, the affinity mask, the control groups.
#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "backends/cpu/threads/cpu_quota.h"
#include "tests/backends/cpu/thread_calls.h"
#include "tests/shared/child_process.h"
#include "tests/shared/temporary_folder.h"

namespace tileloss::test {
namespace {

// How many threads the plan of a large call has, when nobody asks for a number.
int planned_threads() {
  LogitsCase c(large_spec());
  tileloss_plan plan{};
  const tileloss_cross_entropy_options options = cross_entropy_options();
  if (!runs("cross_entropy", TILELOSS_VALUE_AND_GRAD, c.args(), &options, plan_options(), nullptr, &plan)) return -1;
  return plan.cpu.threads;
}

TEST(DefaultThreads, FollowTheEnvironment) {
  setenv("TILELOSS_NUM_THREADS", "3", 1);
  EXPECT_EQ(tileloss_default_threads(), 3);
  EXPECT_EQ(planned_threads(), 3);
  setenv("TILELOSS_NUM_THREADS", "0", 1);
  EXPECT_GE(tileloss_default_threads(), 1);
  setenv("TILELOSS_NUM_THREADS", "many", 1);
  EXPECT_GE(tileloss_default_threads(), 1);
  unsetenv("TILELOSS_NUM_THREADS");
  EXPECT_GE(tileloss_default_threads(), 1);
  EXPECT_LE(tileloss_default_threads(), static_cast<int>(std::thread::hardware_concurrency()));
}

TEST(DefaultThreads, FollowTheAffinityMaskOfTheMoment) {
  unsetenv("TILELOSS_NUM_THREADS");
  cpu_set_t allowed;
  ASSERT_EQ(sched_getaffinity(0, sizeof allowed, &allowed), 0);
  EXPECT_EQ(impl::cpu::affinity_cpus(), CPU_COUNT(&allowed));
  EXPECT_LE(tileloss_default_threads(), CPU_COUNT(&allowed));
  int first = 0;
  while (!CPU_ISSET(first, &allowed)) ++first;
  const int code = exit_code_of_child([&] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(first, &one);
    if (sched_setaffinity(0, sizeof one, &one) != 0) return false;
    return tileloss_default_threads() == 1 && planned_threads() == 1;
  });
  EXPECT_EQ(code, 0);
}

// A tree of files that looks like /proc and /sys.
class ControlGroups : public testing::Test {
 protected:
  void write(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories((folder_.path() / name).parent_path());
    folder_.write(name, text);
  }
  void write_version_1(const std::string& group, const std::string& quota, const std::string& period) const {
    write(group + "/cpu.cfs_quota_us", quota + "\n");
    write(group + "/cpu.cfs_period_us", period + "\n");
  }
  int cpus() const { return impl::cpu::cgroup_cpus(folder_.path().string()); }

 private:
  TemporaryFolder folder_;
};

TEST_F(ControlGroups, NoneIsNoLimit) {
  EXPECT_EQ(cpus(), 0);
  write("proc/self/cgroup", "0::/\n");
  EXPECT_EQ(cpus(), 0);
}

TEST_F(ControlGroups, Version2QuotaIsRoundedUp) {
  write("proc/self/cgroup", "0::/app\n");
  for (const auto& [text, expected] :
       {std::pair("100000 100000\n", 1), std::pair("1000 100000\n", 1), std::pair("150000 100000\n", 2),
        std::pair("800000 100000\n", 8), std::pair("max 100000\n", 0)}) {
    write("sys/fs/cgroup/app/cpu.max", text);
    EXPECT_EQ(cpus(), expected) << text;
  }
}

TEST_F(ControlGroups, TheTightestGroupAboveCounts) {
  write("proc/self/cgroup", "0::/user.slice/user-7.slice/app.scope\n");
  write("sys/fs/cgroup/user.slice/user-7.slice/app.scope/cpu.max", "600000 100000\n");
  EXPECT_EQ(cpus(), 6);
  write("sys/fs/cgroup/user.slice/user-7.slice/cpu.max", "300000 100000\n");
  EXPECT_EQ(cpus(), 3);
  write("sys/fs/cgroup/user.slice/cpu.max", "max 100000\n");
  EXPECT_EQ(cpus(), 3);
  write("sys/fs/cgroup/other.slice/cpu.max", "100000 100000\n");  // not above it
  EXPECT_EQ(cpus(), 3);
}

// Without a namespace of its own a container sees the host's name of its group, but its own group mounted as the root.
TEST_F(ControlGroups, AGroupThatIsNotMountedIsTheRoot) {
  write("proc/self/cgroup", "0::/system.slice/docker-1234.scope\n");
  write("sys/fs/cgroup/cpu.max", "250000 100000\n");
  EXPECT_EQ(cpus(), 3);
}

TEST_F(ControlGroups, Version1QuotaOfTheCpuControllerCounts) {
  write("proc/self/cgroup", "12:cpuset:/job\n4:cpu,cpuacct:/job\n1:name=systemd:/job\n");
  write_version_1("sys/fs/cgroup/cpuset/job", "100000", "100000");
  EXPECT_EQ(cpus(), 0);
  write_version_1("sys/fs/cgroup/cpu,cpuacct/job", "-1", "100000");
  EXPECT_EQ(cpus(), 0);
  write_version_1("sys/fs/cgroup/cpu,cpuacct/job", "200000", "50000");
  EXPECT_EQ(cpus(), 4);
  write_version_1("sys/fs/cgroup/cpu", "100000", "50000");  // the usual link to it, here as a folder
  EXPECT_EQ(cpus(), 2);
}

TEST_F(ControlGroups, HybridTakesTheTighterOfBoth) {
  write("proc/self/cgroup", "4:cpu:/job\n0::/job\n");
  write_version_1("sys/fs/cgroup/cpu/job", "500000", "100000");
  EXPECT_EQ(cpus(), 5);
  write("sys/fs/cgroup/unified/job/cpu.max", "400000 100000\n");
  EXPECT_EQ(cpus(), 4);
}

TEST_F(ControlGroups, GarbageIsNoLimit) {
  write("proc/self/cgroup", "\nno colons\n:\n0:cpu\n7:cpu:\n0::\n");
  write("sys/fs/cgroup/cpu.max", "lots\n");
  write_version_1("sys/fs/cgroup/cpu", "100000", "0");
  EXPECT_EQ(cpus(), 0);
  write("sys/fs/cgroup/cpu.max", "1e300 1\n");
  EXPECT_EQ(cpus(), 0);
}

// A control group of this machine, where the user may make one: version 2's at /sys/fs/cgroup, version 1's at its cpu controller.
class RealControlGroup {
 public:
  explicit RealControlGroup(const std::string& quota) {
    const std::string name = "/tileloss_test_" + std::to_string(getpid());
    for (const char* hierarchy : {"/sys/fs/cgroup/cpu", "/sys/fs/cgroup"}) {
      path_ = hierarchy + name;
      std::error_code error;
      if (!std::filesystem::create_directory(path_, error)) continue;
      if (put("cpu.cfs_period_us", "100000") && put("cpu.cfs_quota_us", quota)) return;
      if (put("cpu.max", quota + " 100000")) return;
      std::filesystem::remove(path_, error);
    }
    path_.clear();
  }
  ~RealControlGroup() {
    std::error_code ignored;
    if (exists()) std::filesystem::remove(path_, ignored);
  }
  RealControlGroup(const RealControlGroup&) = delete;
  RealControlGroup& operator=(const RealControlGroup&) = delete;

  bool exists() const { return !path_.empty(); }
  bool put(const std::string& file, const std::string& text) const {
    // The files are the kernel's: one that is not there cannot be made.
    std::fstream stream(path_ + "/" + file, std::ios::in | std::ios::out);
    return static_cast<bool>(stream << text << std::flush);
  }

 private:
  std::string path_;
};

TEST(DefaultThreads, FollowARealControlGroup) {
  unsetenv("TILELOSS_NUM_THREADS");
  for (const auto& [quota, expected] : {std::pair("100000", 1), std::pair("150000", 2)}) {
    const RealControlGroup group(quota);
    if (!group.exists()) GTEST_SKIP() << "no control group with a CPU quota can be made here";
    const int code = exit_code_of_child(
        [&, cpus = expected] { return group.put("cgroup.procs", std::to_string(getpid())) && impl::cpu::cgroup_cpus() == cpus; });
    EXPECT_EQ(code, 0) << quota;
  }
}

}  // namespace
}  // namespace tileloss::test
