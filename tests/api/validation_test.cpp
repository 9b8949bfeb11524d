// Every argument error names the argument, what was expected and what was given, and nothing has been written. One line per
// branch of src/api's checks: options, structs, matrices, vectors.
#include <gtest/gtest.h>

#include <limits>

#include "tests/api/corrupted_call.h"

namespace tileloss::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInf = std::numeric_limits<double>::infinity();
constexpr std::int64_t kHuge = std::int64_t{1} << 61;

TEST(Validation, TheCallsThatTheTestsCorruptAreValid) {
  Call call;
  EXPECT_TRUE(succeeds(call.call()));
  call.make_forward();
  EXPECT_TRUE(succeeds(call.call()));
  call.make_from_row_state();
  EXPECT_TRUE(succeeds(call.call()));
  for (const tileloss_pass pass : {TILELOSS_FORWARD, TILELOSS_BACKWARD}) {
    Call logprobs;
    logprobs.make_logprobs(pass);
    EXPECT_TRUE(succeeds(logprobs.call()));
  }
}

TEST(Validation, WhatOnlyTheLmHeadHas) {
  expect_refused(
      {{"accumulate", "no sum to add to", "1", [](Call& c) { c.options.linear.accumulate = 1; }},
       {"compute_dtype", "makes no product", "bfloat16", [](Call& c) { c.options.linear.compute_dtype = TILELOSS_BFLOAT16; }}},
      When::kPlan);
}

TEST(Validation, OptionsOutsideTheirRange) {
  const auto logit = [](auto member, auto value) { return [=](Call& c) { c.options.logit.*member = value; }; };
  using Logit = tileloss_logit_options;
  expect_refused({{"logit_scale", "> 0", "0", logit(&Logit::logit_scale, 0.0)},
                  {"logit_scale", "> 0", "-1", logit(&Logit::logit_scale, -1.0)},
                  {"logit_scale", "> 0", "inf", logit(&Logit::logit_scale, kInf)},
                  {"logit_scale", "> 0", "nan", logit(&Logit::logit_scale, kNan)},
                  {"softcap", ">= 0", "-0.5", logit(&Logit::softcap, -0.5)},
                  {"softcap", ">= 0", "inf", logit(&Logit::softcap, kInf)},
                  {"softcap", ">= 0", "nan", logit(&Logit::softcap, kNan)},
                  {"temperature", "> 0", "0", [](Call& c) { c.options.logit.temperature.value = 0; }},
                  {"temperature", "> 0", "-2", [](Call& c) { c.options.logit.temperature.value = -2; }},
                  {"temperature", "> 0", "nan", [](Call& c) { c.options.logit.temperature.value = kNan; }},
                  {"temperature_on", "logits|logprob", "2", logit(&Logit::temperature_on, 2)},
                  {"temperature_on", "logits|logprob", "-1", logit(&Logit::temperature_on, -1)},
                  {"valid_vocab", ">= 1, or -1", "0", logit(&Logit::valid_vocab, 0)},
                  {"valid_vocab", ">= 1, or -1", "-2", logit(&Logit::valid_vocab, -2)},
                  {"valid_vocab", "<= the logits' columns = 10", "11", logit(&Logit::valid_vocab, 11)},
                  {"vocab_start", ">= 0", "-1", logit(&Logit::vocab_start, -1)},
                  {"vocab_start", "<= vocab_total - columns = 0", "1", logit(&Logit::vocab_start, 1)},
                  {"vocab_total", ">= 1, or -1", "0", logit(&Logit::vocab_total, 0)},
                  {"vocab_start", "<= vocab_total - columns = -1", "0", logit(&Logit::vocab_total, 9)},
                  {"label_smoothing", ">= 0 and <= 1", "-0.1", [](Call& c) { c.options.label_smoothing = -0.1; }},
                  {"label_smoothing", ">= 0 and <= 1", "1.5", [](Call& c) { c.options.label_smoothing = 1.5; }},
                  {"label_smoothing", ">= 0 and <= 1", "nan", [](Call& c) { c.options.label_smoothing = kNan; }},
                  {"label_smoothing", "0 with temperature_on = logprob", "0.100000",
                   [](Call& c) {
                     c.options.label_smoothing = 0.1;
                     c.options.logit.temperature_on = TILELOSS_TEMPERATURE_ON_LOGPROB;
                   }},
                  {"z_loss", ">= 0", "-0.25", [](Call& c) { c.options.z_loss = -0.25; }},
                  {"z_loss", ">= 0", "inf", [](Call& c) { c.options.z_loss = kInf; }},
                  {"num_items", ">= 0", "-1", [](Call& c) { c.options.num_items.value = -1; }},
                  {"num_items", ">= 0", "inf", [](Call& c) { c.options.num_items.value = kInf; }},
                  {"num_items", "none with reduction = sum, only with mean", "a number",
                   [](Call& c) {
                     c.options.reduction = TILELOSS_REDUCTION_SUM;
                     c.options.num_items.value = 7;
                   }},
                  {"reduction", "none|sum|mean", "3", [](Call& c) { c.options.reduction = 3; }}},
                 When::kPlan);
}

