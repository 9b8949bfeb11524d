// A call needs no more memory than was planned, and takes the caller's.
#include <gtest/gtest.h>
#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <string>

#include "tests/api/calls.h"

namespace {

std::atomic<bool> counting = false;
std::atomic<std::size_t> largest_allocation = 0;

}  // namespace

// Every allocation through operator new while `counting`, to see what a call takes besides its workspace. The forms not replaced
// here call these.
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  if (counting) {
    std::size_t seen = largest_allocation;
    while (bytes > seen && !largest_allocation.compare_exchange_weak(seen, bytes)) {
    }
  }
  return std::malloc(bytes == 0 ? 1 : bytes);
}
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  if (void* p = operator new(bytes, std::nothrow)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
extern "C" std::size_t __sanitizer_get_current_allocated_bytes();  // gcc installs no header for it
#endif

namespace tileloss::test {
namespace {

// A sanitizer's malloc leaves glibc's counters at 0 and has its own.
std::size_t heap_in_use() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return __sanitizer_get_current_allocated_bytes();
#else
  const auto info = mallinfo2();
  return info.uordblks + info.hblkhd;
#endif
}

using reference::NumberFormat;

tileloss_plan make_plan(const LogitsCase& c, const tileloss_cross_entropy_options& options, const tileloss_plan_options& wishes,
                        tileloss_pass pass = TILELOSS_VALUE_AND_GRAD) {
  tileloss_plan plan;
  tileloss_plan_init(&plan);
  EXPECT_TRUE(succeeds(tileloss_make_plan("cross_entropy", pass, &c.args(), &options, &wishes, nullptr, &plan)));
  return plan;
}

LogitsCaseSpec spec() {
  return {.rows = 40, .vocab = 3000, .format = NumberFormat::kBfloat16, .ignore_prob = 0.2, .extra_outputs = true};
}

testing::AssertionResult refused(tileloss_status status, tileloss_status wanted, const std::string& message) {
  if (status == wanted && tileloss_last_error() == message) return testing::AssertionSuccess();
  return testing::AssertionFailure() << tileloss_status_name(status) << " \"" << tileloss_last_error() << "\", not \"" << message
                                     << "\"";
}

TEST(Workspace, ABudgetWithoutRoomForTheStashGivesRecompute) {
  LogitsCase c(spec());
  tileloss_plan_options wishes = plan_options();
  const tileloss_plan roomy = make_plan(c, cross_entropy_options(), wishes);
  ASSERT_EQ(roomy.schedule, TILELOSS_SCHEDULE_STASH);
  wishes.workspace_bytes = roomy.workspace_bytes;
  EXPECT_EQ(make_plan(c, cross_entropy_options(), wishes).schedule, TILELOSS_SCHEDULE_STASH);
  wishes.workspace_bytes = roomy.workspace_bytes - 1;
  const tileloss_plan tight = make_plan(c, cross_entropy_options(), wishes);
  EXPECT_EQ(tight.schedule, TILELOSS_SCHEDULE_RECOMPUTE);
  EXPECT_LE(tight.workspace_bytes, wishes.workspace_bytes);
  const tileloss_cross_entropy_options options = cross_entropy_options();
  ASSERT_TRUE(succeeds(tileloss_cross_entropy_value_and_grad(&c.args(), &options, &tight, nullptr)));
  EXPECT_TRUE(agrees(check_cross_entropy(c, options)));
}

TEST(Workspace, ABudgetThatIsTooSmallIsRefusedWithBothNumbers) {
  LogitsCase c(spec());
  tileloss_plan_options wishes = with_schedule(TILELOSS_SCHEDULE_RECOMPUTE);
  const std::int64_t needed = make_plan(c, cross_entropy_options(), wishes).workspace_bytes;
  wishes = plan_options();
  wishes.workspace_bytes = 64;
  tileloss_plan plan;
  tileloss_plan_init(&plan);
  EXPECT_TRUE(refused(tileloss_make_plan("cross_entropy", TILELOSS_VALUE_AND_GRAD, &c.args(), nullptr, &wishes, nullptr, &plan),
                      TILELOSS_WORKSPACE_TOO_SMALL,
                      "workspace_bytes: expected at least " + std::to_string(needed) + ", got a budget of 64"));
}

TEST(Workspace, TheCallersMustBeAlignedAndLargeEnough) {
  LogitsCase c(spec());
  const tileloss_plan plan = make_plan(c, cross_entropy_options(), plan_options());
  const auto bytes = static_cast<std::size_t>(plan.workspace_bytes);
  void* memory = std::aligned_alloc(64, (bytes + 127) / 64 * 64);
  tileloss_run run;
  tileloss_run_init(&run);
  run.workspace = memory;
  run.workspace_bytes = bytes - 1;
  EXPECT_TRUE(
      refused(tileloss_cross_entropy_value_and_grad(&c.args(), nullptr, &plan, &run), TILELOSS_WORKSPACE_TOO_SMALL,
              "workspace_bytes: expected at least the plan's " + std::to_string(bytes) + ", got " + std::to_string(bytes - 1)));
  run.workspace = static_cast<char*>(memory) + 8;
  run.workspace_bytes = bytes;
  EXPECT_TRUE(refused(tileloss_cross_entropy_value_and_grad(&c.args(), nullptr, &plan, &run), TILELOSS_INVALID_ARGUMENT,
                      "workspace: expected 64-byte alignment, got a pointer without it"));
  run.workspace = memory;
  EXPECT_TRUE(succeeds(tileloss_cross_entropy_value_and_grad(&c.args(), nullptr, &plan, &run)));
  std::free(memory);
}

// The planned bytes between guard pages, every byte 0xff beforehand, for every pass and schedule; nothing else of size is
// allocated.
TEST(Workspace, ThePlannedBytesAreEnoughAndAllThatIsUsed) {
  const tileloss_cross_entropy_options options = cross_entropy_options();
  for (const NumberFormat format : kFormats) {
    for (const tileloss_pass pass : {TILELOSS_FORWARD, TILELOSS_VALUE_AND_GRAD, TILELOSS_BACKWARD}) {
      for (const tileloss_schedule schedule : {TILELOSS_SCHEDULE_STASH, TILELOSS_SCHEDULE_RECOMPUTE, TILELOSS_SCHEDULE_SWEEPS}) {
        for (const int threads : {1, 3}) {
          LogitsCaseSpec with = spec();
          with.format = format;
          with.vocab = 5001;
          with.dlogits = pass != TILELOSS_FORWARD;
          with.loss = with.row_outputs = with.extra_outputs = pass != TILELOSS_BACKWARD;
          LogitsCase c(with);
          tileloss_plan_options wishes = with_schedule(schedule);
          wishes.threads = threads;
          const tileloss_plan plan = make_plan(c, options, wishes, pass);
          ASSERT_EQ(plan.workspace_bytes % 64, 0);
          const GuardBuffer workspace(static_cast<std::size_t>(plan.workspace_bytes), Flush::kRight);
          tileloss_run run;
          tileloss_run_init(&run);
          run.workspace = workspace.data();
          run.workspace_bytes = workspace.bytes();
          largest_allocation = 0;
          counting = true;
          const std::size_t heap_before = heap_in_use();
          const tileloss_status status = tileloss_call("cross_entropy", pass, &c.args(), &options, &plan, &run);
          const std::size_t heap_after = heap_in_use();
          counting = false;
          ASSERT_TRUE(succeeds(status));
          ASSERT_TRUE(agrees(check_cross_entropy(c, options)));
          EXPECT_TRUE(workspace.canary_intact());
          EXPECT_LT(largest_allocation, 4096U);
          EXPECT_LT(heap_after, heap_before + 16384);  // the pool's threads on first use
        }
      }
    }
  }
}

TEST(Workspace, ANullWorkspaceIsAllocatedAndFreed) {
  LogitsCase c(spec());
  tileloss_run run;
  tileloss_run_init(&run);
  for (int repeat = 0; repeat < 3; ++repeat)
    EXPECT_TRUE(succeeds(tileloss_cross_entropy_value_and_grad(&c.args(), nullptr, nullptr, &run)));
  const std::size_t in_use = heap_in_use();
  for (int repeat = 0; repeat < 50; ++repeat)
    EXPECT_TRUE(succeeds(tileloss_cross_entropy_value_and_grad(&c.args(), nullptr, nullptr, &run)));
  EXPECT_LT(heap_in_use(), in_use + 16384);
}

}  // namespace
}  // namespace tileloss::test
