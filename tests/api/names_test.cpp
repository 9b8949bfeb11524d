// The functions with types, in C and in C++: each is the generic call with its own name and pass.
// On toy: TypedNames.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <vector>

#include "tests/api/calls.h"

namespace tileloss::test {
namespace {

// 4 tokens in 2 sequences, 5 classes, hidden sizes 3 and 2.
struct Tensors {
  std::vector<float> logits = {1, -1, 0.5F, 0, 2, 0.25F, 0.5F, 0.5F, -2, 1, 0, 1, 0, -1, 0.5F, 2, 0, -0.5F, 1, 0};
  std::vector<float> teacher = {0, 1, 2, 0.5F, -1, 1, 0, 0.5F, 1, -1, 0.5F, 0, 1, 0, 2, -1, 0, 0.5F, 1, 1};
  std::vector<float> probs = {0.2F, 0.3F, 0.5F, 0, 0, 0, 0, 0, 0.25F, 0.75F, 1, 0, 0, 0, 0, 0, 0.5F, 0.5F, 0, 0};
  std::vector<float> logprobs = {-0.5F, -1.5F, -1, -0.7F, -2, -0.5F, -1, -1};
  std::vector<std::int64_t> ids = {4, 1, 0, 2, 1, 3, 2, 4}, labels = {0, 4, 2, 1};
  std::vector<float> hidden = {1, -1, 0.5F, 0, 2, 1, -1, 0.25F, 0, 0.5F, 0.5F, -2}, teacher_hidden = {1, 2, -1, 0.5F, 0, 1, 2, 0};
  std::vector<float> head = {0.1F, 0.2F, -0.3F, 1, 0, -1, 0.5F, 0.5F, 0.5F, -1, 1, 0, 0.3F, -0.2F, 0.9F};
  std::vector<float> teacher_head = {0.1F, 0.7F, -0.3F, 1, 0, -1, 0.5F, 0.5F, 0.5F, -1};
  std::vector<float> advantages = {1, -0.5F}, logp_grad = {1, 2, 3, 4};
  std::vector<float> loss = std::vector<float>(1), logp = std::vector<float>(4), gradient = std::vector<float>(20),
                     dhead = std::vector<float>(15);
  RowState state{4};

