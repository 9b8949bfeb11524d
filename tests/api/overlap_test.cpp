// Outputs that share memory with an input or another output: refused with both names. What lies side by side is taken.
#include <gtest/gtest.h>

#include "tests/api/corrupted_call.h"

namespace tileloss::test {
namespace {

using A = tileloss_args;

template <class View>
auto at(View A::*output, View A::*other, std::int64_t bytes = 0) {
  return [=](Call& c) { (c.args().*output).data = static_cast<char*>((c.args().*other).data) + bytes; };
}

TEST(Overlap, OfAnOutputWithAnInput) {
  const auto message = "one that overlaps it";
  expect_refused({{"loss.data", "a buffer apart from labels", message, at(&A::loss, &A::labels)},
                  {"logp.data", "a buffer apart from token_weights", message, at(&A::logp, &A::token_weights)},
                  {"lse.data", "a buffer apart from token_weights", message, at(&A::lse, &A::token_weights, 12)},
                  {"loss.data", "a buffer apart from loss_grad", message, at(&A::loss, &A::loss_grad)},
                  {"correct.data", "a buffer apart from labels", message, at(&A::correct, &A::labels, 31)},
                  {"logp.data", "a buffer apart from logits", message,
                   [](Call& c) { c.args().logp.data = static_cast<float*>(c.args().logits.data) + 3; }}},
                 When::kCall);
}

TEST(Overlap, OfTwoOutputs) {
  const auto message = "one that overlaps it";
  expect_refused({{"lse.data", "a buffer apart from logp", message, at(&A::lse, &A::logp)},
                  {"entropy.data", "a buffer apart from lse", message, at(&A::entropy, &A::lse, -4)},
                  {"argmax.data", "a buffer apart from entropy", message, at(&A::argmax, &A::entropy)},
                  {"loss.data", "a buffer apart from dlogits", message,
                   [](Call& c) { c.args().loss.data = static_cast<float*>(c.args().dlogits.data) + 39; }}},
                 When::kCall);
}

TEST(Overlap, OfARowStatesArrays) {
  const auto state_with = [](auto change) {
    return [=](Call& c) {
      c.args().row_state = &c.state.get();
      change(c);
    };
  };
  const auto message = "one that overlaps it";
  expect_refused({{"row_state.sum", "a buffer apart from row_state.max", message,
                   state_with([](Call& c) { c.args().row_state->sum = c.args().row_state->max; })},
                  {"row_state.argmax", "a buffer apart from labels", message, state_with([](Call& c) {
                     c.args().row_state->argmax = static_cast<std::int64_t*>(c.args().labels.data) + 3;
                   })},
                  {"row_state.label_logit", "a buffer apart from logp", message,
                   state_with([](Call& c) { c.args().row_state->label_logit = static_cast<float*>(c.args().logp.data) + 1; })}},
                 When::kCall);
}

// A backward leaves the forward's row outputs alone, and only reads its state.
TEST(Overlap, ABackwardWritesItsGradientAlone) {
  Call call;
  call.args().row_state = &call.state.get();
  const tileloss_matrix dlogits = call.args().dlogits;
  call.make_forward();
  ASSERT_TRUE(runs("cross_entropy", call.pass, call.args(), &call.options, plan_options()));
  call.args().dlogits = dlogits;
  call.args().lse = call.args().logp;
  ASSERT_TRUE(runs("cross_entropy", TILELOSS_BACKWARD, call.args(), &call.options, plan_options()));
  call.args().dlogits.data = call.args().row_state->max;
  EXPECT_FALSE(runs("cross_entropy", TILELOSS_BACKWARD, call.args(), &call.options, plan_options()));
  EXPECT_STREQ(tileloss_last_error(), "dlogits.data: expected a buffer apart from row_state.max, got one that overlaps it");
}

// Columns of one array, and logits beside their gradient in one.
TEST(Overlap, NoneBetweenColumnsOfOneArray) {
  Call call;
  std::vector<float> columns(4 * 3), both(4 * 20);
  call.args().logp = tileloss_make_vector(columns.data(), TILELOSS_FLOAT32, 4);
  call.args().lse = tileloss_make_vector(columns.data() + 1, TILELOSS_FLOAT32, 4);
  call.args().token_weights = tileloss_make_vector(columns.data() + 2, TILELOSS_FLOAT32, 4);
  for (tileloss_vector* v : {&call.args().logp, &call.args().lse, &call.args().token_weights}) v->stride = 3;
  call.args().logits = tileloss_make_matrix(both.data(), TILELOSS_FLOAT32, 4, 10, 20);
  call.args().dlogits = tileloss_make_matrix(both.data() + 10, TILELOSS_FLOAT32, 4, 10, 20);
  EXPECT_TRUE(runs("cross_entropy", call.pass, call.args(), &call.options, plan_options()));
  call.args().dlogits.data = both.data() + 9;
  EXPECT_FALSE(runs("cross_entropy", call.pass, call.args(), &call.options, plan_options()));
}

}  // namespace
}  // namespace tileloss::test
