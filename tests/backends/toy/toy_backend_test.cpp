// A new device through the C ABI, chosen by the views' device_type. The C API's own suites run on it as well:
// src/backends/device/copied_views.h.
#include "tests/backends/toy/toy_backend.h"

#include <gtest/gtest.h>

#include <cmath>
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

// Of three rows, in nine floats on the device.
tileloss_row_state state_in(float* floats) {
  auto state = init<tileloss_row_state>();
  state.rows = 3;
  state.max = floats;
  state.sum = floats + 3;
  state.label_logit = floats + 6;
  state.device_type = kToyDevice;
  return state;
}

// Three rows of logits 0 to 4, whose labels are 1, `label` and 3, on the device.
class OnTheDevice : public testing::Test {
 protected:
  explicit OnTheDevice(std::int64_t label = 2)
      : logits_(memory_.allocate(sizeof(float) * 15)),
        labels_(memory_.allocate(sizeof(std::int64_t) * 3)),
        loss_(static_cast<float*>(memory_.allocate(sizeof(float)))) {
    memory_.queue([logits = static_cast<float*>(logits_), labels = static_cast<std::int64_t*>(labels_), label] {
      for (int i = 0; i < 15; ++i) logits[i] = static_cast<float>(i % 5);
      labels[0] = 1;
      labels[1] = label;
      labels[2] = 3;
    });
    tileloss_args_init(&args_);
    args_.logits = args_.dlogits = tileloss_make_matrix(logits_, TILELOSS_FLOAT32, 3, 5, 5);
    args_.labels = tileloss_make_vector(labels_, TILELOSS_INT64, 3);
    args_.loss = tileloss_make_vector(loss_, TILELOSS_FLOAT32, 1);
    move_to_toy(args_);
  }
  ~OnTheDevice() override {
    memory_.synchronise();
    for (void* piece : {logits_, labels_, static_cast<void*>(loss_)}) memory_.release(piece);
    EXPECT_EQ(memory_.allocations(), 0) << "a call has kept memory";
  }
  float loss() {
    float value = 0;
    memory_.queue([&, from = loss_] { value = *from; });
    memory_.synchronise();
    return value;
  }

  DeviceMemory& memory_ = toy().pages();
  void *logits_, *labels_;
  float* loss_;
  tileloss_args args_;
  tileloss_cross_entropy_options options_ = cross_entropy_options();
};
using OnTheDeviceDeathTest = OnTheDevice;
struct WithABadLabel : OnTheDevice {
  WithABadLabel() : OnTheDevice(9) {}
};

TEST_F(OnTheDeviceDeathTest, TheHostCannotReadItsMemory) {
  EXPECT_DEATH(std::fprintf(stderr, "%f", static_cast<double>(*loss_)), "");
}

TEST_F(OnTheDevice, ACallIsQueuedAndDoneOnceSomebodyWaits) {
  ASSERT_TRUE(succeeds(tileloss_cross_entropy_value_and_grad(&args_, &options_, nullptr, nullptr)));
  const double lse = std::log(1 + std::exp(1.0) + std::exp(2.0) + std::exp(3.0) + std::exp(4.0));
  EXPECT_NEAR(loss(), lse - 2, 1e-6);
}

TEST_F(WithABadLabel, GivesNanAndAnErrorOnceSomebodyWaits) {
  for (tileloss_vector* v : {&args_.loss, &args_.labels}) v->device_index = 1;
  for (tileloss_matrix* m : {&args_.logits, &args_.dlogits}) m->device_index = 1;
  ASSERT_TRUE(succeeds(tileloss_cross_entropy_value_and_grad(&args_, &options_, nullptr, nullptr)));
  EXPECT_TRUE(std::isnan(loss()));
  EXPECT_TRUE(succeeds(tileloss_check_errors(kToyDevice, 0, nullptr)));
  const Status status = check_errors(kToyDevice, 1);
  EXPECT_EQ(status.code(), StatusCode::kLabelOutOfRange);
  EXPECT_EQ(status.message(), "labels[1]: expected 0 <= label < 5 or ignore_index -100, got 9");
  EXPECT_TRUE(succeeds(tileloss_check_errors(kToyDevice, 1, nullptr))) << "it was not cleared";
}

