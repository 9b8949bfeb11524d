// The typed names of the losses that are told more of a row than its label, in C and in C++: each is the generic call with its
// own name and pass, from logits and with the LM head.
#include <gtest/gtest.h>

#include <functional>
#include <tileloss/tileloss.hpp>
#include <vector>

#include "tests/api/calls.h"

namespace tileloss::test {
namespace {

// 2 tokens, 5 classes, hidden sizes 3 and 2.
struct Tensors {
  std::vector<float> logits = {1, -1, 0.5F, 0, 2, 0.25F, 0.5F, 0.5F, -2, 1};
  std::vector<float> teacher = {0, 1, 2, 0.5F, -1, 1, 0, 0.5F, 1, -1};
  std::vector<float> probs = {0.2F, 0.3F, 0.5F, 0, 0, 0, 0, 0, 0.25F, 0.75F}, logprobs = {-0.5F, -1.5F, -1, -0.7F};
  std::vector<std::int64_t> ids = {4, 1, 0, 2};
  std::vector<float> hidden = {1, -1, 0.5F, 0, 2, 1}, teacher_hidden = {1, 2, -1, 0.5F};
  std::vector<float> head = {0.1F, 0.2F, -0.3F, 1, 0, -1, 0.5F, 0.5F, 0.5F, -1, 1, 0, 0.3F, -0.2F, 0.9F};
  std::vector<float> teacher_head = {0.1F, 0.7F, -0.3F, 1, 0, -1, 0.5F, 0.5F, 0.5F, -1};
  std::vector<float> loss = std::vector<float>(1), gradient = std::vector<float>(15);