  Tensors() {
    for (std::size_t i = 0; i < 4; ++i) {
      state.c()->max[i] = state.c()->label_logit[i] = 1.5F;  // logp = -log(1 + i)
      state.c()->sum[i] = static_cast<float>(i);
    }
  }
  std::vector<float> outputs() const {
    std::vector<float> all;
    for (const std::vector<float>* v : {&loss, &logp, &gradient, &dhead}) all.insert(all.end(), v->begin(), v->end());
    return all;
  }
  LinearHead linear_head(bool has_gradient) {
    LinearHead h{.hidden = Matrix(hidden, 4, 3), .head = Matrix(head, 5, 3)};
    if (has_gradient) {
      h.dhidden = Matrix(gradient, 4, 3);
      h.dhead = Matrix(dhead, 5, 3);
    }
    return h;
  }
  TeacherHead teachers() const { return {.hidden = Matrix(teacher_hidden, 4, 2), .head = Matrix(teacher_head, 5, 2)}; }
};

// What a loss's Args take, of those tensors.
template <class Args>
Args args_of(Tensors& t, tileloss_pass pass, bool is_linear) {
  Args args;
  args.labels = t.labels;
  if (pass == TILELOSS_FROM_ROW_STATE) args.row_state = t.state.c();
  if (pass != TILELOSS_BACKWARD) args.logp = t.logp;
  if constexpr (requires { args.loss; }) args.loss = t.loss;
  if constexpr (requires { args.logp_grad; }) {
    if (pass == TILELOSS_BACKWARD) args.logp_grad = t.logp_grad;
  }
  if constexpr (requires { args.advantages; }) {
    args.advantages = t.advantages;
    args.sequence_length = 2;
  }
  if constexpr (requires { args.target_probs; }) args.target_probs = Matrix(t.probs, 4, 5);
  if constexpr (requires { args.teacher_ids; }) {
    args.teacher_ids = Matrix(t.ids, 4, 2);
    args.teacher_logprobs = Matrix(t.logprobs, 4, 2);
  }
  if (is_linear || pass == TILELOSS_FROM_ROW_STATE) return args;
  args.logits = Matrix(t.logits, 4, 5);
  if constexpr (requires { args.teacher_logits; }) args.teacher_logits = Matrix(t.teacher, 4, 5);
  if (pass != TILELOSS_FORWARD) args.dlogits = Matrix(t.gradient, 4, 5);
  return args;
}

// Not the defaults, where an option is easily had.
template <class Options>
Options options_of(tileloss_pass pass) {
  Options options;
  if constexpr (requires { options.label_smoothing; }) options.label_smoothing = pass == TILELOSS_FROM_ROW_STATE ? 0 : 0.1;
  if constexpr (requires { options.divergence; }) options.divergence = TILELOSS_REVERSE_KL;
  if constexpr (requires { options.tail; }) options.tail = TILELOSS_TAIL_RENORMALISE;
  if constexpr (requires { options.kl_estimator; }) options.ratio_level = TILELOSS_LEVEL_SEQUENCE;
  if (pass == TILELOSS_FROM_ROW_STATE) options.logit.vocab_total = 10;
  return options;
}

// The same through the generic call, the C name and the C++ name, called with `args...` and the options.
template <class Options, class Cpp, class... Args>
void expect_same(Tensors& t, const char* name, tileloss_pass pass, const tileloss_args& c_args,
                 tileloss_status (*c)(const tileloss_args*, const Options*, const tileloss_plan*, const tileloss_run*), Cpp cpp,
                 const Args&... args) {
  const auto options = options_of<Options>(pass);
  const auto run = [&](auto&& call) {
    for (std::vector<float>* v : {&t.loss, &t.logp, &t.gradient, &t.dhead}) v->assign(v->size(), -7);
    call();
    return t.outputs();
  };
  const auto generic =
      run([&] { EXPECT_TRUE(succeeds(tileloss_call(name, pass, &c_args, &options, nullptr, nullptr))) << name; });
  EXPECT_NE(generic, std::vector<float>(generic.size(), -7)) << name << pass;
  EXPECT_EQ(run([&] { EXPECT_TRUE(succeeds(c(&c_args, &options, nullptr, nullptr))); }), generic) << name << pass;
  EXPECT_EQ(run([&] { EXPECT_TRUE(cpp(args..., options, RunOptions{})); }), generic) << name << pass;
  if (pass == TILELOSS_FROM_ROW_STATE) {
    EXPECT_EQ(t.logp[0], 0) << name;
    EXPECT_NEAR(t.logp[3], -std::log(4.0), 1e-6) << name;
  }
}

// From logits, with the LM head, and with two of them.
template <class Args, class Options, class C>
void check(const char* name, tileloss_pass pass, C c, Status (*cpp)(const Args&, const Options&, const RunOptions&) noexcept) {
  Tensors t;
  const auto args = args_of<Args>(t, pass, false);
  expect_same(t, name, pass, args.c(), c, cpp, args);
}
template <class Args, class Options, class C>
void check(const char* name, tileloss_pass pass, C c,
           Status (*cpp)(const LinearHead&, const Args&, const Options&, const RunOptions&) noexcept) {
  Tensors t;
  const auto args = args_of<Args>(t, pass, true);
  const LinearHead head = pass == TILELOSS_FROM_ROW_STATE ? LinearHead{} : t.linear_head(pass != TILELOSS_FORWARD);
  expect_same(t, name, pass, head.c(args), c, cpp, head, args);
}
template <class Args, class Options, class C>
void check(const char* name, tileloss_pass pass, C c,
           Status (*cpp)(const LinearHead&, const TeacherHead&, const Args&, const Options&, const RunOptions&) noexcept) {
  Tensors t;
  const auto args = args_of<Args>(t, pass, true);
  const LinearHead head = t.linear_head(pass != TILELOSS_FORWARD);
  expect_same(t, name, pass, t.teachers().c(head, args), c, cpp, head, t.teachers(), args);
}

constexpr tileloss_pass kForward = TILELOSS_FORWARD, kBackward = TILELOSS_BACKWARD, kBoth = TILELOSS_VALUE_AND_GRAD,
                        kFromState = TILELOSS_FROM_ROW_STATE;

TEST(TypedNames, OfLogprobs) {
  check("logprobs", kForward, tileloss_logprobs, logprobs);
  check("logprobs", kBackward, tileloss_logprobs_backward, logprobs_backward);
  check("logprobs", kFromState, tileloss_logprobs_from_row_state, logprobs_from_row_state);
  check("linear_logprobs", kForward, tileloss_linear_logprobs, linear_logprobs);
  check("linear_logprobs", kBackward, tileloss_linear_logprobs_backward, linear_logprobs_backward);
  check("linear_logprobs", kFromState, tileloss_linear_logprobs_from_row_state, linear_logprobs_from_row_state);
}

TEST(TypedNames, OfCrossEntropy) {
  check("cross_entropy", kForward, tileloss_cross_entropy, cross_entropy);
  check("cross_entropy", kBackward, tileloss_cross_entropy_backward, cross_entropy_backward);
  check("cross_entropy", kBoth, tileloss_cross_entropy_value_and_grad, cross_entropy_value_and_grad);
  check("cross_entropy", kFromState, tileloss_cross_entropy_from_row_state, cross_entropy_from_row_state);
  check("linear_cross_entropy", kForward, tileloss_linear_cross_entropy, linear_cross_entropy);
  check("linear_cross_entropy", kBackward, tileloss_linear_cross_entropy_backward, linear_cross_entropy_backward);
  check("linear_cross_entropy", kBoth, tileloss_linear_cross_entropy_value_and_grad, linear_cross_entropy_value_and_grad);
  check("linear_cross_entropy", kFromState, tileloss_linear_cross_entropy_from_row_state, linear_cross_entropy_from_row_state);
}

TEST(TypedNames, OfPolicyLoss) {
  check("policy_loss", kForward, tileloss_policy_loss, policy_loss);
  check("policy_loss", kBackward, tileloss_policy_loss_backward, policy_loss_backward);
  check("policy_loss", kBoth, tileloss_policy_loss_value_and_grad, policy_loss_value_and_grad);
  check("policy_loss", kFromState, tileloss_policy_loss_from_row_state, policy_loss_from_row_state);
  check("linear_policy_loss", kForward, tileloss_linear_policy_loss, linear_policy_loss);
  check("linear_policy_loss", kBackward, tileloss_linear_policy_loss_backward, linear_policy_loss_backward);
  check("linear_policy_loss", kBoth, tileloss_linear_policy_loss_value_and_grad, linear_policy_loss_value_and_grad);
  check("linear_policy_loss", kFromState, tileloss_linear_policy_loss_from_row_state, linear_policy_loss_from_row_state);
}

TEST(TypedNames, OfDistillation) {
  check("distillation", kForward, tileloss_distillation, distillation);
  check("distillation", kBackward, tileloss_distillation_backward, distillation_backward);
  check("distillation", kBoth, tileloss_distillation_value_and_grad, distillation_value_and_grad);
  check("linear_distillation", kForward, tileloss_linear_distillation, linear_distillation);
  check("linear_distillation", kBackward, tileloss_linear_distillation_backward, linear_distillation_backward);
  check("linear_distillation", kBoth, tileloss_linear_distillation_value_and_grad, linear_distillation_value_and_grad);
}

TEST(TypedNames, OfSoftCrossEntropy) {
  check("soft_cross_entropy", kForward, tileloss_soft_cross_entropy, soft_cross_entropy);
  check("soft_cross_entropy", kBackward, tileloss_soft_cross_entropy_backward, soft_cross_entropy_backward);
  check("soft_cross_entropy", kBoth, tileloss_soft_cross_entropy_value_and_grad, soft_cross_entropy_value_and_grad);
  check("linear_soft_cross_entropy", kForward, tileloss_linear_soft_cross_entropy, linear_soft_cross_entropy);
  check("linear_soft_cross_entropy", kBackward, tileloss_linear_soft_cross_entropy_backward, linear_soft_cross_entropy_backward);
  check("linear_soft_cross_entropy", kBoth, tileloss_linear_soft_cross_entropy_value_and_grad,
        linear_soft_cross_entropy_value_and_grad);
}

TEST(TypedNames, OfSparseDistillation) {
  check("sparse_distillation", kForward, tileloss_sparse_distillation, sparse_distillation);
  check("sparse_distillation", kBackward, tileloss_sparse_distillation_backward, sparse_distillation_backward);
  check("sparse_distillation", kBoth, tileloss_sparse_distillation_value_and_grad, sparse_distillation_value_and_grad);
  check("linear_sparse_distillation", kForward, tileloss_linear_sparse_distillation, linear_sparse_distillation);
  check("linear_sparse_distillation", kBackward, tileloss_linear_sparse_distillation_backward,
        linear_sparse_distillation_backward);
  check("linear_sparse_distillation", kBoth, tileloss_linear_sparse_distillation_value_and_grad,
        linear_sparse_distillation_value_and_grad);
}

template <class Args>
void expect_plans(const char* name, const char* linear_name) {
  Tensors t;
  const PlanResult planned = plan(Pass::kForward, args_of<Args>(t, kForward, false));
  EXPECT_TRUE(planned.status) << planned.status.message();
  EXPECT_EQ(planned.plan.function(), name);
  const PlanResult linear = linear_plan(Pass::kForward, t.linear_head(false), args_of<Args>(t, kForward, true));
  EXPECT_TRUE(linear.status) << linear.status.message();
  EXPECT_EQ(linear.plan.function(), linear_name);
}

TEST(TypedNames, OfPlans) {
  expect_plans<LogprobsArgs>("logprobs", "linear_logprobs");
  expect_plans<CrossEntropyArgs>("cross_entropy", "linear_cross_entropy");
  expect_plans<PolicyLossArgs>("policy_loss", "linear_policy_loss");
  expect_plans<SoftCrossEntropyArgs>("soft_cross_entropy", "linear_soft_cross_entropy");
  expect_plans<SparseDistillationArgs>("sparse_distillation", "linear_sparse_distillation");
  Tensors t;
  EXPECT_TRUE(plan(Pass::kForward, args_of<DistillationArgs>(t, kForward, false)).status);
  EXPECT_TRUE(
      linear_plan(Pass::kForward, t.linear_head(false), t.teachers(), args_of<DistillationArgs>(t, kForward, true)).status);
}

TEST(CppPreset, SetsTheOptionsOfItsName) {
  PolicyLossOptions options;
  EXPECT_TRUE(set_preset(options, "gspo"));
  EXPECT_EQ(options.ratio_level, TILELOSS_LEVEL_SEQUENCE);
}

TEST(CppHead, ABiasMayBeFloatOrSixteenBits) {
  Tensors t;
  const std::vector<float> bias = {1, -2, 0.5F, 0, -1};
  const std::vector<BFloat16> bias16 = {{0x3F80}, {0xC000}, {0x3F00}, {0x0000}, {0xBF80}};
  const CrossEntropyArgs args{.labels = t.labels, .loss = t.loss};
  std::vector<float> dbias(5);
  std::vector<BFloat16> dbias16(5);
  LinearHead head = t.linear_head(false);
  head.bias = bias;
  head.dbias = dbias;
  ASSERT_TRUE(linear_cross_entropy_value_and_grad(head, args));
  const float loss = t.loss[0];
  head.bias = bias16;
  head.dbias = dbias16;
  ASSERT_TRUE(linear_cross_entropy_value_and_grad(head, args));
  EXPECT_EQ(t.loss[0], loss);
  for (std::size_t v = 0; v < 5; ++v) {
    const std::uint32_t bits = std::uint32_t{dbias16[v].bits} << 16;
    EXPECT_NEAR(std::bit_cast<float>(bits), dbias[v], 0x1p-8F * std::abs(dbias[v])) << v;
    EXPECT_NE(dbias[v], 0.0F);
  }
}

TEST(CppHead, APlanAndARowStateServeIt) {
  Tensors t;
  const CrossEntropyArgs args{.labels = t.labels, .loss = t.loss};
  const PlanResult planned = linear_plan(Pass::kValueAndGrad, t.linear_head(true), args);
  ASSERT_TRUE(planned.status);
  EXPECT_TRUE(linear_cross_entropy_value_and_grad(t.linear_head(true), args, {}, {.plan = &planned.plan}));
  const float loss = t.loss[0];
  RowState state(4);
  ASSERT_TRUE(linear_logprobs(t.linear_head(false), {.labels = t.labels, .row_state = state.c()}));
  ASSERT_TRUE(linear_cross_entropy_from_row_state({}, {.labels = t.labels, .loss = t.loss, .row_state = state.c()},
                                                  {.logit = {.vocab_total = 5}}));
  EXPECT_EQ(t.loss[0], loss);
}

}  // namespace
}  // namespace tileloss::test
