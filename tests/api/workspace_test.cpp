// A call needs no more memory than was planned, and takes the caller's.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <new>
#include <string>

#include "tests/api/calls.h"
#include "tests/shared/linear_case.h"

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

using oracle::NumberFormat;

TEST(Workspace, ABudgetWithoutRoomForTheStashGivesRecompute) {
  LogitsCase c(spec_of_plans());
  tileloss_plan_options hints = plan_options();
  const tileloss_plan roomy = plan_of(c, cross_entropy_options(), hints);
  ASSERT_EQ(roomy.cpu.schedule, TILELOSS_SCHEDULE_STASH);
  hints.workspace_bytes = roomy.workspace_bytes;
  EXPECT_EQ(plan_of(c, cross_entropy_options(), hints).cpu.schedule, TILELOSS_SCHEDULE_STASH);
  hints.workspace_bytes = roomy.workspace_bytes - 1;
  const tileloss_plan tight = plan_of(c, cross_entropy_options(), hints);
  EXPECT_EQ(tight.cpu.schedule, TILELOSS_SCHEDULE_RECOMPUTE);
  EXPECT_LE(tight.workspace_bytes, hints.workspace_bytes);
  const tileloss_cross_entropy_options options = cross_entropy_options();
  ASSERT_TRUE(succeeds(tileloss_cross_entropy_value_and_grad(&c.args(), &options, &tight, nullptr)));
  EXPECT_TRUE(agrees(check_cross_entropy(c, options)));
}

TEST(Workspace, ABudgetThatIsTooSmallIsRefusedWithBothNumbers) {
  LogitsCase c(spec_of_plans());
  tileloss_plan_options hints = with_schedule(TILELOSS_SCHEDULE_RECOMPUTE);
  const std::int64_t needed = plan_of(c, cross_entropy_options(), hints).workspace_bytes;
  hints = plan_options();
  hints.workspace_bytes = 64;
  auto plan = init<tileloss_plan>();
  EXPECT_TRUE(refused(tileloss_make_plan("cross_entropy", TILELOSS_VALUE_AND_GRAD, &c.args(), nullptr, &hints, nullptr, &plan),
                      TILELOSS_WORKSPACE_TOO_SMALL,
                      "workspace_bytes: expected at least " + std::to_string(needed) + ", got a budget of 64"));
}

