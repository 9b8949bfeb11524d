// The functions fused with the LM head: what they refuse and how they say so, workspace, and bits.
// On cuda: LinearDeterminism.
#include <gtest/gtest.h>

#include <cstring>

#include "support/synthetic.h"
#include "tests/api/corrupted_call.h"

namespace tileloss::test {
namespace {

// N = 5, V = 11, H = 4 unless told otherwise; float32 throughout.
struct LinearCall {
  std::int64_t rows, vocab, width;
  std::vector<float> hidden, head, bias, dhidden, dhead, dbias, loss, logp;
  std::vector<std::int64_t> labels;
  tileloss_args given = init<tileloss_args>();
  std::string function = "linear_cross_entropy";
  tileloss_cross_entropy_options options = cross_entropy_options();
  tileloss_plan_options hints = plan_options();
  tileloss_pass pass = TILELOSS_VALUE_AND_GRAD;
  RowStateArrays state;

  explicit LinearCall(std::int64_t n = 5, std::int64_t v = 11, std::int64_t h = 4) : rows(n), vocab(v), width(h), state(n) {
    const auto fill = [](std::int64_t count, std::int64_t stream) {
      tools::Random random(7, tools::Stream::kLogits, stream);
      std::vector<float> values;
      for (std::int64_t i = 0; i < count; ++i) values.push_back(static_cast<float>(0.5 * random.next_normal()));
      return values;
    };
    hidden = fill(rows * width, 1);
    head = fill(vocab * width, 2);
    bias = fill(vocab, 3);
    for (std::int64_t i = 0; i < rows; ++i) labels.push_back(i % 4 == 3 ? -100 : 3 * i % vocab);
    dhidden.assign(hidden.size(), -7);
    dhead.assign(head.size(), -7);
    dbias.assign(bias.size(), -7);
    loss.assign(1, -7);
    logp.assign(static_cast<std::size_t>(rows), -7);
    given.hidden = view(hidden, rows, width);
    given.head = view(head, vocab, width);
    given.bias = view(bias);
    given.labels = view(labels);
    given.loss = view(loss);
    given.logp = view(logp);
    given.dhidden = view(dhidden, rows, width);
    given.dhead = view(dhead, vocab, width);
    given.dbias = view(dbias);
  }
  // The last columns of hidden and head become the low-rank part.
  void cut_off(std::int64_t rank) {
    using A = tileloss_args;
    for (const auto& [own, part] : {std::pair{&A::hidden, &A::hidden_r}, std::pair{&A::head, &A::head_r},
                                    std::pair{&A::dhidden, &A::dhidden_r}, std::pair{&A::dhead, &A::dhead_r}}) {
      if (rank == 0) continue;
      (given.*own).cols -= rank;
      given.*part = given.*own;
      (given.*part).cols = rank;
      (given.*part).data = static_cast<float*>((given.*own).data) + (given.*own).cols;
    }
  }
  tileloss_args& args() { return given; }
  const void* given_options() const { return &options; }
  tileloss_status plan(tileloss_plan* out) {
    *out = init<tileloss_plan>();
    return tileloss_make_plan("linear_cross_entropy", pass, &given, &options, &hints, nullptr, out);
  }
  testing::AssertionResult run() { return runs("linear_cross_entropy", pass, given, &options, hints); }
  std::vector<unsigned char> outputs() const { return outputs_of(given); }
};

const auto expect_refusals = expect_refused<LinearCall>;

TEST(LinearValidation, TensorsAndShapes) {
  const auto set = [](auto view, auto member, auto value) { return [=](LinearCall& c) { (c.given.*view).*member = value; }; };
  using A = tileloss_args;
  using M = tileloss_matrix;
  const auto set_low_rank = [](auto view, auto member, auto value) {
    return [=](LinearCall& c) {
      c.given.hidden_r = c.given.hidden;
      c.given.head_r = c.given.head;
      (c.given.*view).*member = value;
    };
  };
  expect_refusals(
      {{"hidden", "a float32, bfloat16 or float16 matrix [N,H]", "none", [](LinearCall& c) { c.given.hidden = {}; }},
       {"head", "a float32, bfloat16 or float16 matrix [V,H]", "none", [](LinearCall& c) { c.given.head = {}; }},
       {"head.cols", "hidden's, 4", "3", set(&A::head, &M::cols, 3)},
       {"head.rows", ">= 1", "0", set(&A::head, &M::rows, 0)},
       {"hidden.dtype", "float32, bfloat16 or float16", "int32", set(&A::hidden, &M::dtype, TILELOSS_INT32)},
       {"head.row_stride", "> (cols - 1) * col_stride = 3", "3", set(&A::head, &M::row_stride, 3)},
       {"head.col_stride", ">= 1", "0", set(&A::head, &M::col_stride, 0)},
       {"dhidden", "hidden's shape [5,4]", "[4,4]", set(&A::dhidden, &M::rows, 4)},
       {"dhead", "head's shape [11,4]", "[11,3]", set(&A::dhead, &M::cols, 3)},
       {"dhead.dtype", "float32 or head's, float32", "bfloat16", set(&A::dhead, &M::dtype, TILELOSS_BFLOAT16)},
       {"bias.size", "11", "10", [](LinearCall& c) { c.given.bias.size = 10; }},
       {"bias.dtype", "float32, bfloat16 or float16", "int32", [](LinearCall& c) { c.given.bias.dtype = TILELOSS_INT32; }},
       {"dbias.dtype", "float32 or bias's, float32", "bfloat16", [](LinearCall& c) { c.given.dbias.dtype = TILELOSS_BFLOAT16; }},
       {"dbias.dtype", "float32 or bias's, bfloat16", "float16",
        [](LinearCall& c) {
          c.given.bias.dtype = TILELOSS_BFLOAT16;
          c.given.dbias.dtype = TILELOSS_FLOAT16;
        }},
       {"dbias.dtype", "float32 without a bias", "bfloat16",
        [](LinearCall& c) {
          c.given.bias = {};
          c.given.dbias.dtype = TILELOSS_BFLOAT16;
        }},
       {"hidden_r", "a matrix [N,R], as head_r is given", "none", [](LinearCall& c) { c.given.head_r = c.given.head; }},
       {"head_r", "a matrix [V,R], as hidden_r is given", "none", [](LinearCall& c) { c.given.hidden_r = c.given.hidden; }},
       {"hidden_r.rows", "hidden's, 5", "4", set_low_rank(&A::hidden_r, &M::rows, 4)},
       {"head_r.rows", "head's, 11", "10", set_low_rank(&A::head_r, &M::rows, 10)},
       {"hidden_r.cols", "1 to 512", "513",
        [](LinearCall& c) {
          c.given.hidden_r = tileloss_make_matrix(c.hidden.data(), TILELOSS_FLOAT32, 5, 513, 513);
          c.given.head_r = tileloss_make_matrix(c.head.data(), TILELOSS_FLOAT32, 11, 513, 513);
        }},
       {"head_r.cols", "hidden_r's, 4", "3", set_low_rank(&A::head_r, &M::cols, 3)},
       {"dhidden_r", "none without hidden_r and head_r", "a tensor", [](LinearCall& c) { c.given.dhidden_r = c.given.dhidden; }},
       {"dhead_r", "none without hidden_r and head_r", "a tensor", [](LinearCall& c) { c.given.dhead_r = c.given.dhead; }},
       {"dbias.stride", "not 0 for an output", "0", [](LinearCall& c) { c.given.dbias.stride = 0; }},
       {"dhidden", "it, dhead, dbias, dhidden_r or dhead_r in a backward", "none of them",
        [](LinearCall& c) {
          c.given.dhidden = c.given.dhead = {};
          c.given.dbias = {};
        }},
       {"dhead", "none in this pass", "a tensor",
        [](LinearCall& c) {
          c.pass = TILELOSS_FORWARD;
          c.given.dhidden = {};
        }},
       {"logits", "none: linear_cross_entropy makes them of hidden and head", "a matrix",
        [](LinearCall& c) { c.given.logits = c.given.hidden; }},
       {"dlogits", "none: linear_cross_entropy never holds them", "a matrix",
        [](LinearCall& c) { c.given.dlogits = c.given.hidden; }},
       {"hidden", "none with the pass from_row_state", "a tensor", [](LinearCall& c) { c.pass = TILELOSS_FROM_ROW_STATE; }},
       {"bias", "none with the pass from_row_state", "a tensor",
        [](LinearCall& c) {
          c.pass = TILELOSS_FROM_ROW_STATE;
          c.given.hidden = c.given.head = c.given.dhidden = c.given.dhead = {};
        }},
       {"compute_dtype", "auto|float32|bfloat16", "3", [](LinearCall& c) { c.options.linear.compute_dtype = TILELOSS_FLOAT16; }},
       {"accumulate", "false|true", "2", [](LinearCall& c) { c.options.linear.accumulate = 2; }},
       {"options.linear.reserved", "0", "1", [](LinearCall& c) { c.options.linear.reserved[1] = 1; }},
       {"valid_vocab", "<= the logits' columns = 11", "12", [](LinearCall& c) { c.options.logit.valid_vocab = 12; }},
       {"workspace_bytes", "at least", "a budget of 1", [](LinearCall& c) { c.hints.workspace_bytes = 1; },
        TILELOSS_WORKSPACE_TOO_SMALL}},
      When::kPlan);
}

TEST(LinearValidation, PointersAndOverlapAtTheCall) {
  expect_refusals({{"hidden.data", "a pointer", "null", [](LinearCall& c) { c.given.hidden.data = nullptr; }},
                   {"head.data", "a pointer", "null", [](LinearCall& c) { c.given.head.data = nullptr; }},
                   {"bias.data", "a pointer", "null", [](LinearCall& c) { c.given.bias.data = nullptr; }},
                   {"dhead.data", "a pointer", "null", [](LinearCall& c) { c.given.dhead.data = nullptr; }},
                   {"dhidden.data", "a buffer apart from hidden", "one that overlaps it",
                    [](LinearCall& c) { c.given.dhidden.data = c.given.hidden.data; }},
                   {"dhead.data", "a buffer apart from head", "one that overlaps it",
                    [](LinearCall& c) { c.given.dhead.data = c.head.data() + 3; }},
                   {"labels[1]", "0 <= label < 11", "11", [](LinearCall& c) { c.labels[1] = 11; }, TILELOSS_LABEL_OUT_OF_RANGE}},
                  When::kCall);
}

TEST(LinearValidation, TheLogitsFunctionsTakeNoHead) {
  for (const auto& [name, member] : std::vector<std::pair<const char*, tileloss_matrix tileloss_args::*>>{
           {"hidden", &tileloss_args::hidden}, {"head", &tileloss_args::head}, {"dhead", &tileloss_args::dhead}}) {
    Call call;
    call.args().*member = call.args().logits;
    EXPECT_TRUE(names<>({name, "none: cross_entropy does not take it", "a matrix"}, call.call()));
  }
}

// ---------------------------------------------------------------------------------------------------------------- bits

void check_threads(std::int64_t rank) {
  for (const tileloss_dtype compute : {TILELOSS_FLOAT32, TILELOSS_BFLOAT16}) {
    for (const tileloss_schedule schedule : kSchedules) {
      LinearCall call(150, 1500, 40);
      call.cut_off(rank);
      call.options.linear.compute_dtype = compute;
      call.hints.cpu.schedule = schedule;
      call.hints.cpu.row_block = 56;
      std::vector<unsigned char> expected;
      for (const int threads : {1, 2, 3, 5, 8, 16}) {
        call.hints.cpu.threads = threads;
        ASSERT_TRUE(call.run());
        if (expected.empty()) expected = call.outputs();
        ASSERT_TRUE(same_bits(call.outputs(), expected)) << threads << " threads, schedule " << schedule;
      }
    }
  }
}

TEST(LinearDeterminism, ThreadsChangeNoBit) { check_threads(0); }
TEST(LinearLowRank, ThreadsChangeNoBit) { check_threads(7); }

// A part's gradients have the bits that they have beside the other's.
TEST(LinearLowRank, AFrozenHeadChangesNoBit) {
  for (const tileloss_dtype compute : {TILELOSS_FLOAT32, TILELOSS_BFLOAT16}) {
    LinearCall all(150, 1500, 40), frozen(150, 1500, 40);
    for (LinearCall* call : {&all, &frozen}) {
      call->cut_off(7);
      call->options.linear.compute_dtype = compute;
      call->hints.cpu.schedule = TILELOSS_SCHEDULE_RECOMPUTE;
    }
    frozen.given.dhead = {};
    ASSERT_TRUE(all.run());
    ASSERT_TRUE(frozen.run());
    EXPECT_EQ(frozen.dhidden, all.dhidden);
    for (std::size_t n = 0; n < all.dhead.size(); ++n) {
      if (n % 40 >= 33) {
        ASSERT_EQ(frozen.dhead[n], all.dhead[n]) << n;
      }
    }
  }
}

TEST(LinearDeterminism, LogpHasTheSameBitsInEveryScheduleAndForAnyRowsBesideIt) {
  LinearCall many(2048, 600, 16);
  ASSERT_TRUE(many.run());
  for (const tileloss_schedule schedule : kSchedules) {
    for (const std::int64_t rows : {1, 33, 2048}) {
      LinearCall some(rows, 600, 16);
      some.hints.cpu.schedule = schedule;
      ASSERT_TRUE(some.run());
      EXPECT_EQ(std::memcmp(some.logp.data(), many.logp.data(), some.logp.size() * sizeof(float)), 0) << rows << " " << schedule;
    }
  }
}

TEST(LinearDeterminism, ForwardAndBackwardApartGiveTheBitsOfSweeps) {
  LinearCall both(70, 900, 24), apart(70, 900, 24);
  both.hints.cpu.schedule = TILELOSS_SCHEDULE_SWEEPS;
  ASSERT_TRUE(both.run());
  const tileloss_args all = apart.given;
  apart.given.dhidden = apart.given.dhead = {};
  apart.given.dbias = {};
  apart.given.row_state = &apart.state.get();
  apart.pass = TILELOSS_FORWARD;
  ASSERT_TRUE(apart.run());
  apart.given = all;
  apart.given.row_state = &apart.state.get();
  apart.pass = TILELOSS_BACKWARD;
  ASSERT_TRUE(apart.run());
  EXPECT_TRUE(same_bits(apart.outputs(), both.outputs()));
}

// ----------------------------------------------------------------------------------------------------------- workspace

TEST(LinearWorkspace, ABudgetIsKeptAndChoosesTheSchedule) {
  LinearCall call(512, 6000, 64);
  call.hints.cpu.threads = 2;  // what a budget has room for depends on their number
  tileloss_plan roomy, tight;
  call.hints.workspace_bytes = std::int64_t{1} << 30;
  ASSERT_TRUE(succeeds(call.plan(&roomy)));
  EXPECT_EQ(roomy.cpu.schedule, TILELOSS_SCHEDULE_STASH);
  call.hints.workspace_bytes = 0;
  call.hints.cpu.schedule = TILELOSS_SCHEDULE_RECOMPUTE;
  ASSERT_TRUE(succeeds(call.plan(&tight)));
  const std::int64_t wide = tight.workspace_bytes;
  call.hints.workspace_bytes = wide - 1;  // a narrower chunk of the vocabulary
  ASSERT_TRUE(succeeds(call.plan(&tight)));
  EXPECT_LE(tight.workspace_bytes, wide - 1);
  EXPECT_EQ(tight.cpu.schedule, TILELOSS_SCHEDULE_RECOMPUTE);
  ASSERT_TRUE(call.run());
  call.hints.cpu.schedule = TILELOSS_SCHEDULE_AUTO;  // and some logits in what that leaves
  ASSERT_TRUE(succeeds(call.plan(&tight)));
  EXPECT_LE(tight.workspace_bytes, wide - 1);
  EXPECT_EQ(tight.cpu.schedule, TILELOSS_SCHEDULE_STASH);
  EXPECT_GT(tight.cpu.kept_columns, 0);
  EXPECT_LT(tight.cpu.kept_columns, 6000);
  ASSERT_TRUE(call.run());
  for (const int threads : {1, 3, 8}) {
    call.hints.cpu.threads = threads;
    ASSERT_TRUE(succeeds(call.plan(&tight)));
    EXPECT_LE(tight.workspace_bytes, wide - 1) << threads << " threads";
    ASSERT_TRUE(call.run());
  }
  call.hints.workspace_bytes = 1000;
  EXPECT_EQ(call.plan(&tight), TILELOSS_WORKSPACE_TOO_SMALL);
}

TEST(LinearWorkspace, ThePlanNamesItsBuffers) {
  for (const tileloss_schedule schedule : kSchedules) {
    LinearCall call(130, 700, 33);
    call.hints.cpu.schedule = schedule;
    tileloss_plan plan;
    ASSERT_TRUE(succeeds(call.plan(&plan)));
    ASSERT_GT(plan.buffer_count, 8);
    ASSERT_LT(plan.buffer_count, TILELOSS_MAX_PLAN_BUFFERS);
    std::int64_t sum = 0;
    bool names_logits = false;
    for (std::int64_t i = 0; i < plan.buffer_count; ++i) {
      EXPECT_GT(plan.buffers[i].bytes, 0) << plan.buffers[i].name;
      sum += plan.buffers[i].bytes;
      names_logits = names_logits || std::strcmp(plan.buffers[i].name, "logits kept") == 0;
    }
    EXPECT_EQ(sum, plan.workspace_bytes);
    EXPECT_EQ(names_logits, schedule == TILELOSS_SCHEDULE_STASH);
  }
}

}  // namespace
}  // namespace tileloss::test
