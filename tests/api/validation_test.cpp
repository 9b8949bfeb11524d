// Every argument error names the argument, what was expected and what was given, and nothing has been written. One line per
// branch of src/api's checks; the spoilt calls are otherwise valid.
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <limits>

#include "tests/api/calls.h"

namespace tileloss::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInf = std::numeric_limits<double>::infinity();
constexpr std::int64_t kHuge = std::int64_t{1} << 61;

// A valid call, to be spoilt. Rows 4, columns 10.
struct Call {
  LogitsCase data;
  std::string function = "cross_entropy";
  tileloss_pass pass = TILELOSS_VALUE_AND_GRAD;
  tileloss_cross_entropy_options options = cross_entropy_options();
  tileloss_logprobs_options logprobs = logprobs_options();
  RowStateArrays state{4};
  float scalar = 0;

  explicit Call(const LogitsCaseSpec& spec) : data(spec) {}
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
    args().row_state = state.get();
    options.logit.vocab_total = 10;
  }
};

LogitsCaseSpec all_tensors() {
  return {.rows = 4, .vocab = 10, .token_weights = true, .loss_grad = Upstream::kScalar, .extra_outputs = true};
}

struct Spoiler {
  const char* argument;  // the message starts with it ...
  const char* wanted;    // ... then "expected" and something that holds this ...
  const char* given;     // ... then "got" and this
  std::function<void(Call&)> spoil;
  tileloss_status status = TILELOSS_INVALID_ARGUMENT;
};

// Only at the call, as planning touches no data.
enum class When { kPlan, kCall };

testing::AssertionResult names(const Spoiler& s, tileloss_status status) {
  const std::string message = tileloss_last_error(), start = std::string(s.argument) + ": expected ";
  const std::size_t got = message.rfind(", got ");
  const bool right = status == s.status && message.rfind(start, 0) == 0 && got != std::string::npos &&
                     message.substr(0, got).find(s.wanted) != std::string::npos && message.substr(got + 6) == s.given;
  if (right) return testing::AssertionSuccess();
  return testing::AssertionFailure() << tileloss_status_name(status) << " \"" << message << "\", not \"" << start << "..."
                                     << s.wanted << "..., got " << s.given << "\"";
}

void expect_refused(const std::vector<Spoiler>& spoilers, When when) {
  for (const Spoiler& s : spoilers) {
    Call call(all_tensors());
    const auto outputs = outputs_of(call.args());
    const tileloss_args original = call.args();
    s.spoil(call);
    tileloss_plan plan;
    tileloss_plan_init(&plan);
    const tileloss_status planned =
        tileloss_make_plan(call.function.c_str(), call.pass, &call.args(), call.given_options(), nullptr, nullptr, &plan);
    if (when == When::kPlan) {
      EXPECT_TRUE(names(s, planned));
      EXPECT_EQ(plan.workspace_bytes, 0) << s.argument;
    } else {
      EXPECT_EQ(planned, TILELOSS_OK) << s.argument << ": " << tileloss_last_error();
    }
    EXPECT_TRUE(names(s, tileloss_call(call.function.c_str(), call.pass, &call.args(), call.given_options(), nullptr, nullptr)));
    EXPECT_TRUE(same_bits(outputs_of(original), outputs)) << s.argument;
  }
}

TEST(Validation, TheCallsThatTheTestsSpoilAreValid) {
  Call call(all_tensors());
  EXPECT_TRUE(succeeds(tileloss_call("cross_entropy", call.pass, &call.args(), &call.options, nullptr, nullptr)));
  call.make_forward();
  EXPECT_TRUE(succeeds(tileloss_call("cross_entropy", call.pass, &call.args(), &call.options, nullptr, nullptr)));
  call.make_from_row_state();
  EXPECT_TRUE(succeeds(tileloss_call("cross_entropy", call.pass, &call.args(), &call.options, nullptr, nullptr)));
  for (const tileloss_pass pass : {TILELOSS_FORWARD, TILELOSS_BACKWARD}) {
    Call logprobs(all_tensors());
    logprobs.make_logprobs(pass);
    EXPECT_TRUE(succeeds(tileloss_call("logprobs", pass, &logprobs.args(), &logprobs.logprobs, nullptr, nullptr)));
  }
}

