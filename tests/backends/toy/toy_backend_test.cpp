// A new device through the C ABI: chosen by the views' device_type, checked by the same oracle as the CPU.
#include "tests/backends/toy/toy_backend.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "schema/tensors.h"
#include "tests/api/calls.h"

namespace tileloss::test {
namespace {

const ToyBackend& toy() {
  static const ToyBackend backend;
  return backend;
}

const bool is_registered = (impl::add_backend(&toy()), true);

void move_to_toy(tileloss_args& args) {
  for (const impl::TensorSlot& slot : impl::tensor_slots()) {
    if (slot.vector != nullptr) (args.*slot.vector).device_type = kToyDevice;
    if (slot.matrix != nullptr) (args.*slot.matrix).device_type = kToyDevice;
  }
  if (args.row_state != nullptr) args.row_state->device_type = kToyDevice;
}

const std::vector<reference::NumberFormat> kFormats = {reference::NumberFormat::kFloat32, reference::NumberFormat::kBfloat16,
                                                       reference::NumberFormat::kFloat16};

class OnTheToyDevice : public testing::TestWithParam<reference::NumberFormat> {};
INSTANTIATE_TEST_SUITE_P(Formats, OnTheToyDevice, testing::ValuesIn(kFormats),
                         [](const auto& param) { return std::string(reference::format_info(param.param).name); });

TEST_P(OnTheToyDevice, CrossEntropyForwardAndBackwardAgreeWithTheOracle) {
  for (const double smoothing : {0.0, 0.2}) {
    LogitsCase c({.rows = 9,
                  .vocab = 130,
                  .valid_vocab = 120,
                  .format = GetParam(),
                  .ignore_prob = 0.3,
                  .class_weights = smoothing == 0,
                  .extra_outputs = smoothing > 0});
    tileloss_cross_entropy_options options = cross_entropy_options();
    options.logit.valid_vocab = 120;
    options.label_smoothing = smoothing;
    options.z_loss = 1e-3;
    RowStateArrays state(9);
    move_to_toy(c.args());
    tileloss_args forward = c.args(), backward = c.args();
    forward.dlogits = {};
    forward.row_state = backward.row_state = &state.get();
    state.get().device_type = kToyDevice;
    ASSERT_TRUE(runs("cross_entropy", TILELOSS_FORWARD, forward, &options, plan_options()));
    ASSERT_TRUE(runs("cross_entropy", TILELOSS_BACKWARD, backward, &options, plan_options()));
    EXPECT_TRUE(agrees(check_cross_entropy(c, options)));
    c.reset();
    EXPECT_FALSE(agrees(check_cross_entropy(c, options))) << "the check sees an output that was not written";
    ASSERT_TRUE(runs("cross_entropy", TILELOSS_VALUE_AND_GRAD, c.args(), &options, plan_options()));
    EXPECT_TRUE(agrees(check_cross_entropy(c, options)));
  }
}

TEST_P(OnTheToyDevice, LogprobsForwardAndBackwardAgreeWithTheOracle) {
  LogitsCase c({.rows = 9,
                .vocab = 77,
                .format = GetParam(),
                .ignore_prob = 0.3,
                .logp_grad = Upstream::kPerRow,
                .lse_grad = Upstream::kPerRow,
                .entropy_grad = Upstream::kPerRow,
                .loss = false,
                .extra_outputs = true});
  const tileloss_logprobs_options options = logprobs_options();
  move_to_toy(c.args());
  tileloss_args forward = c.args(), backward = c.args();
  forward.dlogits = {};
  forward.logp_grad = forward.lse_grad = forward.entropy_grad = {};
  ASSERT_TRUE(runs("logprobs", TILELOSS_FORWARD, forward, &options, plan_options()));
  ASSERT_TRUE(runs("logprobs", TILELOSS_BACKWARD, backward, &options, plan_options()));
  EXPECT_TRUE(agrees(check_logprobs(c, options)));
}

TEST(ToyDevice, ThePlanTellsOfItAndFitsNoOther) {
  LogitsCase c({.rows = 3, .vocab = 20});
  const tileloss_cross_entropy_options options = cross_entropy_options();
  const tileloss_plan on_cpu = plan_of(c, options, plan_options());
  move_to_toy(c.args());
  const tileloss_plan plan = plan_of(c, options, plan_options());
  EXPECT_EQ(plan.device_type, kToyDevice);
  char text[400];
  ASSERT_EQ(tileloss_plan_describe(&plan, TILELOSS_JSON, text, sizeof text, nullptr), TILELOSS_OK) << tileloss_last_error();
  const nlohmann::json facts = nlohmann::json::parse(text);
  EXPECT_EQ(facts["device"], "toy");
  EXPECT_EQ(facts["rows"], 3);
  EXPECT_EQ(facts["columns"], 20);
  EXPECT_EQ(tileloss_cross_entropy_value_and_grad(&c.args(), &options, &on_cpu, nullptr), TILELOSS_PLAN_MISMATCH);
}

TEST(ToyDevice, RefusesWhatItHasNotAndTensorsOfTwoDevices) {
  LogitsCase c({.rows = 3, .vocab = 20});
  const tileloss_cross_entropy_options options = cross_entropy_options();
  move_to_toy(c.args());
  c.args().labels.device_type = TILELOSS_CPU;
  EXPECT_TRUE(refused(tileloss_cross_entropy_value_and_grad(&c.args(), &options, nullptr, nullptr), TILELOSS_INVALID_ARGUMENT,
                      "labels.device_type: expected the first tensor's device, toy, got 0"));
  tileloss_args linear;
  tileloss_args_init(&linear);
  linear.hidden = linear.head = c.args().logits;
  linear.labels = c.args().labels;
  move_to_toy(linear);
  EXPECT_TRUE(refused(tileloss_linear_cross_entropy(&linear, &options, nullptr, nullptr), TILELOSS_UNSUPPORTED,
                      "linear_cross_entropy: the toy device has no such sweep"));
}

TEST(ToyDevice, MergesRowStates) {
  RowStateArrays a(2), b(2);
  for (RowStateArrays* state : {&a, &b}) {
    state->get().device_type = kToyDevice;
    ASSERT_EQ(tileloss_row_state_set_identity(&state->get()), TILELOSS_OK) << tileloss_last_error();
  }
  b.get().max[1] = b.get().target[1] = 3;
  ASSERT_EQ(tileloss_row_state_merge(&a.get(), &b.get()), TILELOSS_OK) << tileloss_last_error();
  EXPECT_EQ(a.get().max[1], 3);
  b.get().device_type = TILELOSS_CPU;
  EXPECT_TRUE(refused(tileloss_row_state_merge(&a.get(), &b.get()), TILELOSS_INVALID_ARGUMENT,
                      "from.device_type: expected toy, got cpu"));
}

}  // namespace
}  // namespace tileloss::test
