// Who gets AMX and who does not, with the machine's and the kernel's answers given by hand.
#include "backends/cpu/isa/amx_support.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "tests/amx/trapped_tiles.h"
#include "tests/api/calls.h"
#include "tests/shared/linear_case.h"

namespace tileloss::test {
namespace {

using impl::cpu::AmxMachine;

int asked = 0;
AmxMachine machine(bool grants = true) {
  AmxMachine m;
  m.cpuid_7_edx = 1U << 22 | 1U << 24;
  m.has_xgetbv = true;
  m.xcr0 = 1U << 17 | 1U << 18;
  m.request_permission = grants ? +[] { return ++asked > 0; } : +[] { return ++asked < 0; };
  asked = 0;
  return m;
}

TEST(AmxSupport, EveryConditionCountsAndPermissionIsAskedLast) {
  EXPECT_EQ(find_amx_support(machine()), AmxSupport::kReady);
  EXPECT_EQ(asked, 1);
  EXPECT_EQ(find_amx_support(machine(false)), AmxSupport::kPermissionRefused);
  EXPECT_EQ(asked, 1);
  for (const std::uint32_t bit : {22U, 24U}) {
    AmxMachine m = machine();
    m.cpuid_7_edx &= ~(1U << bit);
    EXPECT_EQ(find_amx_support(m), AmxSupport::kNotOnThisCpu) << bit;
    EXPECT_EQ(asked, 0);
  }
  for (const std::uint32_t bit : {17U, 18U}) {
    AmxMachine m = machine();
    m.xcr0 &= ~(std::uint64_t{1} << bit);
    EXPECT_EQ(find_amx_support(m), AmxSupport::kNotEnabledBySystem) << bit;
    EXPECT_EQ(asked, 0);
  }
  AmxMachine m = machine();
  m.has_xgetbv = false;
  EXPECT_EQ(find_amx_support(m), AmxSupport::kNotEnabledBySystem);
  EXPECT_EQ(asked, 0);
}

// The environment variable away, and the answer, for as long as this lives.
class Answer {
 public:
  explicit Answer(AmxSupport support) {
    if (const char* isa = std::getenv("TILELOSS_ISA")) forced_ = isa;
    unsetenv("TILELOSS_ISA");
    answer_amx(support);
  }
  ~Answer() {
    if (!forced_.empty()) setenv("TILELOSS_ISA", forced_.c_str(), 1);
    answer_amx(AmxSupport::kReady);
  }
  Answer(const Answer&) = delete;
  Answer& operator=(const Answer&) = delete;

