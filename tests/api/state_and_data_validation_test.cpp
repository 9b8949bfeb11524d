// As validation_test.cpp: row states, shards, data pointers, overlap, and the functions around the calls.
#include <gtest/gtest.h>

#include "tests/api/corrupted_call.h"

namespace tileloss::test {
namespace {

TEST(Validation, RowStates) {
  const auto with_state = [](auto change) {
    return [=](Call& c) {
      c.pass = TILELOSS_BACKWARD;
      c.args().row_state = &c.state.get();
      change(c);
    };
  };
  const auto from_state = [](auto change) {
    return [=](Call& c) {
      c.make_from_row_state();
      change(c);
    };
  };
  const auto null = [](auto member) { return [=](Call& c) { c.args().row_state->*member = nullptr; }; };
  using S = tileloss_row_state;
  expect_refused(
      {{"row_state.rows", "4", "3", with_state([](Call& c) { c.args().row_state->rows = 3; })},
       {"row_state.struct_size", "init function", "0", with_state([](Call& c) { c.args().row_state->struct_size = 0; })},
       {"row_state.device_type", "device, cpu", "1",
        with_state([](Call& c) { c.args().row_state->device_type = TILELOSS_CUDA; })},
       {"row_state", "max, sum and label_logit", "a null array", with_state(null(&S::max))},
       {"row_state", "max, sum and label_logit", "a null array", with_state(null(&S::sum))},
       {"row_state", "max, sum and label_logit", "a null array", with_state(null(&S::label_logit))},
       {"row_state.entropy_sum", "a forward filled", "null",
        [](Call& c) {
          const tileloss_vector upstream = c.args().token_weights;
          c.make_logprobs(TILELOSS_BACKWARD);
          c.args().entropy_grad = upstream;
          c.args().row_state = &c.state.get();
          c.args().row_state->entropy_sum = nullptr;
        }},
       {"row_state", "the merged state", "none", from_state([](Call& c) { c.args().row_state = nullptr; })},
       {"row_state.entropy_sum", "a forward filled", "null", from_state(null(&S::entropy_sum))},
       {"row_state", "collision_sum", "a null array", from_state(null(&S::collision_sum))},
       {"row_state", "smoothing_sum", "a null array", from_state(null(&S::smoothing_sum))},
       {"row_state", "argmax", "a null array", from_state(null(&S::argmax))},
       {"row_state", "max, sum and label_logit", "a null array", from_state(null(&S::sum))},
       {"vocab_total", "the number of classes", "-1", from_state([](Call& c) { c.options.logit.vocab_total = -1; })},
       {"labels.size", ">= 0", "-4", from_state([](Call& c) {
          for (tileloss_vector* v : {&c.args().labels, &c.args().token_weights, &c.args().logp, &c.args().lse, &c.args().entropy,
                                     &c.args().argmax, &c.args().correct, &c.args().log_sum_sq_probs, &c.args().mean_logit}) {
            v->size = -4;
          }
          c.args().row_state->rows = -4;
        })}},
      When::kPlan);
}

TEST(Validation, AShardAloneGivesOnlyItsRowState) {
  const auto shard = [](auto change) {
    return [=](Call& c) {
      c.options.logit.vocab_total = 30;
      c.options.logit.vocab_start = 10;
      c.args().row_state = &c.state.get();
      const tileloss_args all = c.args();
      for (tileloss_vector* v : {&c.args().loss, &c.args().logp, &c.args().lse, &c.args().entropy, &c.args().argmax,
                                 &c.args().correct, &c.args().log_sum_sq_probs, &c.args().mean_logit}) {
        *v = {};
      }
      change(c, all);
    };
  };
  std::vector<Corruption> corruptions = {
      {"vocab_total", "a shard alone", "30", shard([](Call& c, const tileloss_args&) { c.args().row_state = nullptr; })}};
  for (const auto member :
       {&tileloss_args::loss, &tileloss_args::logp, &tileloss_args::lse, &tileloss_args::entropy, &tileloss_args::argmax,
        &tileloss_args::correct, &tileloss_args::log_sum_sq_probs, &tileloss_args::mean_logit}) {
    corruptions.push_back({"vocab_total", "a shard alone", "30", shard([=](Call& c, const tileloss_args& all) {
                             c.make_forward();
                             c.args().*member = all.*member;
                           })});
  }
  expect_refused(corruptions, When::kPlan);
}

TEST(Validation, DataPointers) {
  std::vector<Corruption> corruptions = {{"logits.data", "a pointer", "null", [](Call& c) { c.args().logits.data = nullptr; }},
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
    corruptions.push_back({name, "a pointer", "null", [vector = member](Call& c) { (c.args().*vector).data = nullptr; }});
  }
  corruptions.push_back({"class_weights.data", "a pointer", "null", [](Call& c) {
                           c.args().mean_logit = {};
                           c.args().class_weights = tileloss_make_vector(nullptr, TILELOSS_FLOAT32, 10);
                         }});
  for (const auto& [name, member] : {std::pair{"logp_grad.data", &tileloss_args::logp_grad},
                                     {"lse_grad.data", &tileloss_args::lse_grad},
                                     {"entropy_grad.data", &tileloss_args::entropy_grad},
                                     {"mean_logit_grad.data", &tileloss_args::mean_logit_grad}}) {
    corruptions.push_back({name, "a pointer", "null", [vector = member](Call& c) {
                             c.make_logprobs(TILELOSS_BACKWARD);
                             c.args().*vector = tileloss_make_vector(nullptr, TILELOSS_FLOAT32, 4);
                           }});
  }
  expect_refused(corruptions, When::kCall);
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
  EXPECT_TRUE(names<>({"into", "tileloss_row_state_init", "null"}, tileloss_row_state_merge(nullptr, &b.get())));
  EXPECT_TRUE(names<>({"from", "tileloss_row_state_init", "null"}, tileloss_row_state_merge(&a.get(), nullptr)));
  EXPECT_TRUE(names<>({"state", "tileloss_row_state_init", "null"}, tileloss_row_state_set_identity(nullptr)));
  EXPECT_TRUE(names<>({"from.rows", "3", "2"}, tileloss_row_state_merge(&a.get(), &c.get())));
  tileloss_row_state odd = b.get();
  odd.struct_size = 1;
  EXPECT_TRUE(names<>({"from.struct_size", "init function", "1"}, tileloss_row_state_merge(&a.get(), &odd)));
  odd = b.get();
  odd.rows = -1;
  EXPECT_TRUE(names<>({"from.rows", ">= 0", "-1"}, tileloss_row_state_merge(&a.get(), &odd)));
  odd = b.get();
  odd.sum = nullptr;
  EXPECT_TRUE(names<>({"from", "max, sum and label_logit", "a null one"}, tileloss_row_state_merge(&a.get(), &odd)));
  odd = b.get();
  odd.device_type = TILELOSS_CUDA;
  EXPECT_TRUE(names<>({"state.device_type", "cpu", "1"}, tileloss_row_state_set_identity(&odd)));
}

// The CPU's calls report what is wrong themselves.
TEST(Validation, ErrorsOfADevice) {
  Call call;
  std::vector<std::int64_t> labels = {0, 10, 0, 0};
  call.args().labels = view(labels);
  ASSERT_EQ(tileloss_cross_entropy_value_and_grad(&call.args(), &call.options, nullptr, nullptr), TILELOSS_LABEL_OUT_OF_RANGE);
  EXPECT_EQ(tileloss_check_errors(TILELOSS_CPU, 0, nullptr), TILELOSS_OK);
  EXPECT_TRUE(check_errors(TILELOSS_CPU).ok());
  for (const std::int32_t index : {-1, 1})
    EXPECT_TRUE(names<>({"device_index", "0", std::to_string(index)}, tileloss_check_errors(TILELOSS_CPU, index, nullptr)));
  EXPECT_TRUE(names<>({"stream", "null", "a pointer"}, tileloss_check_errors(TILELOSS_CPU, 0, &call)));
  EXPECT_TRUE(names<>({"device_type", "of this build (cpu), not cuda (libtileloss_cuda.so: ", "1", {}, TILELOSS_UNSUPPORTED},
                      tileloss_check_errors(TILELOSS_CUDA, 0, nullptr)));
}

TEST(Validation, Introspection) {
  tileloss_function_info info;
  info.struct_size = sizeof info;
  EXPECT_TRUE(names<>({"index", "0 to", "-1"}, tileloss_get_function_info(-1, &info)));
  EXPECT_EQ(tileloss_get_function_info(tileloss_function_count(), &info), TILELOSS_INVALID_ARGUMENT);
  EXPECT_TRUE(names<>({"info", "init function", "null"}, tileloss_get_function_info(0, nullptr)));
  info.struct_size = 3;
  EXPECT_TRUE(names<>({"info.struct_size", "init function", "3"}, tileloss_get_function_info(0, &info)));
  tileloss_cross_entropy_options options;
  EXPECT_TRUE(names<>({"function", "registered", "nothing"}, tileloss_options_init("nothing", &options, sizeof options)));
  EXPECT_TRUE(names<>({"function", "registered", "null"}, tileloss_options_init(nullptr, &options, sizeof options)));
  EXPECT_TRUE(names<>({"options", "a pointer", "null"}, tileloss_options_init("cross_entropy", nullptr, sizeof options)));
  EXPECT_TRUE(names<>({"options_size", "at least", "7"}, tileloss_options_init("cross_entropy", &options, 7)));
}

TEST(Validation, NamesOfStatusesIsasAndSchedules) {
  const char* const statuses[] = {
      "ok",      "invalid_argument", "label_out_of_range", "out_of_memory", "workspace_too_small", "unsupported", "plan_mismatch",
      "internal"};
  for (std::int32_t i = 0; i < 8; ++i) EXPECT_STREQ(tileloss_status_name(i), statuses[i]);
  EXPECT_STREQ(tileloss_status_name(99), "unknown");
  EXPECT_STREQ(tileloss_isa_name(TILELOSS_ISA_AVX512), "avx512");
  EXPECT_STREQ(tileloss_isa_name(TILELOSS_ISA_AVX512_BF16), "avx512_bf16");
  EXPECT_STREQ(tileloss_isa_name(TILELOSS_ISA_AVX512_AMX), "avx512_amx");
  EXPECT_STREQ(tileloss_isa_name(77), "unknown");
  EXPECT_EQ(tileloss_isa_supported(TILELOSS_ISA_BASELINE), 1);
  EXPECT_EQ(tileloss_isa_supported(77), 0);
  EXPECT_STREQ(tileloss_schedule_name(TILELOSS_SCHEDULE_RECOMPUTE), "recompute");
  EXPECT_STREQ(tileloss_schedule_name(-1), "unknown");
  EXPECT_STREQ(tileloss_version(), TILELOSS_VERSION_STRING);
}

}  // namespace
}  // namespace tileloss::test