// Its own, and when scale, softcap and temperature are divided by one another.
TEST(Validation, OptionsOutsideOfFloat32sRange) {
  const auto logit = [](double scale, double softcap, double temperature) {
    return [=](Call& c) {
      c.options.logit.logit_scale = scale;
      c.options.logit.softcap = softcap;
      c.options.logit.temperature.value = temperature;
    };
  };
  expect_refused({{"temperature", "> 0 within float32's normal range", "1e+39", logit(1, 0, 1e39)},
                  {"temperature", "> 0 within float32's normal range", "1e-39", logit(1, 0, 1e-39)},
                  {"logit_scale", "> 0 within float32's normal range", "1e+39", logit(1e39, 0, 1)},
                  {"softcap", ">= 0 within float32's normal range", "1e+39", logit(1, 1e39, 1)},
                  {"softcap", "softcap / temperature from 1.18e-38 to 8.5e+37", "1e-39 / 1", logit(1, 1e-39, 1)},
                  {"softcap", "logit_scale / softcap from 1.18e-38 to 8.5e+37", "1e-20 / 1e+20", logit(1e-20, 1e20, 1)},
                  {"temperature", "logit_scale / temperature from 1.18e-38 to 8.5e+37", "1e-20 / 1e+20", logit(1e-20, 0, 1e20)},
                  {"temperature", "logit_scale / temperature from 1.18e-38 to 1.7e+07", "1 / 1e-09", logit(1, 30, 1e-9)},
                  {"z_loss", ">= 0 within float32's normal range", "1e+39", [](Call& c) { c.options.z_loss = 1e39; }}},
                 When::kPlan);
}

TEST(Validation, NumbersBehindPointersAreCheckedAtTheCall) {
  const auto behind = [](auto member, float value) {
    return [=](Call& c) {
      c.scalar = value;
      member(c).pointer = &c.scalar;
      member(c).value = 1;
    };
  };
  const auto temperature = [](Call& c) -> tileloss_scalar& { return c.options.logit.temperature; };
  const auto num_items = [](Call& c) -> tileloss_scalar& { return c.options.num_items; };
  expect_refused({{"temperature", "> 0 within float32's", "9.99994610111476e-41", behind(temperature, 1e-40F)},
                  {"temperature", "logit_scale / temperature from", "1 / 1.9999999360571385e+38", behind(temperature, 2e38F)},
                  {"temperature", "> 0", "0", behind(temperature, 0)},
                  {"temperature", "> 0", "-1", behind(temperature, -1)},
                  {"temperature", "> 0", "nan", behind(temperature, std::numeric_limits<float>::quiet_NaN())},
                  {"num_items", ">= 0", "-3", behind(num_items, -3)},
                  {"num_items", ">= 0", "inf", behind(num_items, std::numeric_limits<float>::infinity())}},
                 When::kCall);
}

TEST(Validation, FunctionPassAndStructs) {
  expect_refused({{"function", "one of logprobs, cross_entropy", "cross_entropi", [](Call& c) { c.function = "cross_entropi"; }},
                  {"pass", "0 to 3", "4", [](Call& c) { c.pass = 4; }},
                  {"pass", "0 to 3", "-1", [](Call& c) { c.pass = -1; }},
                  {"pass", "forward or backward: logprobs has no loss", "value_and_grad",
                   [](Call& c) { c.make_logprobs(TILELOSS_VALUE_AND_GRAD); }},
                  {"args.struct_size", "at most", "0", [](Call& c) { c.args().struct_size = 0; }},
                  {"args.struct_size", "at most", "100000", [](Call& c) { c.args().struct_size = 100000; }},
                  {"options.struct_size", "cross_entropy's options", "0", [](Call& c) { c.options.struct_size = 0; }},
                  {"options.struct_size", "cross_entropy's options", "100000", [](Call& c) { c.options.struct_size = 100000; }}},
                 When::kPlan);
  auto plan = init<tileloss_plan>();
  EXPECT_TRUE(names<>({"args", "tileloss_args_init", "null"},
                      tileloss_make_plan("cross_entropy", TILELOSS_FORWARD, nullptr, nullptr, nullptr, nullptr, &plan)));
  EXPECT_TRUE(
      names<>({"function", "one of", "null"}, tileloss_call(nullptr, TILELOSS_FORWARD, nullptr, nullptr, nullptr, nullptr)));
  EXPECT_TRUE(names<>({"args", "tileloss_args_init", "null"}, tileloss_cross_entropy(nullptr, nullptr, nullptr, nullptr)));
}

