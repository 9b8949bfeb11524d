// Hosts that run with another floating-point control word: results stay, and so does the host's word.
#include <gtest/gtest.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <cstdint>
#include <functional>

#include "backends/cpu/threads/floating_point.h"
#include "tests/api/calls.h"

namespace tileloss::test {
namespace {

#if defined(__x86_64__)
constexpr unsigned kDefault = 0x1f80, kFlushToZero = 0x8000, kOther = 0x40;  // denormals are zero
constexpr unsigned kRoundUp = 0x4000, kRoundDown = 0x2000, kRoundToZero = 0x6000, kFlags = 0x3f;
unsigned control_word() { return _mm_getcsr() & ~kFlags; }
void set_control_word(unsigned word) { _mm_setcsr(word); }
#else
constexpr unsigned kDefault = 0, kFlushToZero = 1U << 24, kOther = (1U << 25) | (1U << 26);  // default NaN, another float16
constexpr unsigned kRoundUp = 1U << 22, kRoundDown = 2U << 22, kRoundToZero = 3U << 22;
unsigned control_word() {
  std::uint64_t word = 0;
  asm volatile("mrs %0, fpcr" : "=r"(word));
  return static_cast<unsigned>(word);
}
void set_control_word(unsigned word) { asm volatile("msr fpcr, %0" : : "r"(std::uint64_t{word})); }
#endif

// Runs `body` under another control word and gives back what the word is afterwards, sticky flags left out.
unsigned word_after(unsigned word, const std::function<void()>& body) {
  const unsigned before = control_word();
  set_control_word(word);
  body();
  const unsigned after = control_word();
  set_control_word(before);
  return after;
}

// Logits and weights that include subnormal numbers, and gradients that underflow.
LogitsCase make_case(oracle::NumberFormat format) {
  LogitsCase c({.rows = 40,
                .vocab = 1500,
                .format = format,
                .distribution = "wide",
                .token_weights = true,
                .class_weights = true,
                .extra_outputs = true},
               LogitsCase::Open{});
  for (std::int64_t j = 0; j < 1500; j += 3) c.set_logit(1, j, oracle::format_info(format).smallest_step);
  c.seal();
  return c;
}

class ControlWord : public testing::TestWithParam<unsigned> {};
INSTANTIATE_TEST_SUITE_P(OfTheHost, ControlWord,
                         testing::Values(kDefault | kFlushToZero, kDefault | kFlushToZero | kOther, kDefault | kRoundUp,
                                         kDefault | kRoundDown, kDefault | kRoundToZero));

TEST_P(ControlWord, IsRestoredAndChangesNoBit) {
  for (const oracle::NumberFormat format : kFormats) {
    LogitsCase c = make_case(format);
    tileloss_cross_entropy_options options = cross_entropy_options();
    options.label_smoothing = 0.1;
    options.logit.temperature.value = 0.7;
    options.z_loss = 1e-4;
    for (const int threads : {1, 3}) {
      tileloss_plan_options hints = plan_options();
      hints.cpu.threads = threads;
      c.reset();
      ASSERT_TRUE(runs_value_and_grad(c, options, hints));
      const auto expected = outputs_of(c.args());
      c.reset();
      tileloss_status status = TILELOSS_INTERNAL;
      tileloss_plan plan;
      tileloss_plan_init(&plan);
      const unsigned after = word_after(GetParam(), [&] {
        status = tileloss_make_plan("cross_entropy", TILELOSS_VALUE_AND_GRAD, &c.args(), &options, &hints, nullptr, &plan);
        if (status == TILELOSS_OK) status = tileloss_cross_entropy_value_and_grad(&c.args(), &options, &plan, nullptr);
      });
      ASSERT_TRUE(succeeds(status));
      EXPECT_EQ(after, GetParam());
      ASSERT_TRUE(same_bits(outputs_of(c.args()), expected));
    }
  }
}

// Pool threads are reused: a task must leave them as it found them, and not inherit what an earlier caller had.
TEST(FloatingPointScope, PutsTheWordBack) {
  const unsigned after = word_after(kDefault | kRoundUp, [] {
    const impl::cpu::FloatingPointScope scope;
    EXPECT_EQ(control_word(), kDefault | kFlushToZero);
  });
  EXPECT_EQ(after, kDefault | kRoundUp);
}

#if defined(__x86_64__)
TEST(UnmaskedExceptions, AreNotRaisedInTheHost) {
  LogitsCase c({.rows = 3, .vocab = 100}, LogitsCase::Open{});
  c.set_logit(0, 5, -std::numeric_limits<double>::infinity());
  c.set_logit(1, 5, std::numeric_limits<double>::quiet_NaN());
  c.set_logit(2, 5, std::numeric_limits<double>::infinity());
  c.seal();
  constexpr unsigned kInvalidDivideOverflow = (1U << 7) | (1U << 9) | (1U << 10);  // their masks
  tileloss_status status = TILELOSS_INTERNAL;
  const unsigned after = word_after(kDefault & ~kInvalidDivideOverflow, [&] {
    status = tileloss_cross_entropy_value_and_grad(&c.args(), nullptr, nullptr, nullptr);
  });
  EXPECT_TRUE(succeeds(status));
  EXPECT_EQ(after, kDefault & ~kInvalidDivideOverflow);
}
#endif

}  // namespace
}  // namespace tileloss::test
