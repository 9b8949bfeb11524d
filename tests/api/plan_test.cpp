// Plan, then run: what the planner promises and what it refuses.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/api/calls.h"
#include "tests/shared/policy_case.h"

namespace tileloss::test {
namespace {

// A cross-entropy, its plan and its calls.
class Plan : public testing::Test {
 protected:
  tileloss_status planned(const tileloss_plan_options& hints, const tileloss_executor* executor = nullptr) {
    return tileloss_make_plan("cross_entropy", TILELOSS_VALUE_AND_GRAD, &c.args(), &options, &hints, executor, &plan);
  }
  tileloss_status call(const tileloss_plan* with = nullptr, const tileloss_run* run = nullptr) {
    return tileloss_cross_entropy_value_and_grad(&c.args(), &options, with, run);
  }
  tileloss_plan made(const tileloss_plan_options& hints = plan_options()) const { return plan_of(c, options, hints); }

  LogitsCase c{spec_of_plans()};
  tileloss_cross_entropy_options options;
  tileloss_plan plan = init<tileloss_plan>();
};

TEST_F(Plan, SaysWhatWillBeDone) {
  plan = made();
  EXPECT_STREQ(plan.function, "cross_entropy");
  EXPECT_EQ(plan.pass, TILELOSS_VALUE_AND_GRAD);
  EXPECT_EQ(plan.cpu.schedule, TILELOSS_SCHEDULE_STASH);
  EXPECT_GE(plan.cpu.threads, 1);
  EXPECT_GE(plan.cpu.row_block, 1);
  EXPECT_EQ(plan.cpu.vocab_block % 64, 0);
  EXPECT_GT(plan.workspace_bytes, 0);
  EXPECT_GT(plan.predicted_ms, 0);
  if (const char* forced = std::getenv("TILELOSS_ISA")) {
    EXPECT_STREQ(tileloss_isa_name(plan.cpu.isa), forced);
  }
}

TEST_F(Plan, TouchesNoData) {
  auto args = init<tileloss_args>();
  args.logits = tileloss_make_matrix(nullptr, TILELOSS_BFLOAT16, 2048, 151936, 151936);
  args.dlogits = args.logits;
  args.labels = tileloss_make_vector(nullptr, TILELOSS_INT64, 2048);
  args.loss = tileloss_make_vector(nullptr, TILELOSS_FLOAT32, 1);
  plan = plan_for("cross_entropy", TILELOSS_VALUE_AND_GRAD, args, nullptr);
  EXPECT_LT(plan.workspace_bytes, plan.cpu.threads * (std::int64_t{4} << 20));  // under 4 MB a thread
}

TEST_F(Plan, HintsAreTaken) {
  tileloss_plan_options hints = plan_options();
  hints.cpu.isa = TILELOSS_ISA_BASELINE;
  hints.cpu.schedule = TILELOSS_SCHEDULE_RECOMPUTE;
  hints.cpu.threads = 3;
  hints.cpu.row_block = 5;
  hints.cpu.vocab_block = 192;
  plan = made(hints);
  EXPECT_EQ(plan.cpu.isa, TILELOSS_ISA_BASELINE);
  EXPECT_EQ(plan.cpu.schedule, TILELOSS_SCHEDULE_RECOMPUTE);
  EXPECT_EQ(plan.cpu.threads, 3);
  EXPECT_EQ(plan.cpu.row_block, 5);
  EXPECT_EQ(plan.cpu.vocab_block, 192);
}

TEST_F(Plan, HintsThatCannotBeAreRefused) {
  struct Hint {
    const char* message;
    std::function<void(tileloss_plan_options&)> corrupt;
  };
  const Hint hints[] = {
      {"schedule: expected auto, stash, recompute or sweeps (0 to 3), got 4", [](auto& o) { o.cpu.schedule = 4; }},
      {"schedule: expected auto, stash, recompute or sweeps (0 to 3), got -1", [](auto& o) { o.cpu.schedule = -1; }},
      {"threads: expected 0 to 1024, got -1", [](auto& o) { o.cpu.threads = -1; }},
      {"threads: expected 0 to 1024, got 1025", [](auto& o) { o.cpu.threads = 1025; }},
      {"row_block: expected >= 0, got -1", [](auto& o) { o.cpu.row_block = -1; }},
      {"vocab_block: expected a multiple of 64 up to 8192, got 100", [](auto& o) { o.cpu.vocab_block = 100; }},
      {"vocab_block: expected a multiple of 64 up to 8192, got -64", [](auto& o) { o.cpu.vocab_block = -64; }},
      {"vocab_block: expected a multiple of 64 up to 8192, got 8256", [](auto& o) { o.cpu.vocab_block = 8256; }},
      {"workspace_bytes: expected >= 0, got -1", [](auto& o) { o.workspace_bytes = -1; }}};
  for (const Hint& hint : hints) {
    tileloss_plan_options given = plan_options();
    hint.corrupt(given);
    EXPECT_TRUE(refused(planned(given), TILELOSS_INVALID_ARGUMENT, hint.message));
  }
  tileloss_plan_options given = plan_options();
  given.struct_size = 100000;
  EXPECT_TRUE(refused(planned(given), TILELOSS_INVALID_ARGUMENT,
                      "plan_options.struct_size: expected that of its init function, at most ..."));
  EXPECT_TRUE(refused(tileloss_make_plan("cross_entropy", TILELOSS_VALUE_AND_GRAD, &c.args(), nullptr, nullptr, nullptr, nullptr),
                      TILELOSS_INVALID_ARGUMENT, "plan: expected a struct from its init function, got null"));
  plan.struct_size = 8;
  EXPECT_TRUE(
      refused(planned(plan_options()), TILELOSS_INVALID_ARGUMENT, "plan.struct_size: expected that of its init function, ..."));
}

// A caller built against a header without isa_note.
TEST_F(Plan, AShorterStructOfAnEarlierHeaderIsServed) {
  const tileloss_plan whole = made();
  std::memset(plan.cpu.isa_note, 'x', sizeof plan.cpu.isa_note);
  plan.struct_size = offsetof(tileloss_plan, cpu.isa_note);
  ASSERT_TRUE(succeeds(planned(plan_options())));
  EXPECT_EQ(plan.struct_size, offsetof(tileloss_plan, cpu.isa_note));
  EXPECT_EQ(plan.workspace_bytes, whole.workspace_bytes);
  EXPECT_EQ(std::string(plan.cpu.isa_note, sizeof plan.cpu.isa_note), std::string(sizeof plan.cpu.isa_note, 'x'));
  EXPECT_TRUE(succeeds(call(&plan)));
}

// Nor does an init write beyond the struct that it was compiled with.
TEST_F(Plan, InitFillsAnEarlierHeadersStructsAndNoMore) {
  const auto all_from = [](const unsigned char* bytes, std::size_t begin, std::size_t end, unsigned char value) {
    return std::all_of(bytes + begin, bytes + end, [&](unsigned char byte) { return byte == value; });
  };
  constexpr std::size_t kShorter = offsetof(tileloss_plan, cpu.isa_note);
  std::vector<unsigned char> earlier(sizeof(tileloss_plan), 'x');
  tileloss_struct_init(earlier.data(), kShorter);
  std::size_t size = 0;
  std::memcpy(&size, earlier.data(), sizeof size);
  EXPECT_EQ(size, kShorter);
  EXPECT_TRUE(all_from(earlier.data(), sizeof size, kShorter, 0));
  EXPECT_TRUE(all_from(earlier.data(), kShorter, earlier.size(), 'x'));
  tileloss_struct_init(nullptr, kShorter);

  const tileloss_cross_entropy_options whole;
  constexpr std::size_t kCut = offsetof(tileloss_cross_entropy_options, z_loss), kLonger = sizeof whole + 16;
  for (const std::size_t length : {kCut, sizeof whole, kLonger}) {
    std::vector<unsigned char> filled(kLonger + 16, 'x');
    ASSERT_TRUE(succeeds(tileloss_options_init("cross_entropy", filled.data(), length)));
    std::memcpy(&size, filled.data(), sizeof size);
    EXPECT_EQ(size, length);
    const std::size_t known = std::min(length, sizeof whole);
    EXPECT_EQ(std::memcmp(filled.data() + sizeof size, reinterpret_cast<const unsigned char*>(&whole) + sizeof size,
                          known - sizeof size),
              0);
    EXPECT_TRUE(all_from(filled.data(), known, length, 0));
    EXPECT_TRUE(all_from(filled.data(), length, filled.size(), 'x'));
  }
}

TEST_F(Plan, InstructionSetsThatAreNotThereAreRefused) {
  tileloss_plan_options hints = plan_options();
  for (const tileloss_isa isa :
       {tileloss_isa{TILELOSS_ISA_AVX512_BF16}, tileloss_isa{TILELOSS_ISA_AVX512_AMX}, tileloss_isa{99}}) {
    if (tileloss_isa_supported(isa) != 0) continue;
    hints.cpu.isa = isa;
    EXPECT_TRUE(refused(planned(hints), TILELOSS_UNSUPPORTED, "isa: expected one that this build and machine have (..."));
    const std::string message = tileloss_last_error();
    EXPECT_NE(message.find("baseline"), std::string::npos);
    EXPECT_NE(message.find(std::string("got ") + tileloss_isa_name(isa)), std::string::npos);
  }
  const char* before = std::getenv("TILELOSS_ISA");
  const std::string saved = before == nullptr ? "" : before;
  setenv("TILELOSS_ISA", "mmx", 1);
  EXPECT_EQ(call(), TILELOSS_UNSUPPORTED);
  EXPECT_NE(std::string(tileloss_last_error()).find("got \"mmx\""), std::string::npos);
  hints.cpu.isa = TILELOSS_ISA_BASELINE;  // a pinned one counts for more than the environment
  EXPECT_EQ(planned(hints), TILELOSS_OK);
  if (saved.empty()) {
    unsetenv("TILELOSS_ISA");
  } else {
    setenv("TILELOSS_ISA", saved.c_str(), 1);
  }
}

TEST_F(Plan, ExecutorsMustSayHowToRunTasks) {
  auto executor = init<tileloss_executor>();
  const auto expect = [&](const std::string& message) {
    EXPECT_TRUE(refused(planned(plan_options(), &executor), TILELOSS_INVALID_ARGUMENT, message));
  };
  expect("executor.threads: expected >= 1, got 0");
  executor.threads = 2;
  expect("executor: expected parallel_for or schedule, got neither");
  executor.struct_size = 4;
  expect("executor.struct_size: expected ...");
  auto run = init<tileloss_run>();
  run.executor = &executor;
  EXPECT_TRUE(refused(call(nullptr, &run), TILELOSS_INVALID_ARGUMENT, "executor.struct_size: expected ..."));
  run.executor = nullptr;
  run.struct_size = 1;
  EXPECT_TRUE(refused(call(nullptr, &run), TILELOSS_INVALID_ARGUMENT, "run.struct_size: expected ..."));
}

// What the plan was made for must be what is called: shapes, dtypes, strides, presence and options.
TEST_F(Plan, ACallThatWasNotPlannedIsRefused) {
  LogitsCase weighted({.rows = 4, .vocab = 100, .stride_extra = 3, .token_weights = true});
  plan = plan_of(weighted, options, plan_options());
  using Change = std::function<void(tileloss_args&, tileloss_cross_entropy_options&)>;
  const std::vector<float> weights(100, 1.0F);
  const Change changes[] = {
      [](auto& a, auto&) { a.logits.row_stride -= 1; },
      [](auto& a, auto&) { a.dlogits.row_stride -= 1; },
      [](auto& a, auto&) { a.logits.cols = a.dlogits.cols = 99; },
      [](auto& a, auto&) { a.token_weights = {}; },
      [](auto& a, auto&) { a.lse = {}; },
      [](auto& a, auto&) { a.token_weights.stride = 0; },
      [&](auto& a, auto&) { a.class_weights = tileloss_make_vector(weights.data(), TILELOSS_FLOAT32, 100); },
      [](auto&, auto& o) { o.label_smoothing = 0.1; },
      [](auto&, auto& o) { o.z_loss = 0.1; },
      [](auto&, auto& o) { o.logit.softcap = 3; },
      [](auto&, auto& o) { o.logit.logit_scale = 3; },
      [](auto&, auto& o) { o.logit.valid_vocab = 98; },
      [](auto&, auto& o) { o.logit.ignore_index = 3; },
      [](auto&, auto& o) { o.logit.temperature_on = TILELOSS_TEMPERATURE_ON_LOGPROB; },
      [](auto&, auto& o) { o.reduction = TILELOSS_REDUCTION_SUM; },
      [](auto&, auto& o) { o.num_items.value = 3; },  // given instead of not given
  };
  const auto before = outputs_of(weighted.args());
  for (std::size_t number = 0; number < std::size(changes); ++number) {
    tileloss_args args = weighted.args();
    tileloss_cross_entropy_options other = options;
    changes[number](args, other);
    EXPECT_TRUE(refused(tileloss_cross_entropy_value_and_grad(&args, &other, &plan, nullptr), TILELOSS_PLAN_MISMATCH,
                        "plan: expected one made for this cross_entropy..."))
        << number;
  }
  tileloss_args args = weighted.args();
  args.dlogits = {};
  EXPECT_EQ(tileloss_cross_entropy(&args, &options, &plan, nullptr), TILELOSS_PLAN_MISMATCH);
  args = init<tileloss_args>();
  args.logits = weighted.args().logits;
  args.labels = weighted.args().labels;
  EXPECT_EQ(tileloss_logprobs(&args, nullptr, &plan, nullptr), TILELOSS_PLAN_MISMATCH);
  EXPECT_TRUE(same_bits(outputs_of(weighted.args()), before));
  tileloss_plan broken = plan;
  broken.struct_size = 3;
  EXPECT_EQ(tileloss_cross_entropy_value_and_grad(&weighted.args(), &options, &broken, nullptr), TILELOSS_INVALID_ARGUMENT);
  EXPECT_TRUE(succeeds(tileloss_cross_entropy_value_and_grad(&weighted.args(), &options, &plan, nullptr)));
}

// Whether a coefficient is 0 decides what the plan has room for: annealing one from 0 needs another plan, or a pointer.
TEST_F(Plan, ACoefficientThatLeavesZeroNeedsAnotherPlan) {
  tileloss_policy_loss_options policy;
  policy.entropy_threshold.value = 0.1;
  PolicyCase p({.logits = {.rows = 64, .vocab = 40}, .metrics = false}, policy);
  const auto plan_now = [&] { return plan_for("policy_loss", TILELOSS_VALUE_AND_GRAD, p.args(), &policy); };
  const auto call_with = [&](const tileloss_plan& made) {
    return tileloss_policy_loss_value_and_grad(&p.args(), &policy, &made, nullptr);
  };
  const tileloss_plan without = plan_now();
  policy.entropy_coef.value = 0.1;
  EXPECT_EQ(call_with(without), TILELOSS_PLAN_MISMATCH);
  float coefficient = 0;
  policy.entropy_coef.pointer = &coefficient;
  const tileloss_plan with = plan_now();
  EXPECT_GT(with.workspace_bytes, without.workspace_bytes);
  EXPECT_TRUE(succeeds(call_with(with)));
  coefficient = 0.1F;
  EXPECT_TRUE(succeeds(call_with(with)));
}

// A plan is plain data, so it may come from a file, or be changed.
TEST_F(Plan, OneThatCannotBeRunIsRefused) {
  plan = made();
  const struct {
    const char* name;
    std::function<void(tileloss_plan&)> change;
  } changes[] = {{"plan.cpu.vocab_block", [](auto& p) { p.cpu.vocab_block = 0; }},
                 {"plan.cpu.vocab_block", [](auto& p) { p.cpu.vocab_block = -64; }},
                 {"plan.cpu.vocab_block", [](auto& p) { p.cpu.vocab_block = 1 << 20; }},
                 {"plan.cpu.row_block", [](auto& p) { p.cpu.row_block = 0; }},
                 {"plan.cpu.threads", [](auto& p) { p.cpu.threads = 0; }},
                 {"plan.cpu.threads", [](auto& p) { p.cpu.threads = 1 << 20; }},
                 {"plan.cpu.schedule", [](auto& p) { p.cpu.schedule = static_cast<tileloss_schedule>(9); }},
                 {"plan.workspace_bytes", [](auto& p) { p.workspace_bytes -= 64; }}};
  for (const auto& [name, change] : changes) {
    tileloss_plan broken = plan;
    change(broken);
    EXPECT_TRUE(refused(call(&broken), TILELOSS_INVALID_ARGUMENT, std::string(name) + ": expected..."));
  }
  tileloss_plan endless = plan;
  std::memset(endless.function, 'x', sizeof endless.function);
  EXPECT_EQ(call(&endless), TILELOSS_PLAN_MISMATCH);
}

TEST_F(Plan, SizesAreBounded) {
  tileloss_plan_options hints = plan_options();
  hints.cpu.row_block = std::numeric_limits<std::int64_t>::max();
  plan = made(hints);
  EXPECT_EQ(plan.cpu.row_block, c.args().logits.rows);
  EXPECT_TRUE(succeeds(call(&plan)));
  EXPECT_TRUE(agrees(check_cross_entropy(c, options)));

  auto args = init<tileloss_args>();
  args.logits = tileloss_make_matrix(nullptr, TILELOSS_BFLOAT16, (std::int64_t{1} << 59) + 7, 1, 1);
  args.labels = tileloss_make_vector(nullptr, TILELOSS_INT64, args.logits.rows);
  args.loss = tileloss_make_vector(nullptr, TILELOSS_FLOAT32, 1);
  EXPECT_TRUE(refused(tileloss_make_plan("cross_entropy", TILELOSS_FORWARD, &args, &options, nullptr, nullptr, &plan),
                      TILELOSS_INVALID_ARGUMENT, "logits.rows: expected at most 2^56 logits in all, got [576460752303423495,1]"));

  auto executor = init<tileloss_executor>();
  executor.threads = std::numeric_limits<std::int32_t>::max();
  executor.parallel_for = [](void*, std::int64_t count, tileloss_task task, void* data) {
    for (std::int64_t i = 0; i < count; ++i) task(data, i);
  };
  LogitsCase tall({.rows = 20000, .vocab = 100});
  EXPECT_LE(plan_for("cross_entropy", TILELOSS_VALUE_AND_GRAD, tall.args(), &options, plan_options(), &executor).cpu.threads,
            1024);
}

// Other data of the same shape, other labels, another mask, another temperature: the plan serves them.
TEST_F(Plan, ServesOtherDataOfTheSameShape) {
  plan = made();
  for (const double ignore_prob : {0.0, 0.5, 1.0}) {
    LogitsCaseSpec spec = spec_of_plans();
    spec.seed = 77;
    spec.ignore_prob = ignore_prob;
    LogitsCase other(spec);
    options.logit.temperature.value = 0.25 + ignore_prob;
    ASSERT_TRUE(succeeds(tileloss_cross_entropy_value_and_grad(&other.args(), &options, &plan, nullptr)));
    ASSERT_TRUE(agrees(check_cross_entropy(other, options)));
  }
}

// ------------------------------------------------------------------------------------------------------------ description

TEST_F(Plan, IsDescribedWithTheSameFactsAsTextAndAsJson) {
  tileloss_plan_options hints = with_schedule(TILELOSS_SCHEDULE_RECOMPUTE);
  hints.cpu.threads = 3;
  plan = made(hints);
  const auto described = [&](tileloss_text_format format) {
    std::size_t needed = 0;
    EXPECT_TRUE(succeeds(tileloss_plan_describe(&plan, format, nullptr, 0, &needed)));
    std::string text(needed, 'x');
    EXPECT_TRUE(succeeds(tileloss_plan_describe(&plan, format, text.data(), needed, nullptr)));
    EXPECT_EQ(text.find('\0'), needed - 1);
    text.pop_back();
    return text;
  };
  const std::string text = described(TILELOSS_TEXT);
  const nlohmann::json facts = nlohmann::json::parse(described(TILELOSS_JSON));
  const nlohmann::json expected = {{"function", "cross_entropy"},
                                   {"pass", "value_and_grad"},
                                   {"device", "cpu"},
                                   {"schedule", "recompute"},
                                   {"isa", tileloss_isa_name(plan.cpu.isa)},
                                   {"threads", plan.cpu.threads},
                                   {"workspace_bytes", plan.workspace_bytes}};
  for (const auto& [name, value] : expected.items()) EXPECT_EQ(facts[name], value) << name;
  std::int64_t bytes = 0;
  for (const auto& buffer : facts["buffers"]) bytes += buffer.get<std::int64_t>();
  EXPECT_EQ(bytes, plan.workspace_bytes);
  for (const auto& [name, value] : facts.items()) {
    if (name == "buffers") continue;
    const std::string words = value.is_string() ? value.get<std::string>() : value.dump();
    EXPECT_NE(text.find(name + ": " + words), std::string::npos) << name;
  }
}

TEST_F(Plan, IsDescribedInTheRoomThereIsAndWhatIsNoPlanIsRefused) {
  plan = made();
  char text[10];
  std::memset(text, 'x', sizeof text);
  const auto expect = [&](const tileloss_plan* given, int format, char* place, const char* message) {
    EXPECT_TRUE(refused(tileloss_plan_describe(given, format, place, 9, nullptr), TILELOSS_INVALID_ARGUMENT, message));
  };
  ASSERT_TRUE(succeeds(tileloss_plan_describe(&plan, TILELOSS_TEXT, text, 9, nullptr)));
  EXPECT_EQ(std::string(text, 10), std::string("function\0x", 10));
  expect(nullptr, TILELOSS_TEXT, text, "plan: expected a plan, got null");
  expect(&plan, 2, text, "format: expected TILELOSS_TEXT or TILELOSS_JSON (0 or 1), got 2");
  expect(&plan, TILELOSS_TEXT, nullptr, "text: expected a pointer, as capacity is not 0, got null");
  plan.buffer_count = 17;
  expect(&plan, TILELOSS_TEXT, text, "plan.buffer_count: expected 0 to 16, got 17");
  plan.buffer_count = 0;
  plan.device_type = 5;
  expect(&plan, TILELOSS_TEXT, text, "plan.device_type: expected a device of this build, got 5");
}

TEST_F(Plan, AStreamIsRefusedOnTheCpu) {
  const auto before = outputs_of(c.args());
  auto run = init<tileloss_run>();
  run.stream = &run;
  EXPECT_TRUE(refused(call(nullptr, &run), TILELOSS_INVALID_ARGUMENT,
                      "run.stream: expected null: the CPU has no streams, got a pointer"));
  EXPECT_TRUE(same_bits(outputs_of(c.args()), before));
}

// Callers built against an older header pass smaller structs: what they do not have is absent.
TEST_F(Plan, OlderAndSmallerStructsAreAccepted) {
  ASSERT_TRUE(succeeds(call()));
  const auto expected = bytes_of(c.args().dlogits);
  c.reset();
  tileloss_row_state beyond{};
  beyond.struct_size = 4711;
  c.args().row_state = &beyond;  // beyond the size given
  c.args().struct_size = offsetof(tileloss_args, row_state);
  options.struct_size = offsetof(tileloss_cross_entropy_options, label_smoothing);
  options.label_smoothing = 0.5;  // not looked at
  ASSERT_TRUE(succeeds(call()));
  EXPECT_TRUE(same_bits(bytes_of(c.args().dlogits), expected));
}

}  // namespace
}  // namespace tileloss::test