// Of two calls' errors the first is reported.
TEST_F(WithABadLabel, AWrongNumberBehindAPointerIsReported) {
  auto* const temperature = static_cast<float*>(memory_.allocate(sizeof(float)));
  memory_.queue([=] { *temperature = -1; });
  tileloss_cross_entropy_options cold = options_;
  cold.logit.temperature.pointer = temperature;
  cold.logit.ignore_index = 9;
  ASSERT_TRUE(succeeds(tileloss_cross_entropy_value_and_grad(&args_, &cold, nullptr, nullptr)));
  EXPECT_TRUE(std::isnan(loss()));
  ASSERT_TRUE(succeeds(tileloss_cross_entropy_value_and_grad(&args_, &options_, nullptr, nullptr)));
  memory_.synchronise();
  memory_.release(temperature);
  EXPECT_TRUE(refused(tileloss_check_errors(kToyDevice, 0, nullptr), TILELOSS_INVALID_ARGUMENT,
                      "temperature: expected a number > 0, got -1"));
}

TEST(ToyDevice, HasNoErrorsWhereThereIsNoDevice) {
  EXPECT_TRUE(
      refused(tileloss_check_errors(kToyDevice, 2, nullptr), TILELOSS_INVALID_ARGUMENT, "device_index: expected 0 to 1, got 2"));
  EXPECT_TRUE(refused(tileloss_check_errors(78, 0, nullptr), TILELOSS_UNSUPPORTED,
                      "device_type: expected a device of this build (cpu, toy), got 78"));
}

// Two shards of the vocabulary, the second one's call inside the first one's: nothing of it has run when either merge returns.
TEST_F(OnTheDevice, ShardsAreMergedInItsQueue) {
  struct Shards {
    tileloss_args whole;
    float* floats;
    tileloss_row_state states[3];  // the third: of both

    tileloss_status run(int number) {
      const int start = number == 0 ? 0 : 2, columns = number == 0 ? 2 : 3;
      tileloss_args args = whole;
      for (tileloss_matrix* m : {&args.logits, &args.dlogits})
        *m = {static_cast<float*>(m->data) + start, 3, columns, 5, 1, TILELOSS_FLOAT32, kToyDevice, 0, 0};
      args.row_state = &states[number];
      const tileloss_cross_entropy_options options = {.logit = {.vocab_start = start, .vocab_total = 5}};
      auto run = init<tileloss_run>();
      run.merge_context = this;
      run.merge = number == 0 ? +[](void* shards) { return static_cast<Shards*>(shards)->merge_first(); }
                              : +[](void* shards) { return static_cast<Shards*>(shards)->merge_second(); };
      return tileloss_cross_entropy_value_and_grad(&args, &options, nullptr, &run);
    }
    tileloss_status merge_first() {
      const tileloss_status status = run(1);
      return status == TILELOSS_OK ? set(0, {2}) : status;
    }
    tileloss_status merge_second() {
      const tileloss_status status = set(2, {0, 1});
      return status == TILELOSS_OK ? set(1, {2}) : status;
    }
    tileloss_status set(int to, const std::vector<int>& parts) {
      tileloss_status status = tileloss_row_state_set_identity(&states[to]);
      for (const int part : parts) status = status == TILELOSS_OK ? tileloss_row_state_merge(&states[to], &states[part]) : status;
      return status;
    }
  } shards{.whole = args_, .floats = static_cast<float*>(memory_.allocate(sizeof(float) * 27)), .states = {}};
  for (int k = 0; k < 3; ++k) shards.states[k] = state_in(shards.floats + std::ptrdiff_t{9} * k);
  ASSERT_TRUE(succeeds(shards.run(0)));
  std::vector<float> gradient(15);
  memory_.queue([&, from = static_cast<float*>(logits_)] { gradient.assign(from, from + 15); });
  const double sum = 1 + std::exp(1.0) + std::exp(2.0) + std::exp(3.0) + std::exp(4.0);
  EXPECT_NEAR(loss(), std::log(sum) - 2, 1e-6);
  for (int i = 0; i < 3; ++i) {
    for (int j = 0; j < 5; ++j) {
      const double p = std::exp(static_cast<double>(j)) / sum;
      EXPECT_NEAR(gradient[static_cast<std::size_t>(i * 5 + j)], (p - (j == i + 1 ? 1 : 0)) / 3, 1e-7) << i << " " << j;
    }
  }
  memory_.release(shards.floats);
}

