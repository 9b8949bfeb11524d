// Valid calls to be corrupted, and what the library must answer then.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tests/api/calls.h"

namespace tileloss::test {

// A valid call, to be corrupted. Rows 4, columns 10. Others have the same members: args(), function, pass, given_options(),
// hints.
struct Call {
  LogitsCase data{{.rows = 4, .vocab = 10, .token_weights = true, .loss_grad = Upstream::kScalar, .extra_outputs = true}};
  std::string function = "cross_entropy";
  tileloss_pass pass = TILELOSS_VALUE_AND_GRAD;
  tileloss_cross_entropy_options options;
  tileloss_logprobs_options logprobs;
  tileloss_plan_options hints = plan_options();
  RowStateArrays state{4};
  float scalar = 0;

  tileloss_args& args() { return data.args(); }
  const void* given_options() const { return function == "logprobs" ? static_cast<const void*>(&logprobs) : &options; }
  void make_logprobs(tileloss_pass p) {
    function = "logprobs";
    pass = p;
    args().token_weights = args().class_weights = args().loss_grad = args().loss = {};
    if (p == TILELOSS_FORWARD) args().dlogits = {};
  }
  void make_forward() {
    pass = TILELOSS_FORWARD;
    args().dlogits = {};
  }
  void make_from_row_state() {
    pass = TILELOSS_FROM_ROW_STATE;
    args().logits = args().dlogits = {};
    args().row_state = &state.get();
    options.logit.vocab_total = 10;
  }
  tileloss_status call() { return tileloss_call(function.c_str(), pass, &args(), given_options(), nullptr, nullptr); }
};

template <class CorruptedCall>
struct CorruptionOf {
  std::string argument;  // the message starts with it ...
  std::string wanted;    // ... then "expected" and something that holds this ...
  std::string given;     // ... then "got" and this
  std::function<void(CorruptedCall&)> corrupt = {};
  tileloss_status status = TILELOSS_INVALID_ARGUMENT;
};
using Corruption = CorruptionOf<Call>;

// Only at the call, as planning touches no data.
enum class When { kPlan, kCall };

template <class CorruptedCall = Call>
testing::AssertionResult names(const CorruptionOf<CorruptedCall>& s, tileloss_status status) {
  const std::string message = tileloss_last_error(), start = s.argument + ": expected ";
  const std::size_t got = message.rfind(", got ");
  const bool right = status == s.status && message.rfind(start, 0) == 0 && got != std::string::npos &&
                     message.substr(0, got).find(s.wanted) != std::string::npos && message.substr(got + 6) == s.given;
  if (right) return testing::AssertionSuccess();
  return testing::AssertionFailure() << tileloss_status_name(status) << " \"" << message << "\", not \"" << start << "..."
                                     << s.wanted << "..., got " << s.given << "\"";
}

// Refused with that message, at the plan and at the call or at the call alone, with a plan and without; and nothing is written.
template <class CorruptedCall = Call>
void expect_refused(const std::vector<CorruptionOf<CorruptedCall>>& corruptions, When when) {
  for (const CorruptionOf<CorruptedCall>& s : corruptions) {
    CorruptedCall call;
    const tileloss_args original = call.args();
    const auto outputs = outputs_of(original);
    s.corrupt(call);
    const char* const function = call.function.c_str();
    auto plan = init<tileloss_plan>();
    const tileloss_status planned =
        tileloss_make_plan(function, call.pass, &call.args(), call.given_options(), &call.hints, nullptr, &plan);
    if (when == When::kPlan) {
      EXPECT_TRUE(names(s, planned));
      EXPECT_EQ(plan.workspace_bytes, 0) << s.argument;
    } else {
      EXPECT_EQ(planned, TILELOSS_OK) << s.argument << ": " << tileloss_last_error();
      EXPECT_TRUE(names(s, tileloss_call(function, call.pass, &call.args(), call.given_options(), &plan, nullptr)));
    }
    // What only the planner is told.
    const bool is_hint = call.hints.workspace_bytes != 0 || call.hints.cpu.schedule != TILELOSS_SCHEDULE_AUTO;
    if (!is_hint) {
      EXPECT_TRUE(names(s, tileloss_call(function, call.pass, &call.args(), call.given_options(), nullptr, nullptr)));
    }
    EXPECT_TRUE(same_bits(outputs_of(original), outputs)) << s.argument;
  }
}

}  // namespace tileloss::test