 private:
  std::string forced_;
};

struct Outcome {
  tileloss_plan plan = {};
  std::vector<unsigned char> gradients;
};
Outcome run_linear(tileloss_isa isa) {
  LinearCase c({.row = {.rows = 20, .vocab = 100, .seed = 1}, .hidden = 40});
  const tileloss_cross_entropy_options options = cross_entropy_options();
  tileloss_plan_options hints = plan_options();
  hints.cpu.isa = isa;
  Outcome outcome;
  EXPECT_TRUE(runs("linear_cross_entropy", TILELOSS_VALUE_AND_GRAD, c.args(), &options, hints, nullptr, &outcome.plan));
  EXPECT_TRUE(agrees(check_linear_cross_entropy(c, options)));
  outcome.gradients = c.gradient_bytes();
  return outcome;
}

TEST(AmxSupport, IsChosenWhereItIsReady) {
  const Answer answer(AmxSupport::kReady);
  const std::int64_t before = products_so_far();
  const Outcome outcome = run_linear(TILELOSS_ISA_AUTO);
  EXPECT_EQ(outcome.plan.cpu.isa, TILELOSS_ISA_AVX512_AMX);
  EXPECT_STREQ(outcome.plan.cpu.isa_note, "");
  EXPECT_GT(products_so_far(), before);
}

TEST(AmxSupport, WhatIsRefusedFallsBackToAvx512Bf16AndThePlanSaysWhy) {
  for (const AmxSupport support : {AmxSupport::kPermissionRefused, AmxSupport::kNotEnabledBySystem, AmxSupport::kNotOnThisCpu,
                                   AmxSupport::kNotInThisBuild}) {
    const Answer answer(support);
    const std::int64_t before = products_so_far();
    const Outcome outcome = run_linear(TILELOSS_ISA_AUTO);
    EXPECT_EQ(outcome.plan.cpu.isa, TILELOSS_ISA_AVX512_BF16);
    EXPECT_STREQ(outcome.plan.cpu.isa_note, amx_note(support));
    EXPECT_EQ(products_so_far(), before);
    EXPECT_EQ(tileloss_isa_supported(TILELOSS_ISA_AVX512_AMX), 0);
    const Outcome asked_for = run_linear(TILELOSS_ISA_AVX512_BF16);
    EXPECT_STREQ(asked_for.plan.cpu.isa_note, "");
    EXPECT_EQ(outcome.gradients, asked_for.gradients);
  }
  EXPECT_STREQ(impl::cpu::amx_note(AmxSupport::kPermissionRefused), "AMX: permission refused");
}

// Whose VDPBF16PS is slow goes on to avx512, and whoever asks for avx512_bf16 gets it.
TEST(AmxSupport, WhatIsRefusedFallsBackToAvx512WherePairsAreSlow) {
  answer_processor({"GenuineIntel", 6, 143});
  for (const AmxSupport support : {AmxSupport::kPermissionRefused, AmxSupport::kNotEnabledBySystem}) {
    const Answer answer(support);
    const Outcome outcome = run_linear(TILELOSS_ISA_AUTO);
    EXPECT_EQ(outcome.plan.cpu.isa, TILELOSS_ISA_AVX512);
    EXPECT_EQ(outcome.plan.cpu.isa_note, std::string(impl::cpu::amx_note(support)) + "; slow VDPBF16PS");
    EXPECT_EQ(outcome.gradients, run_linear(TILELOSS_ISA_AVX512).gradients);
    EXPECT_EQ(run_linear(TILELOSS_ISA_AVX512_BF16).plan.cpu.isa, TILELOSS_ISA_AVX512_BF16);
    setenv("TILELOSS_ISA", "avx512_bf16", 1);
    EXPECT_EQ(run_linear(TILELOSS_ISA_AUTO).plan.cpu.isa, TILELOSS_ISA_AVX512_BF16);
    unsetenv("TILELOSS_ISA");
  }
  {
    const Answer answer(AmxSupport::kReady);
    EXPECT_EQ(run_linear(TILELOSS_ISA_AUTO).plan.cpu.isa, TILELOSS_ISA_AVX512_AMX);
  }
  answer_processor({});
}

TEST(AmxSupport, AskingForItWhereItIsRefusedIsAnErrorThatSaysWhy) {
  const Answer answer(AmxSupport::kPermissionRefused);
  const LinearCase c({.row = {.rows = 2, .vocab = 10}, .hidden = 4});
  tileloss_plan plan;
  tileloss_plan_init(&plan);
  tileloss_plan_options hints = plan_options();
  hints.cpu.isa = TILELOSS_ISA_AVX512_AMX;
  const auto make_plan = [&] {
    return tileloss_make_plan("linear_cross_entropy", TILELOSS_VALUE_AND_GRAD, &c.args(), nullptr, &hints, nullptr, &plan);
  };
  const std::string have = "expected one that this build and machine have (avx512_bf16, avx512, avx2, baseline), got ";
  EXPECT_EQ(make_plan(), TILELOSS_UNSUPPORTED);
  EXPECT_EQ(tileloss_last_error(), "isa: " + have + "avx512_amx (AMX: permission refused)");
  hints.cpu.isa = TILELOSS_ISA_AUTO;
  setenv("TILELOSS_ISA", "avx512_amx", 1);
  EXPECT_EQ(make_plan(), TILELOSS_UNSUPPORTED);
  EXPECT_EQ(tileloss_last_error(), "TILELOSS_ISA: " + have + "\"avx512_amx\" (AMX: permission refused)");
}

// A plan made before, for a machine that answers otherwise now.
TEST(AmxSupport, APlanForItIsRefusedWhereItIsNot) {
  LinearCase c({.row = {.rows = 2, .vocab = 10}, .hidden = 4});
  tileloss_plan plan;
  tileloss_plan_init(&plan);
  const auto& args = c.args();
  ASSERT_EQ(tileloss_make_plan("linear_cross_entropy", TILELOSS_VALUE_AND_GRAD, &args, nullptr, nullptr, nullptr, &plan),
            TILELOSS_OK);
  EXPECT_EQ(plan.cpu.isa, TILELOSS_ISA_AVX512_AMX);
  const Answer answer(AmxSupport::kPermissionRefused);
  EXPECT_EQ(tileloss_call("linear_cross_entropy", TILELOSS_VALUE_AND_GRAD, &args, nullptr, &plan, nullptr), TILELOSS_UNSUPPORTED);
}

}  // namespace
}  // namespace tileloss::test