// Also of what is made of states that are right.
TEST_F(WithABadLabel, HasNanForOutputsOfARowState) {
  auto* const floats = static_cast<float*>(memory_.allocate(sizeof(float) * 12));
  memory_.queue([=] { std::fill_n(floats, 12, 1.0F); });
  tileloss_row_state state = state_in(floats);
  args_.logits = args_.dlogits = {};
  args_.row_state = &state;
  args_.logp = tileloss_make_vector(floats + 9, TILELOSS_FLOAT32, 3);
  args_.logp.device_type = kToyDevice;
  const tileloss_cross_entropy_options options = {.logit = {.vocab_total = 5}};
  ASSERT_TRUE(succeeds(tileloss_cross_entropy_from_row_state(&args_, &options, nullptr, nullptr)));
  float logp = 0;
  memory_.queue([&] { logp = floats[10]; });
  EXPECT_TRUE(std::isnan(loss()));
  EXPECT_TRUE(std::isnan(logp));
  memory_.release(floats);
  EXPECT_FALSE(check_errors(kToyDevice).ok());
}

TEST_F(WithABadLabel, HasNanForAShardsSums) {
  auto* const floats = static_cast<float*>(memory_.allocate(sizeof(float) * 9));
  auto* const sums = static_cast<double*>(memory_.allocate(sizeof(double) * 6));
  memory_.queue([=] { std::fill_n(floats, 9, 1.0F); });
  tileloss_row_state state = state_in(floats);
  auto pair = init<tileloss_pair_state>();
  pair.rows = 3;
  pair.teacher = &state;
  pair.divergence = sums;
  pair.mean = sums + 3;
  args_.teacher_logits = args_.logits;
  args_.dlogits = {};
  args_.loss = {};
  args_.row_state = &state;
  args_.pair_state = &pair;
  const tileloss_distillation_options options = {.logit = {.vocab_total = 8}};
  ASSERT_TRUE(succeeds(tileloss_distillation(&args_, &options, nullptr, nullptr)));
  std::vector<double> found;
  memory_.queue([&] { found.assign(sums, sums + 6); });
  memory_.synchronise();
  EXPECT_TRUE(std::isnan(found[1]));
  EXPECT_TRUE(std::isnan(found[4]));
  memory_.release(floats);
  memory_.release(sums);
  EXPECT_FALSE(check_errors(kToyDevice).ok());
}

// By the number that is behind the pointer when the device runs.
TEST_F(OnTheDevice, AGradientIsScaledOnceSomebodyWaits) {
  auto* const factor = static_cast<float*>(memory_.allocate(sizeof(float)));
  float last = 0;
  for (const float number : {3.0F, 1.0F}) {
    memory_.queue([=] { *factor = number; });
    ASSERT_TRUE(succeeds(tileloss_scale_gradient(&args_.dlogits, factor, nullptr)));
  }
  memory_.queue([&, gradient = static_cast<float*>(logits_)] { last = gradient[14]; });
  memory_.synchronise();
  EXPECT_EQ(last, 12);
  memory_.release(factor);
}

TEST_F(OnTheDevice, AColumnThatATeacherDoesNotHaveIsReported) {
  auto* const ids = static_cast<std::int64_t*>(memory_.allocate(sizeof(std::int64_t) * 3));
  auto* const logprobs = static_cast<float*>(memory_.allocate(sizeof(float) * 3));
  memory_.queue([=] {
    for (int i = 0; i < 3; ++i) ids[i] = i == 1 ? std::int64_t{1} << 40 : i;
    std::fill_n(logprobs, 3, -1.0F);
  });
  args_.teacher_ids = tileloss_make_matrix(ids, TILELOSS_INT64, 3, 1, 1);
  args_.teacher_logprobs = tileloss_make_matrix(logprobs, TILELOSS_FLOAT32, 3, 1, 1);
  move_to_toy(args_);
  ASSERT_TRUE(succeeds(tileloss_sparse_distillation_value_and_grad(&args_, nullptr, nullptr, nullptr)));
  EXPECT_TRUE(std::isnan(loss()));
  memory_.release(ids);
  memory_.release(logprobs);
  EXPECT_TRUE(refused(tileloss_check_errors(kToyDevice, 0, nullptr), TILELOSS_INVALID_ARGUMENT,
                      "teacher_ids[1,0]: expected a column < 5, or a negative number for none, got 1099511627776"));
}