  std::vector<float> outputs() const {
    std::vector<float> all = loss;
    all.insert(all.end(), gradient.begin(), gradient.end());
    return all;
  }
};

template <class Args>
Args with_loss(Tensors& t) {
  Args args;
  args.loss = t.loss;
  return args;
}

struct Names {
  const char* name;
  std::function<tileloss_args(tileloss_pass)> args;  // with a gradient unless it is a forward
  std::function<tileloss_status(const tileloss_args*, tileloss_pass)> typed;
  std::function<Status(tileloss_pass)> cpp;
};

void expect_same(Tensors& t, const Names& names, const void* options) {
  for (const tileloss_pass pass : {TILELOSS_FORWARD, TILELOSS_BACKWARD, TILELOSS_VALUE_AND_GRAD}) {
    const auto run = [&](auto&& call) {
      t.loss.assign(1, -7);
      t.gradient.assign(15, -7);
      call();
      return t.outputs();
    };
    const tileloss_args c_args = names.args(pass);
    const auto generic = run([&] { EXPECT_TRUE(succeeds(tileloss_call(names.name, pass, &c_args, options, nullptr, nullptr))); });
    EXPECT_NE(generic, std::vector<float>(16, -7)) << names.name << pass;
    EXPECT_EQ(run([&] { EXPECT_TRUE(succeeds(names.typed(&c_args, pass))); }), generic) << names.name << pass;
    EXPECT_EQ(run([&] { EXPECT_TRUE(names.cpp(pass)); }), generic) << names.name << pass;
  }
}

template <class Function>
Function of_pass(tileloss_pass pass, Function forward, Function backward, Function both) {
  return pass == TILELOSS_FORWARD ? forward : pass == TILELOSS_BACKWARD ? backward : both;
}

template <class Args, class Options>
using FromLogits = Status (*)(const Args&, const Options&, const RunOptions&) noexcept;
template <class Args, class Options>
using FromHead = Status (*)(const LinearHead&, const Args&, const Options&, const RunOptions&) noexcept;

// A loss that both takes logits or one head.
template <class Args, class Options, class CFunction>
void expect_both(Tensors& t, const char* name, Args args, const Options& options,
                 FromLogits<Args, Options> (*from_logits)(tileloss_pass), FromHead<Args, Options> (*from_head)(tileloss_pass),
                 CFunction (*c)(tileloss_pass, bool)) {
  const auto with_logits = [&](tileloss_pass pass) {
    Args all = args;
    all.logits = Matrix<const float>(t.logits.data(), 2, 5);
    if (pass != TILELOSS_FORWARD) all.dlogits = Matrix<float>(t.gradient.data(), 2, 5);
    return all;
  };
  expect_same(t,
              {.name = name,
               .args = [&](tileloss_pass pass) { return with_logits(pass).c(); },
               .typed = [&](const tileloss_args* a, tileloss_pass pass) { return c(pass, false)(a, &options, nullptr, nullptr); },
               .cpp = [&](tileloss_pass pass) { return from_logits(pass)(with_logits(pass), options, RunOptions{}); }},
              &options);
  const auto head = [&](tileloss_pass pass) {
    LinearHead h{.hidden = Matrix<const float>(t.hidden.data(), 2, 3), .head = Matrix<const float>(t.head.data(), 5, 3)};
    if (pass != TILELOSS_FORWARD) h.dhead = Matrix<float>(t.gradient.data(), 5, 3);
    return h;
  };
  std::string linear = "linear_";
  linear += name;
  expect_same(t,
              {.name = linear.c_str(),
               .args = [&](tileloss_pass pass) { return head(pass).c(args); },
               .typed = [&](const tileloss_args* a, tileloss_pass pass) { return c(pass, true)(a, &options, nullptr, nullptr); },
               .cpp = [&](tileloss_pass pass) { return from_head(pass)(head(pass), args, options, RunOptions{}); }},
              &options);
}

TEST(WantedNames, SoftCrossEntropy) {
  Tensors t;
  auto args = with_loss<SoftCrossEntropyArgs>(t);
  args.target_probs = Matrix<const float>(t.probs.data(), 2, 5);
  const SoftCrossEntropyOptions options{.label_smoothing = 0.1};
  expect_both<SoftCrossEntropyArgs, SoftCrossEntropyOptions>(
      t, "soft_cross_entropy", args, options,
      +[](tileloss_pass pass) {
        return of_pass<FromLogits<SoftCrossEntropyArgs, SoftCrossEntropyOptions>>(
            pass, &soft_cross_entropy, &soft_cross_entropy_backward, &soft_cross_entropy_value_and_grad);
      },
      +[](tileloss_pass pass) {
        return of_pass<FromHead<SoftCrossEntropyArgs, SoftCrossEntropyOptions>>(
            pass, &linear_soft_cross_entropy, &linear_soft_cross_entropy_backward, &linear_soft_cross_entropy_value_and_grad);
      },
      +[](tileloss_pass pass, bool is_linear) {
        return is_linear ? of_pass(pass, &tileloss_linear_soft_cross_entropy, &tileloss_linear_soft_cross_entropy_backward,
                                   &tileloss_linear_soft_cross_entropy_value_and_grad)
                         : of_pass(pass, &tileloss_soft_cross_entropy, &tileloss_soft_cross_entropy_backward,
                                   &tileloss_soft_cross_entropy_value_and_grad);
      });
}

TEST(WantedNames, SparseDistillation) {
  Tensors t;
  auto args = with_loss<SparseDistillationArgs>(t);
  args.teacher_ids = Matrix<const std::int64_t>(t.ids.data(), 2, 2);
  args.teacher_logprobs = Matrix<const float>(t.logprobs.data(), 2, 2);
  const SparseDistillationOptions options{.divergence = TILELOSS_JSD, .tail = TILELOSS_TAIL_RENORMALISE};
  expect_both<SparseDistillationArgs, SparseDistillationOptions>(
      t, "sparse_distillation", args, options,
      +[](tileloss_pass pass) {
        return of_pass<FromLogits<SparseDistillationArgs, SparseDistillationOptions>>(
            pass, &sparse_distillation, &sparse_distillation_backward, &sparse_distillation_value_and_grad);
      },
      +[](tileloss_pass pass) {
        return of_pass<FromHead<SparseDistillationArgs, SparseDistillationOptions>>(
            pass, &linear_sparse_distillation, &linear_sparse_distillation_backward, &linear_sparse_distillation_value_and_grad);
      },
      +[](tileloss_pass pass, bool is_linear) {
        return is_linear ? of_pass(pass, &tileloss_linear_sparse_distillation, &tileloss_linear_sparse_distillation_backward,
                                   &tileloss_linear_sparse_distillation_value_and_grad)
                         : of_pass(pass, &tileloss_sparse_distillation, &tileloss_sparse_distillation_backward,
                                   &tileloss_sparse_distillation_value_and_grad);
      });
}

TEST(WantedNames, LinearDistillation) {
  Tensors t;
  const auto args = with_loss<DistillationArgs>(t);
  const DistillationOptions options{.divergence = TILELOSS_REVERSE_KL};
  const TeacherHead teacher{.hidden = Matrix<const float>(t.teacher_hidden.data(), 2, 2),
                            .head = Matrix<const float>(t.teacher_head.data(), 5, 2)};
  const auto head = [&](tileloss_pass pass) {
    LinearHead h{.hidden = Matrix<const float>(t.hidden.data(), 2, 3), .head = Matrix<const float>(t.head.data(), 5, 3)};
    if (pass != TILELOSS_FORWARD) h.dhead = Matrix<float>(t.gradient.data(), 5, 3);
    return h;
  };
  expect_same(t,
              {.name = "linear_distillation",
               .args = [&](tileloss_pass pass) { return teacher.c(head(pass), args); },
               .typed =
                   [&](const tileloss_args* a, tileloss_pass pass) {
                     return of_pass(pass, &tileloss_linear_distillation, &tileloss_linear_distillation_backward,
                                    &tileloss_linear_distillation_value_and_grad)(a, &options, nullptr, nullptr);
                   },
               .cpp =
                   [&](tileloss_pass pass) {
                     return of_pass(pass, &linear_distillation, &linear_distillation_backward,
                                    &linear_distillation_value_and_grad)(head(pass), teacher, args, options, RunOptions{});
                   }},
              &options);
}

TEST(WantedNames, PlansAreMadeByName) {
  Tensors t;
  auto soft = with_loss<SoftCrossEntropyArgs>(t);
  soft.target_probs = Matrix<const float>(t.probs.data(), 2, 5);
  auto sparse = with_loss<SparseDistillationArgs>(t);
  sparse.teacher_ids = Matrix<const std::int64_t>(t.ids.data(), 2, 2);
  sparse.teacher_logprobs = Matrix<const float>(t.logprobs.data(), 2, 2);
  const LinearHead head{.hidden = Matrix<const float>(t.hidden.data(), 2, 3), .head = Matrix<const float>(t.head.data(), 5, 3)};
  const TeacherHead teacher{.hidden = Matrix<const float>(t.teacher_hidden.data(), 2, 2),
                            .head = Matrix<const float>(t.teacher_head.data(), 5, 2)};
  EXPECT_TRUE(linear_plan(Pass::kForward, head, soft).status);
  EXPECT_TRUE(linear_plan(Pass::kForward, head, sparse).status);
  EXPECT_TRUE(linear_plan(Pass::kForward, head, teacher, with_loss<DistillationArgs>(t)).status);
  soft.logits = sparse.logits = Matrix<const float>(t.logits.data(), 2, 5);
  EXPECT_TRUE(plan(Pass::kForward, soft).status);
  EXPECT_TRUE(plan(Pass::kForward, sparse).status);
}

}  // namespace
}  // namespace tileloss::test