TEST(Validation, OptionsOutsideTheirRange) {
  auto& refused = expect_refused;
  const auto logit = [](auto member, auto value) { return [=](Call& c) { c.options.logit.*member = value; }; };
  using Logit = tileloss_logit_options;
  refused({{"logit_scale", "> 0", "0", logit(&Logit::logit_scale, 0.0)},
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
           {"reduction", "none|sum|mean", "3", [](Call& c) { c.options.reduction = 3; }}},
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
  expect_refused({{"temperature", "> 0", "0", behind(temperature, 0)},
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
  tileloss_plan plan;
  tileloss_plan_init(&plan);
  EXPECT_TRUE(names({"args", "tileloss_args_init", "null", {}},
                    tileloss_make_plan("cross_entropy", TILELOSS_FORWARD, nullptr, nullptr, nullptr, nullptr, &plan)));
  EXPECT_TRUE(
      names({"function", "one of", "null", {}}, tileloss_call(nullptr, TILELOSS_FORWARD, nullptr, nullptr, nullptr, nullptr)));
  EXPECT_TRUE(names({"args", "tileloss_args_init", "null", {}}, tileloss_cross_entropy(nullptr, nullptr, nullptr, nullptr)));
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
                  {"logits.device_type", "the CPU", "1", logits(&M::device_type, TILELOSS_CUDA), TILELOSS_UNSUPPORTED},
                  {"logits.rows", ">= 0", "-1", logits(&M::rows, -1)},
                  {"logits.cols", ">= 1", "0", logits(&M::cols, 0)},
                  {"logits.cols", ">= 1", "-5", logits(&M::cols, -5)},
                  {"logits.cols", "< 2^31", "2147483648", logits(&M::cols, std::int64_t{1} << 31)},
                  {"logits.col_stride", "1", "2", logits(&M::col_stride, 2)},
                  {"logits.row_stride", ">= cols = 10", "9", logits(&M::row_stride, 9)},
                  {"logits.row_stride", ">= cols = 10", "-10", logits(&M::row_stride, -10)},
                  {"logits", "less than 2^63 bytes", "[4,2305843009213693952]", logits(&M::row_stride, kHuge)},
                  {"dlogits", "a matrix like the logits", "none", [](Call& c) { c.args().dlogits = {}; }},
                  {"dlogits.dtype", "the logits', float32", "bfloat16", dlogits(&M::dtype, TILELOSS_BFLOAT16)},
                  {"dlogits.dtype", "float32, bfloat16 or float16", "int32", dlogits(&M::dtype, TILELOSS_INT32)},
                  {"dlogits.device_type", "the CPU", "1", dlogits(&M::device_type, TILELOSS_CUDA), TILELOSS_UNSUPPORTED},
                  {"dlogits", "the logits' shape [4,10]", "[3,10]", dlogits(&M::rows, 3)},
                  {"dlogits", "the logits' shape [4,10]", "[4,9]", dlogits(&M::cols, 9)},
                  {"dlogits.row_stride", ">= cols = 10", "1", dlogits(&M::row_stride, 1)},
                  {"dlogits.col_stride", "1", "0", dlogits(&M::col_stride, 0)},
                  {"dlogits", "none in a forward", "a matrix", [](Call& c) { c.pass = TILELOSS_FORWARD; }},
                  {"logits", "none with the pass from_row_state", "a matrix",
                   [](Call& c) {
                     const tileloss_matrix m = c.args().logits;
                     c.make_from_row_state();
                     c.args().logits = m;
                   }},
                  {"dlogits", "none with the pass from_row_state", "a matrix",
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
    const std::string name = v.name, dtype = name + ".dtype", size = name + ".size", stride = name + ".stride",
                      device = name + ".device_type";
    const auto set = [&](auto member, auto value) {
      return [=, vector = v.member](Call& c) {
        if (vector == &tileloss_args::class_weights) {
          static const float kWeights[10] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
          c.args().class_weights = tileloss_make_vector(kWeights, TILELOSS_FLOAT32, 10);
          c.args().mean_logit = {};
        }
        c.args().*vector.*member = value;
      };
    };
    std::vector<Spoiler> spoilers = {{dtype.c_str(), v.dtypes, "bfloat16", set(&V::dtype, TILELOSS_BFLOAT16)},
                                     {dtype.c_str(), v.dtypes, "an unknown dtype", set(&V::dtype, -3)},
                                     {size.c_str(), v.size, "3", set(&V::size, 3)},
                                     {size.c_str(), v.size, "-4", set(&V::size, -4)},
                                     {size.c_str(), v.size, "0", set(&V::size, 0)},
                                     {stride.c_str(), ">= 0", "-1", set(&V::stride, -1)},
                                     {device.c_str(), "CPU", "1", set(&V::device_type, TILELOSS_CUDA)}};
    if (v.is_output && std::string(v.size) != "1")
      spoilers.push_back({stride.c_str(), "not 0 for an output", "0", set(&V::stride, 0)});
    if (std::string(v.size) == "4")
      spoilers.push_back({v.name, "less than 2^63 bytes", "4 * 2305843009213693952", set(&V::stride, kHuge)});
    if (name == "class_weights") spoilers.push_back({stride.c_str(), "1", "2", set(&V::stride, 2)});
    expect_refused(spoilers, When::kPlan);
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

TEST(Validation, RowStates) {
  const auto with_state = [](auto change) {
    return [=](Call& c) {
      c.pass = TILELOSS_BACKWARD;
      c.args().row_state = c.state.get();
      change(c);
    };
  };
  const auto from_state = [](auto change) {
    return [=](Call& c) {
      c.make_from_row_state();
      change(c);
    };
  };
  const auto null = [](auto member) { return [=](Call& c) { c.args().row_state.*member = nullptr; }; };
  using S = tileloss_row_state;
  expect_refused(
      {{"row_state.rows", "4", "3", with_state([](Call& c) { c.args().row_state.rows = 3; })},
       {"row_state.device_type", "CPU", "1", with_state([](Call& c) { c.args().row_state.device_type = TILELOSS_CUDA; })},
       {"row_state", "max, sum and target", "a null array", with_state(null(&S::max))},
       {"row_state", "max, sum and target", "a null array", with_state(null(&S::sum))},
       {"row_state", "max, sum and target", "a null array", with_state(null(&S::target))},
       {"row_state.entropy_sum", "a forward filled", "null",
        [](Call& c) {
          const tileloss_vector upstream = c.args().token_weights;
          c.make_logprobs(TILELOSS_BACKWARD);
          c.args().entropy_grad = upstream;
          c.args().row_state = c.state.get();
          c.args().row_state.entropy_sum = nullptr;
        }},
       {"row_state", "the merged state", "none", from_state([](Call& c) { c.args().row_state = {}; })},
       {"row_state.entropy_sum", "a forward filled", "null", from_state(null(&S::entropy_sum))},
       {"row_state", "collision_sum", "a null array", from_state(null(&S::collision_sum))},
       {"row_state", "smoothing_sum", "a null array", from_state(null(&S::smoothing_sum))},
       {"row_state", "argmax", "a null array", from_state(null(&S::argmax))},
       {"row_state", "max, sum and target", "a null array", from_state(null(&S::sum))},
       {"vocab_total", "the number of classes", "-1", from_state([](Call& c) { c.options.logit.vocab_total = -1; })},
       {"labels.size", ">= 0", "-4", from_state([](Call& c) {
          for (tileloss_vector* v : {&c.args().labels, &c.args().token_weights, &c.args().logp, &c.args().lse, &c.args().entropy,
                                     &c.args().argmax, &c.args().correct, &c.args().log_sum_sq_probs, &c.args().mean_logit}) {
            v->size = -4;
          }
          c.args().row_state.rows = -4;
        })}},
      When::kPlan);
}

TEST(Validation, AShardAloneGivesOnlyItsRowState) {
  const auto shard = [](auto change) {
    return [=](Call& c) {
      c.options.logit.vocab_total = 30;
      c.options.logit.vocab_start = 10;
      c.args().row_state = c.state.get();
      const tileloss_args all = c.args();
      for (tileloss_vector* v : {&c.args().loss, &c.args().logp, &c.args().lse, &c.args().entropy, &c.args().argmax,
                                 &c.args().correct, &c.args().log_sum_sq_probs, &c.args().mean_logit}) {
        *v = {};
      }
      change(c, all);
    };
  };
  std::vector<Spoiler> spoilers = {{"vocab_total", "a shard alone", "30", shard([](Call&, const tileloss_args&) {})}};
  for (const auto member :
       {&tileloss_args::loss, &tileloss_args::logp, &tileloss_args::lse, &tileloss_args::entropy, &tileloss_args::argmax,
        &tileloss_args::correct, &tileloss_args::log_sum_sq_probs, &tileloss_args::mean_logit}) {
    spoilers.push_back({"vocab_total", "a shard alone", "30", shard([=](Call& c, const tileloss_args& all) {
                          c.make_forward();
                          c.args().*member = all.*member;
                        })});
  }
  expect_refused(spoilers, When::kPlan);
}

TEST(Validation, DataPointers) {
  std::vector<Spoiler> spoilers = {{"logits.data", "a pointer", "null", [](Call& c) { c.args().logits.data = nullptr; }},
                                   {"dlogits.data", "a pointer", "null", [](Call& c) { c.args().dlogits.data = nullptr; }}};
  const std::pair<const char*, tileloss_vector tileloss_args::*> vectors[] = {
      {"labels.data", &tileloss_args::labels},
      {"token_weights.data", &tileloss_args::token_weights},
      {"loss_grad.data", &tileloss_args::loss_grad},
      {"loss.data", &tileloss_args::loss},
      {"logp.data", &tileloss_args::logp},
      {"lse.data", &tileloss_args::lse},
      {"entropy.data", &tileloss_args::entropy},
      {"argmax.data", &tileloss_args::argmax},
      {"correct.data", &tileloss_args::correct},
      {"log_sum_sq_probs.data", &tileloss_args::log_sum_sq_probs},
      {"mean_logit.data", &tileloss_args::mean_logit}};
  for (const auto& [name, member] : vectors) {
    spoilers.push_back({name, "a pointer", "null", [vector = member](Call& c) { (c.args().*vector).data = nullptr; }});
  }
  spoilers.push_back({"class_weights.data", "a pointer", "null", [](Call& c) {
                        c.args().mean_logit = {};
                        c.args().class_weights = tileloss_make_vector(nullptr, TILELOSS_FLOAT32, 10);
                      }});
  for (const auto& [name, member] : {std::pair{"logp_grad.data", &tileloss_args::logp_grad},
                                     {"lse_grad.data", &tileloss_args::lse_grad},
                                     {"entropy_grad.data", &tileloss_args::entropy_grad}}) {
    spoilers.push_back({name, "a pointer", "null", [vector = member](Call& c) {
                          c.make_logprobs(TILELOSS_BACKWARD);
                          c.args().*vector = tileloss_make_vector(nullptr, TILELOSS_FLOAT32, 4);
                        }});
  }
  expect_refused(spoilers, When::kCall);
}

TEST(Validation, GradientsThatOverlapTheLogits) {
  const auto moved = [](std::int64_t elements) {
    return [=](Call& c) { c.args().dlogits.data = static_cast<float*>(c.args().logits.data) + elements; };
  };
  expect_refused({{"dlogits.data", "a buffer apart from them", "one that overlaps them", moved(1)},
                  {"dlogits.data", "a buffer apart from them", "one that overlaps them", moved(-1)},
                  {"dlogits.data", "a buffer apart from them", "one that overlaps them", moved(39)},
                  {"dlogits.data", "a buffer apart from them", "one that overlaps them", moved(-39)},
                  {"dlogits.row_stride", "the logits', 10, when it is written over them", "11",
                   [](Call& c) {
                     c.args().dlogits.data = c.args().logits.data;
                     c.args().dlogits.row_stride = 11;
                   }}},
                 When::kCall);
}

TEST(Validation, RowStateFunctions) {
  RowStateArrays a(3), b(3), c(2);
  EXPECT_TRUE(names({"into", "tileloss_row_state_init", "null", {}}, tileloss_row_state_merge(nullptr, &b.get())));
  EXPECT_TRUE(names({"from", "tileloss_row_state_init", "null", {}}, tileloss_row_state_merge(&a.get(), nullptr)));
  EXPECT_TRUE(names({"state", "tileloss_row_state_init", "null", {}}, tileloss_row_state_set_identity(nullptr)));
  EXPECT_TRUE(names({"from.rows", "3", "2", {}}, tileloss_row_state_merge(&a.get(), &c.get())));
  tileloss_row_state odd = b.get();
  odd.struct_size = 1;
  EXPECT_TRUE(names({"from", "tileloss_row_state_init", "another size", {}}, tileloss_row_state_merge(&a.get(), &odd)));
  odd = b.get();
  odd.rows = -1;
  EXPECT_TRUE(names({"from.rows", ">= 0", "-1", {}}, tileloss_row_state_merge(&a.get(), &odd)));
  odd = b.get();
  odd.sum = nullptr;
  EXPECT_TRUE(names({"from", "max, sum and target", "a null one", {}}, tileloss_row_state_merge(&a.get(), &odd)));
  odd = b.get();
  odd.device_type = TILELOSS_CUDA;
  EXPECT_TRUE(names({"state.device_type", "the CPU", "1", {}}, tileloss_row_state_set_identity(&odd)));
}

TEST(Validation, Introspection) {
  tileloss_function_info info;
  info.struct_size = sizeof info;
  EXPECT_TRUE(names({"index", "0 to", "-1", {}}, tileloss_get_function_info(-1, &info)));
  EXPECT_EQ(tileloss_get_function_info(tileloss_function_count(), &info), TILELOSS_INVALID_ARGUMENT);
  EXPECT_TRUE(names({"info", "struct_size", "another", {}}, tileloss_get_function_info(0, nullptr)));
  info.struct_size = 3;
  EXPECT_TRUE(names({"info", "struct_size", "another", {}}, tileloss_get_function_info(0, &info)));
  tileloss_cross_entropy_options options;
  EXPECT_TRUE(names({"function", "registered", "nothing", {}}, tileloss_options_init("nothing", &options)));
  EXPECT_TRUE(names({"function", "registered", "null", {}}, tileloss_options_init(nullptr, &options)));
  EXPECT_TRUE(names({"options", "a pointer", "null", {}}, tileloss_options_init("cross_entropy", nullptr)));
}

TEST(Validation, NamesOfStatusesIsasAndSchedules) {
  const char* const statuses[] = {
      "ok",      "invalid_argument", "label_out_of_range", "out_of_memory", "workspace_too_small", "unsupported", "plan_mismatch",
      "internal"};
  for (std::int32_t i = 0; i < 8; ++i) EXPECT_STREQ(tileloss_status_name(i), statuses[i]);
  EXPECT_STREQ(tileloss_status_name(99), "unknown");
  EXPECT_STREQ(tileloss_isa_name(TILELOSS_ISA_AVX512), "avx512");
  EXPECT_STREQ(tileloss_isa_name(77), "unknown");
  EXPECT_EQ(tileloss_isa_supported(TILELOSS_ISA_BASELINE), 1);
  EXPECT_EQ(tileloss_isa_supported(77), 0);
  EXPECT_STREQ(tileloss_schedule_name(TILELOSS_SCHEDULE_RECOMPUTE), "recompute");
  EXPECT_STREQ(tileloss_schedule_name(-1), "unknown");
  EXPECT_STREQ(tileloss_version(), TILELOSS_VERSION_STRING);
}

}  // namespace
}  // namespace tileloss::test