TEST(Validation, Matrices) {
  const auto logits = [](auto member, auto value) { return [=](Call& c) { c.args().logits.*member = value; }; };
  const auto dlogits = [](auto member, auto value) { return [=](Call& c) { c.args().dlogits.*member = value; }; };
  using M = tileloss_matrix;
  expect_refused({{"logits", "float32, bfloat16 or float16", "none", [](Call& c) { c.args().logits = {}; }},
                  {"logits.dtype", "float32, bfloat16 or float16", "int32", logits(&M::dtype, TILELOSS_INT32)},
                  {"logits.dtype", "float32, bfloat16 or float16", "int64", logits(&M::dtype, TILELOSS_INT64)},
                  {"logits.dtype", "float32, bfloat16 or float16", "uint8", logits(&M::dtype, TILELOSS_UINT8)},
                  {"logits.dtype", "float32, bfloat16 or float16", "an unknown dtype", logits(&M::dtype, 99)},
                  {"logits.device_type", "(cpu)", "1", logits(&M::device_type, TILELOSS_CUDA), TILELOSS_UNSUPPORTED},
                  {"logits.device_index", "0", "3", logits(&M::device_index, 3)},
                  {"logits.rows", ">= 0", "-1", logits(&M::rows, -1)},
                  {"logits.cols", ">= 1", "0", logits(&M::cols, 0)},
                  {"logits.cols", ">= 1", "-5", logits(&M::cols, -5)},
                  {"logits.cols", "< 2^31", "2147483648", logits(&M::cols, std::int64_t{1} << 31)},
                  {"logits.col_stride", "1", "2", logits(&M::col_stride, 2)},
                  {"logits.reserved", "0", "7", logits(&M::reserved, 7)},
                  {"labels.reserved", "0", "7", [](Call& c) { c.args().labels.reserved = 7; }},
                  {"options.logit.reserved", "0", "7", [](Call& c) { c.options.logit.reserved[2] = 7; }},
                  {"logits.row_stride", ">= cols = 10", "9", logits(&M::row_stride, 9)},
                  {"logits.row_stride", ">= cols = 10", "-10", logits(&M::row_stride, -10)},
                  {"logits", "less than 2^63 bytes", "[4,2305843009213693952]", logits(&M::row_stride, kHuge)},
                  {"dlogits", "a matrix like the logits", "none", [](Call& c) { c.args().dlogits = {}; }},
                  {"dlogits.dtype", "the logits', float32", "bfloat16", dlogits(&M::dtype, TILELOSS_BFLOAT16)},
                  {"dlogits.dtype", "float32, bfloat16 or float16", "int32", dlogits(&M::dtype, TILELOSS_INT32)},
                  {"dlogits.device_type", "device, cpu", "1", dlogits(&M::device_type, TILELOSS_CUDA)},
                  {"dlogits.device_index", "first tensor's, 0", "1", dlogits(&M::device_index, 1)},
                  {"dlogits", "the logits' shape [4,10]", "[3,10]", dlogits(&M::rows, 3)},
                  {"dlogits", "the logits' shape [4,10]", "[4,9]", dlogits(&M::cols, 9)},
                  {"dlogits.row_stride", ">= cols = 10", "1", dlogits(&M::row_stride, 1)},
                  {"dlogits.col_stride", "1", "0", dlogits(&M::col_stride, 0)},
                  {"dlogits", "none in a forward", "a matrix", [](Call& c) { c.pass = TILELOSS_FORWARD; }},
                  {"logits", "none with the pass from_row_state", "a tensor",
                   [](Call& c) {
                     const tileloss_matrix m = c.args().logits;
                     c.make_from_row_state();
                     c.args().logits = m;
                   }},
                  {"dlogits", "none with the pass from_row_state", "a tensor",
                   [](Call& c) {
                     const tileloss_matrix m = c.args().dlogits;
                     c.make_from_row_state();
                     c.args().dlogits = m;
                   }}},
                 When::kPlan);
}

