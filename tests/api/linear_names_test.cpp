// The typed names of the functions with the LM head, in C and in C++: each is the generic call with its own name and pass.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <tileloss/tileloss.hpp>
#include <vector>

#include "tests/api/calls.h"

namespace tileloss::test {
namespace {

// 4 tokens in 2 sequences, 5 classes, hidden size 3.
struct Tensors {
  std::vector<float> hidden = {1, -1, 0.5F, 0, 2, 1, -1, 0.25F, 0, 0.5F, 0.5F, -2};
  std::vector<float> head = {0.1F, 0.2F, -0.3F, 1, 0, -1, 0.5F, 0.5F, 0.5F, -1, 1, 0, 0.3F, -0.2F, 0.9F};
  std::vector<std::int64_t> labels = {0, 4, 2, 1};
  std::vector<float> advantages = {1, -0.5F}, logp_grad = {1, 2, 3, 4};
  std::vector<float> loss = std::vector<float>(1), logp = std::vector<float>(4), dhidden = std::vector<float>(12),
                     dhead = std::vector<float>(15);

  LinearHead forward_head() { return {.hidden = Matrix(hidden, 4, 3), .head = Matrix(head, 5, 3)}; }
  LinearHead gradients() {
    LinearHead h = forward_head();
    h.dhidden = Matrix(dhidden, 4, 3);
    h.dhead = Matrix(dhead, 5, 3);
    return h;
  }
  std::vector<float> outputs() const {
    std::vector<float> all;
    for (const std::vector<float>* v : {&loss, &logp, &dhidden, &dhead}) all.insert(all.end(), v->begin(), v->end());
    return all;
  }
};

// The same through the C++ name, the C name and the generic call.
template <class Args, class Options, class CppFunction, class TypedCFunction>
void expect_same(Tensors& t, const char* name, tileloss_pass pass, const LinearHead& head, const Args& args,
                 const Options& options, CppFunction cpp, TypedCFunction typed) {
  const auto run = [&](auto&& call) {
    t.loss.assign(1, -7);
    t.logp.assign(4, -7);
    t.dhidden.assign(12, -7);
    t.dhead.assign(15, -7);
    call();
    return t.outputs();
  };
  const tileloss_args c_args = head.c(args);
  const auto generic = run([&] { EXPECT_TRUE(succeeds(tileloss_call(name, pass, &c_args, &options, nullptr, nullptr))); });
  EXPECT_NE(generic, std::vector<float>(generic.size(), -7)) << name << pass;
  EXPECT_EQ(run([&] { EXPECT_TRUE(succeeds(typed(&c_args, &options, nullptr, nullptr))); }), generic) << name << pass;
  EXPECT_EQ(run([&] { EXPECT_TRUE(cpp(head, args, options, RunOptions{})); }), generic) << name << pass;
}

TEST(LinearNames, Logprobs) {
  Tensors t;
  const LogprobsArgs outputs{.labels = t.labels, .logp = t.logp};
  expect_same(t, "linear_logprobs", TILELOSS_FORWARD, t.forward_head(), outputs, LogprobsOptions{}, linear_logprobs,
              tileloss_linear_logprobs);
  const LogprobsArgs upstream{.labels = t.labels, .logp_grad = t.logp_grad};
  expect_same(t, "linear_logprobs", TILELOSS_BACKWARD, t.gradients(), upstream, LogprobsOptions{}, linear_logprobs_backward,
              tileloss_linear_logprobs_backward);
}

TEST(LinearNames, CrossEntropy) {
  Tensors t;
  const CrossEntropyArgs args{.labels = t.labels, .loss = t.loss, .logp = t.logp};
  const CrossEntropyOptions options{.label_smoothing = 0.1};
  expect_same(t, "linear_cross_entropy", TILELOSS_FORWARD, t.forward_head(), args, options, linear_cross_entropy,
              tileloss_linear_cross_entropy);
  expect_same(t, "linear_cross_entropy", TILELOSS_BACKWARD, t.gradients(), args, options, linear_cross_entropy_backward,
              tileloss_linear_cross_entropy_backward);
  expect_same(t, "linear_cross_entropy", TILELOSS_VALUE_AND_GRAD, t.gradients(), args, options,
              linear_cross_entropy_value_and_grad, tileloss_linear_cross_entropy_value_and_grad);
}

TEST(LinearNames, PolicyLoss) {
  Tensors t;
  const PolicyLossArgs args{.labels = t.labels, .sequence_length = 2, .advantages = t.advantages, .loss = t.loss, .logp = t.logp};
  PolicyLossOptions options;
  ASSERT_TRUE(set_preset(options, "gspo"));
  expect_same(t, "linear_policy_loss", TILELOSS_FORWARD, t.forward_head(), args, options, linear_policy_loss,
              tileloss_linear_policy_loss);
  expect_same(t, "linear_policy_loss", TILELOSS_BACKWARD, t.gradients(), args, options, linear_policy_loss_backward,
              tileloss_linear_policy_loss_backward);
  expect_same(t, "linear_policy_loss", TILELOSS_VALUE_AND_GRAD, t.gradients(), args, options, linear_policy_loss_value_and_grad,
              tileloss_linear_policy_loss_value_and_grad);
}

TEST(LinearNames, ABiasMayBeFloatOrSixteenBits) {
  Tensors t;
  const std::vector<float> bias = {1, -2, 0.5F, 0, -1};
  const std::vector<BFloat16> bias16 = {{0x3F80}, {0xC000}, {0x3F00}, {0x0000}, {0xBF80}};
  const CrossEntropyArgs args{.labels = t.labels, .loss = t.loss};
  std::vector<float> dbias(5);
  std::vector<BFloat16> dbias16(5);
  LinearHead head = t.forward_head();
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

TEST(LinearNames, PlanAndRowState) {
  Tensors t;
  const CrossEntropyArgs args{.labels = t.labels, .loss = t.loss};
  const PlanResult planned = linear_plan(Pass::kValueAndGrad, t.gradients(), args);
  ASSERT_TRUE(planned.status);
  EXPECT_EQ(planned.plan.function(), "linear_cross_entropy");
  EXPECT_TRUE(linear_cross_entropy_value_and_grad(t.gradients(), args, {}, {.plan = &planned.plan}));
  const float loss = t.loss[0];
  RowState state(4);
  ASSERT_TRUE(linear_logprobs(t.forward_head(), {.labels = t.labels, .row_state = state.c()}));
  ASSERT_TRUE(linear_cross_entropy_from_row_state({}, {.labels = t.labels, .loss = t.loss, .row_state = state.c()},
                                                  {.logit = {.vocab_total = 5}}));
  EXPECT_EQ(t.loss[0], loss);
}

}  // namespace
}  // namespace tileloss::test