TEST(Workspace, TheCallersMustBeAlignedAndLargeEnough) {
  LogitsCase c(spec_of_plans());
  const tileloss_plan plan = plan_of(c, cross_entropy_options(), plan_options());
  const auto bytes = static_cast<std::size_t>(plan.workspace_bytes);
  void* memory = std::aligned_alloc(64, (bytes + 127) / 64 * 64);
  auto run = init<tileloss_run>();
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
      for (const tileloss_schedule schedule : kSchedules) {
        for (const int threads : {1, 3}) {
          LogitsCaseSpec with = spec_of_plans();
          with.format = format;
          with.vocab = 5001;
          with.dlogits = pass != TILELOSS_FORWARD;
          with.loss = with.row_outputs = with.extra_outputs = pass != TILELOSS_BACKWARD;
          LogitsCase c(with);
          tileloss_plan_options hints = with_schedule(schedule);
          hints.cpu.threads = threads;
          const tileloss_plan plan = plan_of(c, options, hints, pass);
          ASSERT_EQ(plan.workspace_bytes % 64, 0);
          const GuardBuffer workspace(static_cast<std::size_t>(plan.workspace_bytes), Flush::kRight);
          auto run = init<tileloss_run>();
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
  LogitsCase c(spec_of_plans());
  auto run = init<tileloss_run>();
  for (int repeat = 0; repeat < 3; ++repeat)
    EXPECT_TRUE(succeeds(tileloss_cross_entropy_value_and_grad(&c.args(), nullptr, nullptr, &run)));
  const std::size_t in_use = heap_in_use();
  for (int repeat = 0; repeat < 50; ++repeat)
    EXPECT_TRUE(succeeds(tileloss_cross_entropy_value_and_grad(&c.args(), nullptr, nullptr, &run)));
  EXPECT_LT(heap_in_use(), in_use + 16384);
}

// ---------------------------------------------------------------------------------------------------- with the LM head

// All that is mapped, in bytes, without a use of the heap.
std::int64_t mapped_bytes() {
  char text[128] = {};
  const int file = open("/proc/self/statm", O_RDONLY);
  const ssize_t count = read(file, text, sizeof text - 1);
  close(file);
  return count <= 0 ? -1 : std::strtoll(text, nullptr, 10) * sysconf(_SC_PAGESIZE);
}

struct Bytes {
  std::int64_t heap = 0, mapped = 0;
  static Bytes now() { return {static_cast<std::int64_t>(heap_in_use()), mapped_bytes()}; }
};

// Looks at the memory in use each time that the call hands out work.
void probe(void* most, std::int64_t count, tileloss_task task, void* data) {
  auto& seen = *static_cast<Bytes*>(most);
  const Bytes bytes = Bytes::now();
  seen = {std::max(seen.heap, bytes.heap), std::max(seen.mapped, bytes.mapped)};
  for (std::int64_t i = 0; i < count; ++i) task(data, i);
}

// Besides the workspace: the options, the row stage, the call's own objects (kSmallChange). A sanitizer's malloc counts what it
// rounds up to, at most a quarter more, and the pages of a size that it has not met before.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::int64_t kSmallChange = 65536;
constexpr std::int64_t kRoundedUp = 4;
#else
constexpr std::int64_t kSmallChange = 8192;
constexpr std::int64_t kRoundedUp = std::numeric_limits<std::int64_t>::max();
#endif
// From this size on a workspace is mapped on huge pages of its own.
constexpr std::int64_t kMappedFrom = 512 * 1024, kHugePage = 2 << 20;

// The library's own workspace: as many bytes as were planned are taken, no others of size, and given back. `kinds` counts those
// from the heap and those that are mapped.
void expect_planned_bytes(const char* function, tileloss_pass pass, const tileloss_args& args, const void* options,
                          tileloss_plan_options hints, int (&kinds)[2]) {
  Bytes most;
  auto executor = init<tileloss_executor>();
  executor.context = &most;
  executor.threads = 2;
  executor.parallel_for = probe;
  hints.cpu.threads = 2;
  auto plan = init<tileloss_plan>();
  ASSERT_TRUE(succeeds(tileloss_make_plan(function, pass, &args, options, &hints, &executor, &plan)));
  const bool is_mapped = plan.workspace_bytes >= kMappedFrom;
  ++kinds[is_mapped ? 1 : 0];
  auto run = init<tileloss_run>();
  run.executor = &executor;
  largest_allocation = 0;
  const Bytes before = Bytes::now();
  counting = true;
  const tileloss_status status = tileloss_call(function, pass, &args, options, &plan, &run);
  counting = false;
  const Bytes after = Bytes::now();
  ASSERT_TRUE(succeeds(status));
  const std::string what =
      std::string(function) + " pass " + std::to_string(pass) + " " + tileloss_schedule_name(plan.cpu.schedule);
  EXPECT_LT(largest_allocation, 4096U) << what;
  const std::int64_t on_heap = is_mapped ? 0 : plan.workspace_bytes;
  EXPECT_GE(most.heap - before.heap, on_heap) << what;
  EXPECT_LE(most.heap - before.heap, on_heap + on_heap / kRoundedUp + kSmallChange) << what;
  if (is_mapped) {
    EXPECT_GE(most.mapped - before.mapped, plan.workspace_bytes) << what;
    EXPECT_LT(most.mapped - before.mapped, plan.workspace_bytes + 2 * kHugePage + kMappedFrom) << what;
  }
  EXPECT_LE(after.heap, before.heap + kSmallChange) << what;
  EXPECT_LE(after.mapped, before.mapped + kHugePage / 2) << what;
}

LinearCaseSpec linear_spec(tileloss_pass pass, bool is_large) {
  LinearCaseSpec with{.row = {.rows = is_large ? 300 : 40,
                              .vocab = is_large ? 3001 : 200,
                              .ignore_prob = 0.3,
                              .loss = pass != TILELOSS_BACKWARD,
                              .row_outputs = pass != TILELOSS_BACKWARD},
                      .hidden = is_large ? 64 : 24,
                      .bias = true,
                      .bias_format = NumberFormat::kBfloat16};
  with.dhidden = with.dhead = with.dbias = pass != TILELOSS_FORWARD;
  with.float32_dhead = with.float32_dbias = false;  // sums of their own in the workspace, with several chunks of rows
  return with;
}

TEST(LinearWorkspaceBytes, CrossEntropyTakesWhatWasPlanned) {
  const tileloss_cross_entropy_options options = cross_entropy_options();
  int kinds[2] = {};
  for (const bool is_large : {false, true}) {
    for (const tileloss_pass pass : {TILELOSS_FORWARD, TILELOSS_BACKWARD, TILELOSS_VALUE_AND_GRAD}) {
      for (const tileloss_schedule schedule : kSchedules) {
        LinearCase c(linear_spec(pass, is_large));
        tileloss_plan_options hints = with_schedule(schedule);
        hints.cpu.row_block = is_large ? 128 : 32;
        hints.cpu.vocab_block = 64;
        expect_planned_bytes("linear_cross_entropy", pass, c.args(), &options, hints, kinds);
        EXPECT_TRUE(agrees(check_linear_cross_entropy(c, options)));
      }
    }
  }
  EXPECT_GE(kinds[0], 3);
  EXPECT_GE(kinds[1], 3);
}

TEST(LinearWorkspaceBytes, LogprobsAndPolicyLossTakeWhatWasPlanned) {
  int kinds[2] = {};
  for (const tileloss_pass pass : {TILELOSS_FORWARD, TILELOSS_BACKWARD}) {
    LinearCaseSpec with = linear_spec(pass, false);
    with.row.loss = false;
    if (pass == TILELOSS_BACKWARD) with.row.logp_grad = Upstream::kPerRow;
    LinearCase c(with);
    const tileloss_logprobs_options options = logprobs_options();
    tileloss_plan_options hints = plan_options();
    hints.cpu.vocab_block = 64;
    expect_planned_bytes("linear_logprobs", pass, c.args(), &options, hints, kinds);
  }
  for (const char* preset : {"grpo", "gspo"}) {  // rows alone, and rows that depend on each other
    tileloss_policy_loss_options options;
    tileloss_options_preset("policy_loss", preset, &options, sizeof options);
    LinearCaseSpec with = linear_spec(TILELOSS_VALUE_AND_GRAD, false);
    LinearCase c(with);
    tools::PolicyDraw draw;
    draw.rows = with.row.rows;
    draw.sequences = 4;
    draw.use_offsets = true;
    draw.old_scale = 0.3;
    const LinearPolicy policy(c, draw, options);
    tileloss_plan_options hints = plan_options();
    hints.cpu.vocab_block = 64;
    expect_planned_bytes("linear_policy_loss", TILELOSS_VALUE_AND_GRAD, c.args(), &options, hints, kinds);
    EXPECT_TRUE(agrees(policy.check())) << preset;
  }
}

}  // namespace
}  // namespace tileloss::test