TEST(Validation, VectorsOfTheWrongTypeSizeStrideOrPlace) {
  using V = tileloss_vector;
  struct Named {
    const char* name;
    tileloss_vector tileloss_args::*member;
    const char* dtypes;
    const char* size;
    bool is_output;
  };
  const Named vectors[] = {{"labels", &tileloss_args::labels, "int32 or int64", "4", false},
                           {"token_weights", &tileloss_args::token_weights, "float32", "4", false},
                           {"class_weights", &tileloss_args::class_weights, "float32", "10", false},
                           {"loss_grad", &tileloss_args::loss_grad, "float32", "1", false},
                           {"loss", &tileloss_args::loss, "float32", "1", true},
                           {"logp", &tileloss_args::logp, "float32", "4", true},
                           {"lse", &tileloss_args::lse, "float32", "4", true},
                           {"entropy", &tileloss_args::entropy, "float32", "4", true},
                           {"argmax", &tileloss_args::argmax, "int64", "4", true},
                           {"correct", &tileloss_args::correct, "uint8", "4", true},
                           {"log_sum_sq_probs", &tileloss_args::log_sum_sq_probs, "float32", "4", true},
                           {"mean_logit", &tileloss_args::mean_logit, "float32", "4", true}};
  for (const Named& v : vectors) {
    const std::string name = v.name, dtype = name + ".dtype", size = name + ".size", stride = name + ".stride";
    const auto set = [&](auto member, auto value) {
      return [=, vector = v.member](Call& c) {
        if (vector == &tileloss_args::class_weights) {
          static const std::vector<float> weights(10, 1);
          c.args().class_weights = view(weights);
          c.args().mean_logit = {};
        }
        c.args().*vector.*member = value;
      };
    };
    std::vector<Corruption> corruptions = {{dtype, v.dtypes, "bfloat16", set(&V::dtype, TILELOSS_BFLOAT16)},
                                           {dtype, v.dtypes, "an unknown dtype", set(&V::dtype, -3)},
                                           {size, v.size, "3", set(&V::size, 3)},
                                           {size, v.size, "-4", set(&V::size, -4)},
                                           {size, v.size, "0", set(&V::size, 0)},
                                           {stride, ">= 0", "-1", set(&V::stride, -1)},
                                           {name + ".device_type", "device, cpu", "1", set(&V::device_type, TILELOSS_CUDA)}};
    if (v.is_output && std::string(v.size) != "1")
      corruptions.push_back({stride, "not 0 for an output", "0", set(&V::stride, 0)});
    if (std::string(v.size) == "4")
      corruptions.push_back({v.name, "less than 2^63 bytes", "4 * 2305843009213693952", set(&V::stride, kHuge)});
    if (name == "class_weights") corruptions.push_back({stride, "1", "2", set(&V::stride, 2)});
    expect_refused(corruptions, When::kPlan);
  }
  expect_refused({{"labels", "an int32 or int64 vector of size 4", "none", [](Call& c) { c.args().labels = {}; }},
                  {"loss.size", "4", "1",
                   [](Call& c) {
                     c.options.reduction = TILELOSS_REDUCTION_NONE;
                     c.args().loss_grad = {};
                   }}},
                 When::kPlan);
}

TEST(Validation, TensorsThatTheFunctionDoesNotTake) {
  const auto upstream = [](tileloss_vector tileloss_args::*member) {
    return [=](Call& c) { c.args().*member = c.args().token_weights; };
  };
  const auto of_logprobs = [](tileloss_vector tileloss_args::*member, std::int64_t size) {
    return [=](Call& c) {
      const tileloss_vector v = tileloss_make_vector(c.args().lse.data, TILELOSS_FLOAT32, size);
      c.make_logprobs(TILELOSS_BACKWARD);
      c.args().*member = v;
    };
  };
  expect_refused({{"logp_grad", "cross_entropy does not take it", "a vector", upstream(&tileloss_args::logp_grad)},
                  {"lse_grad", "cross_entropy does not take it", "a vector", upstream(&tileloss_args::lse_grad)},
                  {"entropy_grad", "cross_entropy does not take it", "a vector", upstream(&tileloss_args::entropy_grad)},
                  {"token_weights", "logprobs does not take it", "a vector", of_logprobs(&tileloss_args::token_weights, 4)},
                  {"class_weights", "logprobs does not take it", "a vector", of_logprobs(&tileloss_args::class_weights, 10)},
                  {"loss_grad", "logprobs does not take it", "a vector", of_logprobs(&tileloss_args::loss_grad, 1)},
                  {"loss", "logprobs does not take it", "a vector", of_logprobs(&tileloss_args::loss, 1)},
                  {"mean_logit", "none together with class_weights", "a vector",
                   [](Call& c) { c.args().class_weights = tileloss_make_vector(c.args().logits.data, TILELOSS_FLOAT32, 10); }}},
                 When::kPlan);
}

}  // namespace
}  // namespace tileloss::test