TEST_F(OnTheDevice, ThePlanTellsOfItAndFitsNoOther) {
  const tileloss_plan_options hints = plan_options();
  tileloss_plan plan, on_cpu;
  tileloss_plan_init(&plan);
  tileloss_plan_init(&on_cpu);
  LogitsCase c({.rows = 3, .vocab = 5});
  ASSERT_TRUE(succeeds(tileloss_make_plan("cross_entropy", TILELOSS_VALUE_AND_GRAD, &args_, &options_, &hints, nullptr, &plan)));
  EXPECT_EQ(plan.device_type, kToyDevice);
  char text[400];
  ASSERT_EQ(tileloss_plan_describe(&plan, TILELOSS_JSON, text, sizeof text, nullptr), TILELOSS_OK) << tileloss_last_error();
  const nlohmann::json facts = nlohmann::json::parse(text);
  EXPECT_EQ(facts["device"], "toy");
  EXPECT_EQ(facts["rows"], 3);
  EXPECT_EQ(facts["columns"], 5);
  EXPECT_EQ(tileloss_cross_entropy_value_and_grad(&c.args(), &options_, &plan, nullptr), TILELOSS_PLAN_MISMATCH);
}

TEST_F(OnTheDevice, TensorsOfTwoDevicesAreRefused) {
  args_.labels.device_type = TILELOSS_CPU;
  EXPECT_TRUE(refused(tileloss_cross_entropy_value_and_grad(&args_, &options_, nullptr, nullptr), TILELOSS_INVALID_ARGUMENT,
                      "labels.device_type: expected the first tensor's device, toy, got 0"));
  args_.labels.device_type = kToyDevice;
  args_.labels.device_index = 1;
  EXPECT_TRUE(refused(tileloss_cross_entropy_value_and_grad(&args_, &options_, nullptr, nullptr), TILELOSS_INVALID_ARGUMENT,
                      "labels.device_index: expected the first tensor's, 0, got 1"));
  args_.logits.device_index = 2;
  EXPECT_TRUE(refused(tileloss_cross_entropy_value_and_grad(&args_, &options_, nullptr, nullptr), TILELOSS_INVALID_ARGUMENT,
                      "logits.device_index: expected 0 to 1, got 2"));
}

TEST(ToyDevice, MergesRowStates) {
  DeviceMemory& memory = toy().pages();
  auto* const floats = static_cast<float*>(memory.allocate(12 * sizeof(float)));
  tileloss_row_state a, b;
  for (tileloss_row_state* state : {&a, &b}) {
    tileloss_row_state_init(state);
    float* const own = floats + (state == &a ? 0 : 6);
    state->rows = 2;
    state->max = own;
    state->sum = own + 2;
    state->label_logit = own + 4;
    state->device_type = kToyDevice;
    ASSERT_EQ(tileloss_row_state_set_identity(state), TILELOSS_OK) << tileloss_last_error();
  }
  memory.queue([&] { b.max[1] = b.label_logit[1] = 3; });
  ASSERT_EQ(tileloss_row_state_merge(&a, &b), TILELOSS_OK) << tileloss_last_error();
  float max = 0;
  memory.queue([&] { max = a.max[1]; });
  memory.synchronise();
  memory.release(floats);
  EXPECT_EQ(max, 3);
  b.device_index = 1;
  EXPECT_TRUE(refused(tileloss_row_state_merge(&a, &b), TILELOSS_INVALID_ARGUMENT, "from.device_index: expected 0, got 1"));
  b.device_type = TILELOSS_CPU;
  b.device_index = 0;
  EXPECT_TRUE(refused(tileloss_row_state_merge(&a, &b), TILELOSS_INVALID_ARGUMENT, "from.device_type: expected toy, got cpu"));
}

}  // namespace
}  // namespace tileloss::test
