// The C++20 face, against values worked out by hand: rows of log(1), log(2), log(3) have the probabilities 1/6, 2/6, 3/6.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <tileloss/tileloss.hpp>
#include <type_traits>
#include <utility>
#include <vector>

#include "support/abi.h"

namespace tileloss::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kTolerance = 1e-6;

// What must not compile: views of temporaries, views that drop const, the wrong element type.
static_assert(!std::is_constructible_v<Vector<const float>, std::vector<float>>);
static_assert(!std::is_constructible_v<Matrix<const float>, std::vector<float>, int, int>);
static_assert(!std::is_constructible_v<LabelsView, std::vector<std::int64_t>>);
static_assert(!std::is_constructible_v<Vector<float>, const std::vector<float>&>);
static_assert(!std::is_convertible_v<Vector<const float>, Vector<float>>);
static_assert(!std::is_constructible_v<MutableLogitsView, Matrix<const float>>);
static_assert(!std::is_constructible_v<LogitsView, Matrix<std::int32_t>>);
static_assert(!std::is_constructible_v<LabelsView, std::vector<float>&>);
// What must.
template <class T>
concept HasMax = requires(T&& state) {
  std::forward<T>(state).max();
};
template <class T>
concept HasBuffers = requires(T&& plan) {
  std::forward<T>(plan).buffers();
};
static_assert(HasMax<RowState&> && !HasMax<RowState>);
static_assert(HasBuffers<const Plan&> && !HasBuffers<Plan>);
static_assert(std::is_same_v<decltype(std::declval<Status>().message()), std::string>);  // not a reference into what is gone

static_assert(std::is_constructible_v<Vector<const float>, const std::vector<float>&>);
static_assert(std::is_constructible_v<Vector<const float>, std::span<float>>);
static_assert(std::is_convertible_v<Vector<float>, Vector<const float>>);
static_assert(std::is_convertible_v<const std::vector<std::int32_t>&, LabelsView>);

testing::AssertionResult succeeds(const Status& status) {
  return status ? testing::AssertionSuccess() : testing::AssertionFailure() << status.name() << ": " << status.message();
}

class CppFace : public testing::Test {
 protected:
  // Two rows, labels 1 (p = 1/3) and ignored.
  std::vector<float> logits_ = {0, std::log(2.0F), std::log(3.0F), 7, 7, 7};
  std::vector<std::int64_t> labels_ = {1, -100};
  std::vector<float> dlogits_ = std::vector<float>(6, 99);
  std::vector<float> loss_ = {99};

  CrossEntropyArgs forward_args() { return {.logits = Matrix(logits_, 2, 3), .labels = labels_, .loss = loss_}; }
  CrossEntropyArgs cross_entropy_args() {
    return {.logits = Matrix(logits_, 2, 3), .labels = labels_, .loss = loss_, .dlogits = Matrix(dlogits_, 2, 3)};
  }
  void expect_third_row_gradient() const {
    const float expected[6] = {1 / 6.0F, 1 / 3.0F - 1, 1 / 2.0F, 0, 0, 0};
    for (std::size_t i = 0; i < 6; ++i) EXPECT_NEAR(dlogits_[i], expected[i], kTolerance) << i;
  }
};

TEST(Views, KnowTheirShapeAndStrides) {
  std::vector<float> data = {0, 1, 2, 3, 4, 5, 6, 7};
  const Matrix<const float> matrix(data.data(), 2, 3, 4);
  EXPECT_EQ(matrix.rows(), 2);
  EXPECT_EQ(matrix.cols(), 3);
  EXPECT_EQ(matrix.row_stride(), 4);
  EXPECT_EQ(matrix(1, 2), 6);
  const Vector<float> every_other(data.data(), 4, 2);
  EXPECT_EQ(every_other[3], 6);
  const float one = 1;
  const auto ones = Vector<const float>::broadcast(one, 5);
  EXPECT_EQ(ones.size(), 5);
  EXPECT_EQ(&ones[4], &one);
  EXPECT_EQ(Vector(data).size(), 8);
}

TEST(Views, DefaultConstructedOnesAreAbsent) {
  EXPECT_FALSE(Vector<float>().present());
  EXPECT_FALSE(Matrix<float>().present());
  std::vector<float> none;
  EXPECT_TRUE(Vector(none).present()) << "no elements is not the same as not given";
}

TEST(Views, CarryTheElementTypeIntoTheAbi) {
  EXPECT_EQ(Matrix<const BFloat16>(nullptr, 1, 1).c().dtype, TILELOSS_BFLOAT16);
  EXPECT_EQ(Matrix<Float16>(nullptr, 1, 1).c().dtype, TILELOSS_FLOAT16);
  EXPECT_EQ(Matrix<float>(nullptr, 1, 1).c().dtype, TILELOSS_FLOAT32);
  EXPECT_EQ(Vector<std::int32_t>(nullptr, 1).c().dtype, TILELOSS_INT32);
  EXPECT_EQ(Vector<std::int64_t>(nullptr, 1).c().dtype, TILELOSS_INT64);
  EXPECT_EQ(Vector<std::uint8_t>(nullptr, 1).c().dtype, TILELOSS_UINT8);
}

// Every field of a struct as C++ declares it against the library's own table of them.
template <class Options>
void expect_library_defaults(const char* function) {
  const Options declared;
  Options filled;
  ASSERT_EQ(tileloss_options_init(function, &filled, sizeof filled), TILELOSS_OK);
  EXPECT_EQ(declared.struct_size, filled.struct_size) << function;
  const tools::Function described(function);
  for (const tileloss_field& field : described.fields()) {
    const std::size_t bytes = field.type == TILELOSS_FIELD_SCALAR ? 16 : field.type == TILELOSS_FIELD_CHOICE ? 4 : 8;
    const auto* const a = reinterpret_cast<const char*>(&declared) + field.offset;
    const auto* const b = reinterpret_cast<const char*>(&filled) + field.offset;
    EXPECT_EQ(std::memcmp(a, b, bytes), 0) << function << "'s " << field.name;
  }
  EXPECT_GT(described.fields().size(), 7U) << function;
}

TEST(Options, DefaultsAreThoseOfTheAbi) {
  expect_library_defaults<LogprobsOptions>("linear_logprobs");
  expect_library_defaults<CrossEntropyOptions>("linear_cross_entropy");
  expect_library_defaults<PolicyLossOptions>("linear_policy_loss");
  expect_library_defaults<DistillationOptions>("linear_distillation");
  expect_library_defaults<SoftCrossEntropyOptions>("linear_soft_cross_entropy");
  expect_library_defaults<SparseDistillationOptions>("linear_sparse_distillation");
  expect_library_defaults<SweepOptions>("linear_sweep");
}

// p = (1/4, 3/4), q = (1/2, 1/2): log 2 - (log 3)/2 of the forward KL, gradient p - q.
TEST(CppFaceOfAPair, DistillationOfTwoClasses) {
  const std::vector<float> student = {0, std::log(3.0F)}, teacher = {5, 5};
  std::vector<float> gradient(2), loss(1), divergence(1);
  ASSERT_TRUE(succeeds(distillation_value_and_grad({.logits = Matrix<const float>(student.data(), 1, 2),
                                                    .teacher_logits = Matrix<const float>(teacher.data(), 1, 2),
                                                    .loss = loss,
                                                    .divergence = divergence,
                                                    .dlogits = Matrix<float>(gradient.data(), 1, 2)})));
  EXPECT_NEAR(loss[0], std::log(2.0) - std::log(3.0) / 2, kTolerance);
  EXPECT_EQ(divergence[0], loss[0]);
  EXPECT_NEAR(gradient[0], -0.25, kTolerance);
  EXPECT_NEAR(gradient[1], 0.25, kTolerance);
}

TEST_F(CppFace, CrossEntropyOfOneThird) {
  ASSERT_TRUE(succeeds(cross_entropy_value_and_grad(cross_entropy_args())));
  EXPECT_NEAR(loss_[0], std::log(3.0), kTolerance);
  expect_third_row_gradient();
}

TEST_F(CppFace, LabelSmoothingByDesignatedInitialiser) {
  ASSERT_TRUE(succeeds(cross_entropy(forward_args(), {.label_smoothing = 0.3})));
  // -log p of the three columns: log 6, log 3, log 2; their mean is log(36) / 3.
  EXPECT_NEAR(loss_[0], 0.7 * std::log(3.0) + 0.3 * std::log(36.0) / 3, kTolerance);
}

TEST_F(CppFace, ReductionNoneGivesRows) {
  CrossEntropyArgs args = forward_args();
  std::vector<float> rows(2, 99);
  args.loss = rows;
  ASSERT_TRUE(succeeds(cross_entropy(args, {.reduction = TILELOSS_REDUCTION_NONE})));
  EXPECT_NEAR(rows[0], std::log(3.0), kTolerance);
  EXPECT_EQ(rows[1], 0) << "ignored";
}

TEST_F(CppFace, NumItemsIsTheMeansDenominator) {
  ASSERT_TRUE(succeeds(cross_entropy(forward_args(), {.num_items = 4})));
  EXPECT_NEAR(loss_[0], std::log(3.0) / 4, kTolerance);
}

TEST_F(CppFace, TemperatureIsReadWhereItStands) {
  float temperature = 1;
  const CrossEntropyOptions options = {.logit = {.temperature = {0, &temperature}}};
  ASSERT_TRUE(succeeds(cross_entropy(forward_args(), options)));
  EXPECT_NEAR(loss_[0], std::log(3.0), kTolerance);
  temperature = 0.5;  // squares the weights: 1, 4, 9
  ASSERT_TRUE(succeeds(cross_entropy(forward_args(), options)));
  EXPECT_NEAR(loss_[0], std::log(14.0 / 4), kTolerance);
}

TEST_F(CppFace, GradientsMayReplaceTheLogits) {
  CrossEntropyArgs args = cross_entropy_args();
  args.dlogits = Matrix(logits_, 2, 3);
  ASSERT_TRUE(succeeds(cross_entropy_value_and_grad(args)));
  dlogits_ = logits_;
  expect_third_row_gradient();
}

TEST_F(CppFace, BackwardTakesTheForwardsRowState) {
  RowState state(2);
  CrossEntropyArgs args = forward_args();
  args.row_state = state.c();
  ASSERT_TRUE(succeeds(cross_entropy(args)));
  EXPECT_NEAR(state.max()[0], std::log(3.0), kTolerance);
  EXPECT_NEAR(state.sum()[0], 4.0 / 3, kTolerance) << "the label's column is left out: (1 + 3) / 3";
  EXPECT_NEAR(state.label_logit()[0], std::log(2.0), kTolerance);
  const std::vector<float> upstream = {2};
  args.loss_grad = upstream;
  args.loss = {};
  args.dlogits = Matrix(dlogits_, 2, 3);
  ASSERT_TRUE(succeeds(cross_entropy_backward(args)));
  for (float& gradient : dlogits_) gradient /= 2;
  expect_third_row_gradient();
}

TEST_F(CppFace, LogprobsGivesEveryRowOutput) {
  const std::vector<std::int32_t> labels = {2, -100};
  std::vector<float> logp(2), lse(2), entropy(2), log_sum_sq_probs(2), mean_logit(2);
  std::vector<std::int64_t> argmax(2);
  std::vector<std::uint8_t> correct(2);
  ASSERT_TRUE(succeeds(logprobs({.logits = Matrix(logits_, 2, 3),
                                 .labels = labels,
                                 .logp = logp,
                                 .lse = lse,
                                 .entropy = entropy,
                                 .argmax = argmax,
                                 .correct = correct,
                                 .log_sum_sq_probs = log_sum_sq_probs,
                                 .mean_logit = mean_logit})));
  EXPECT_NEAR(logp[0], -std::log(2.0), kTolerance);
  EXPECT_NEAR(lse[0], std::log(6.0), kTolerance);
  EXPECT_NEAR(entropy[0], std::log(6.0) / 6 + std::log(3.0) / 3 + std::log(2.0) / 2, kTolerance);
  EXPECT_EQ(argmax[0], 2);
  EXPECT_EQ(correct[0], 1);
  EXPECT_NEAR(log_sum_sq_probs[0], std::log(14.0 / 36), kTolerance);
  EXPECT_NEAR(mean_logit[0], std::log(6.0) / 3, kTolerance);
  EXPECT_EQ(logp[1], 0);
  EXPECT_EQ(argmax[1], -1);
}

TEST_F(CppFace, LogprobsBackwardOfEntropy) {
  const std::vector<float> upstream = {1, 1};
  ASSERT_TRUE(succeeds(logprobs_backward(
      {.logits = Matrix(logits_, 2, 3), .labels = labels_, .entropy_grad = upstream, .dlogits = Matrix(dlogits_, 2, 3)})));
  const double entropy = std::log(6.0) / 6 + std::log(3.0) / 3 + std::log(2.0) / 2;
  for (int j = 0; j < 3; ++j) {
    const double p = (j + 1) / 6.0;
    EXPECT_NEAR(dlogits_[static_cast<std::size_t>(j)], -p * (entropy + std::log(p)), kTolerance) << j;
  }
}

template <class T>
class HalfStorage : public testing::Test {};
struct BFloat16Case {
  using Storage = BFloat16;
  static constexpr std::uint16_t kHalf = 0x3F00;
  static constexpr const char* kName = "bfloat16";
};
struct Float16Case {
  using Storage = Float16;
  static constexpr std::uint16_t kHalf = 0x3800;
  static constexpr const char* kName = "float16";
};
using HalfStorages = testing::Types<BFloat16Case, Float16Case>;
struct CaseName {
  template <class Case>
  static std::string GetName(int /*index*/) {
    return Case::kName;
  }
};
TYPED_TEST_SUITE(HalfStorage, HalfStorages, CaseName);

TYPED_TEST(HalfStorage, EvenOddsGiveHalves) {
  using Storage = typename TypeParam::Storage;
  std::vector<Storage> logits(2), dlogits(2);
  const std::vector<std::int64_t> labels = {0};
  std::vector<float> loss(1);
  ASSERT_TRUE(succeeds(cross_entropy_value_and_grad(
      {.logits = Matrix(logits, 1, 2), .labels = labels, .loss = loss, .dlogits = Matrix(dlogits, 1, 2)})));
  EXPECT_NEAR(loss[0], std::log(2.0), kTolerance);
  EXPECT_EQ(dlogits[0].bits, TypeParam::kHalf | 0x8000);
  EXPECT_EQ(dlogits[1].bits, TypeParam::kHalf);
}

TEST_F(CppFace, ErrorsNameTheRowAndOutliveLaterCalls) {
  labels_[0] = 3;
  const Status status = cross_entropy_value_and_grad(cross_entropy_args());
  EXPECT_FALSE(status);
  EXPECT_EQ(status.code(), StatusCode::kLabelOutOfRange);
  EXPECT_NE(status.message().find('3'), std::string::npos) << status.message();
  EXPECT_EQ(dlogits_[0], 99) << "nothing is written";
  EXPECT_FALSE(cross_entropy(forward_args(), {.label_smoothing = 2}).ok());
  EXPECT_EQ(status.message().find("label_smoothing"), std::string::npos) << "another call's message: " << status.message();
  EXPECT_TRUE(Status().ok());
  EXPECT_TRUE(Status().message().empty());
}

TEST_F(CppFace, AMatrixLargerThanItsStorageIsRefused) {
  CrossEntropyArgs args = forward_args();
  args.logits = Matrix(logits_, 2, 4);
  const Status status = cross_entropy(args);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("null"), std::string::npos) << status.message();
}

TEST_F(CppFace, PlanNeedsNoDataAndRunsInTheCallersWorkspace) {
  const CrossEntropyArgs shapes = {.logits = Matrix<const float>(nullptr, 2, 3),
                                   .labels = Vector<const std::int64_t>(nullptr, 2),
                                   .loss = Vector<float>(nullptr, 1),
                                   .dlogits = Matrix<float>(nullptr, 2, 3)};
  const auto [status, plan] = tileloss::plan(Pass::kValueAndGrad, shapes);
  ASSERT_TRUE(succeeds(status));
  EXPECT_EQ(plan.function(), "cross_entropy");
  EXPECT_EQ(plan.pass(), Pass::kValueAndGrad);
  ASSERT_NE(plan.cpu(), nullptr);
  EXPECT_NE(plan.cpu()->isa, TILELOSS_ISA_AUTO);
  EXPECT_TRUE(supported(Isa{plan.cpu()->isa}));
  EXPECT_NE(plan.cpu()->schedule, TILELOSS_SCHEDULE_AUTO);
  EXPECT_GE(plan.cpu()->threads, 1);
  EXPECT_GE(plan.workspace_bytes(), 0);

  std::vector<std::byte> memory(static_cast<std::size_t>(plan.workspace_bytes()) + 64);
  void* aligned = memory.data();
  std::size_t space = memory.size();
  ASSERT_NE(std::align(64, static_cast<std::size_t>(plan.workspace_bytes()), aligned, space), nullptr);
  const std::span<std::byte> workspace(static_cast<std::byte*>(aligned), static_cast<std::size_t>(plan.workspace_bytes()));
  ASSERT_TRUE(succeeds(cross_entropy_value_and_grad(cross_entropy_args(), {}, {.plan = &plan, .workspace = workspace})));
  expect_third_row_gradient();
}

TEST_F(CppFace, APlanFitsOnlyWhatWasPlanned) {
  const auto [status, plan] = tileloss::plan(Pass::kValueAndGrad, cross_entropy_args());
  ASSERT_TRUE(succeeds(status));
  EXPECT_EQ(cross_entropy_value_and_grad(cross_entropy_args(), {.z_loss = 0.1}, {.plan = &plan}).code(),
            StatusCode::kPlanMismatch);
}

TEST_F(CppFace, PlannersHintsAreKept) {
  const auto [status, plan] = tileloss::plan(Pass::kValueAndGrad, cross_entropy_args(), {},
                                             {.cpu = {.isa = Isa::kBaseline, .schedule = Schedule::kSweeps}});
  ASSERT_TRUE(succeeds(status));
  ASSERT_NE(plan.cpu(), nullptr);
  EXPECT_EQ(plan.cpu()->isa, TILELOSS_ISA_BASELINE);
  EXPECT_EQ(plan.cpu()->schedule, TILELOSS_SCHEDULE_SWEEPS);
  EXPECT_STREQ(name(Isa{plan.cpu()->isa}), "baseline");
}

// Enough rows that the work is worth handing out.
class CppExecutor : public testing::Test {
 protected:
  static constexpr std::int64_t kRows = 256;
  static constexpr std::int64_t kCols = 4096;
  std::vector<float> logits_ = std::vector<float>(kRows * kCols);
  std::vector<std::int32_t> labels_ = std::vector<std::int32_t>(kRows);
  std::vector<float> expected_ = std::vector<float>(kRows);
  std::vector<float> logp_ = std::vector<float>(kRows, 99);

  void SetUp() override {
    for (std::size_t i = 0; i < logits_.size(); ++i) logits_[i] = static_cast<float>((i * 2654435761U) % 1024) / 128;
    for (std::size_t i = 0; i < labels_.size(); ++i) labels_[i] = static_cast<std::int32_t>((i * 37) % kCols);
    ASSERT_TRUE(succeeds(logprobs(args(expected_))));
  }
  LogprobsArgs args(std::vector<float>& logp) {
    return {.logits = Matrix(logits_, kRows, kCols), .labels = labels_, .logp = logp};
  }
};

TEST_F(CppExecutor, ParallelForOfTheHostDoesTheWork) {
  int calls = 0;
  auto parallel_for = [&](std::int64_t count, Task task) {
    ++calls;
    for (std::int64_t i = count - 1; i >= 0; --i) task(i);  // any order will do
  };
  const Executor executor = Executor::from_parallel_for(parallel_for, 2);
  ASSERT_TRUE(succeeds(logprobs(args(logp_), {}, {.executor = &executor})));
  EXPECT_GT(calls, 0);
  EXPECT_EQ(logp_, expected_);
}

TEST_F(CppExecutor, ScheduledTasksMayRunAtOnceOnOtherThreads) {
  std::vector<std::thread> threads;
  auto schedule = [&](Task task, std::int64_t index) { threads.emplace_back([=] { task(index); }); };
  const Executor executor = Executor::from_schedule(schedule, 3);
  ASSERT_TRUE(succeeds(logprobs(args(logp_), {}, {.executor = &executor})));
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(threads.empty());
  EXPECT_EQ(logp_, expected_);
}

TEST_F(CppExecutor, ScheduledTasksThatArriveLateFindNothingToDo) {
  std::vector<std::pair<Task, std::int64_t>> late;
  auto schedule = [&](Task task, std::int64_t index) { late.emplace_back(task, index); };
  const Executor executor = Executor::from_schedule(schedule, 3);
  ASSERT_TRUE(succeeds(logprobs(args(logp_), {}, {.executor = &executor})));
  EXPECT_EQ(logp_, expected_);
  logp_.assign(logp_.size(), 99);
  EXPECT_FALSE(late.empty());
  for (const auto& [task, index] : late) task(index);
  EXPECT_EQ(logp_, std::vector<float>(logp_.size(), 99)) << "a late task wrote";
}

TEST(RowStateOwner, StartsAsTheIdentity) {
  const RowState state(2, {.entropy_sum = true, .argmax = true});
  EXPECT_EQ(state.rows(), 2);
  EXPECT_EQ(state.max()[1], -kInfinity);
  EXPECT_EQ(state.label_logit()[1], -kInfinity);
  EXPECT_EQ(state.sum()[1], 0);
  EXPECT_EQ(state.entropy_sum()[1], 0);
  EXPECT_EQ(state.argmax()[1], -1);
  EXPECT_TRUE(state.smoothing_sum().empty());
}

TEST(RowStateOwner, OfNoRowsIsThereToo) {
  RowState state(0);
  RowState copy = state;
  EXPECT_NE(copy.c()->max, nullptr);
  EXPECT_TRUE(state.merge(copy).ok());
}

TEST(RowStateOwner, AgreesWithTheAbiOnTheIdentity) {
  const RowStateFields every = {.entropy_sum = true,
                                .collision_sum = true,
                                .smoothing_sum = true,
                                .argmax = true,
                                .allowed_count = true,
                                .allowed_weight = true,
                                .labels_per_row = 2};
  const RowState expected(1, every);
  RowState state(1, every);
  tileloss_row_state& c = *state.c();
  c.allowed_count[0] = c.allowed_weight[0] = c.label_logits[0] = c.label_logits[1] = 5;
  c.max[0] = c.sum[0] = c.label_logit[0] = c.entropy_sum[0] = c.collision_sum[0] = c.smoothing_sum[0] = 5;
  c.argmax[0] = 5;
  ASSERT_EQ(tileloss_row_state_set_identity(&c), TILELOSS_OK);
  EXPECT_EQ(state.max()[0], expected.max()[0]);
  EXPECT_EQ(state.sum()[0], expected.sum()[0]);
  EXPECT_EQ(state.label_logit()[0], expected.label_logit()[0]);
  EXPECT_EQ(state.entropy_sum()[0], expected.entropy_sum()[0]);
  EXPECT_EQ(state.collision_sum()[0], expected.collision_sum()[0]);
  EXPECT_EQ(state.smoothing_sum()[0], expected.smoothing_sum()[0]);
  EXPECT_EQ(state.argmax()[0], expected.argmax()[0]);
  EXPECT_EQ(state.allowed_count()[0], expected.allowed_count()[0]);
  EXPECT_EQ(state.allowed_weight()[0], expected.allowed_weight()[0]);
  for (std::size_t k = 0; k < 2; ++k) EXPECT_EQ(state.label_logits()[k], expected.label_logits()[k]);
}

TEST_F(CppFace, MergedShardsGiveTheWholeRow) {
  // Columns {0, 1} on one machine, {2} on another; the first holds the label.
  const RowStateFields fields = {.smoothing_sum = true};
  RowState first(2, fields), second(2, fields);
  first.set_smoothing_weight(2);
  second.set_smoothing_weight(1);
  const LogitOptions first_columns = {.vocab_start = 0, .vocab_total = 3};
  const LogitOptions second_columns = {.vocab_start = 2, .vocab_total = 3};
  ASSERT_TRUE(
      succeeds(cross_entropy({.logits = Matrix<const float>(logits_.data(), 2, 2, 3), .labels = labels_, .row_state = first.c()},
                             {.logit = first_columns, .label_smoothing = 0.3})));
  ASSERT_TRUE(succeeds(
      cross_entropy({.logits = Matrix<const float>(logits_.data() + 2, 2, 1, 3), .labels = labels_, .row_state = second.c()},
                    {.logit = second_columns, .label_smoothing = 0.3})));
  EXPECT_EQ(second.label_logit()[0], -kInfinity) << "the shard without the label";
  ASSERT_TRUE(succeeds(first.merge(second)));
  EXPECT_EQ(first.smoothing_weight(), 3);

  const Status status = cross_entropy_from_row_state({.labels = labels_, .loss = loss_, .row_state = first.c()},
                                                     {.logit = {.vocab_total = 3}, .label_smoothing = 0.3});
  ASSERT_TRUE(succeeds(status));
  EXPECT_NEAR(loss_[0], 0.7 * std::log(3.0) + 0.3 * std::log(36.0) / 3, kTolerance);
}

TEST_F(CppFace, MergedShardsOfSeveralLabelsAreTheWholeRow) {
  const RowStateFields fields = {.labels_per_row = 2};
  RowState first(2, fields), second(2, fields);
  const std::vector<std::int64_t> labels = {1, 2, 0, -100};
  std::vector<float> whole(4), logp(4);
  ASSERT_TRUE(succeeds(logprobs(
      {.logits = Matrix<const float>(logits_.data(), 2, 3, 3), .labels = labels, .labels_per_row = 2, .logp = whole}, {})));
  const auto sweep = [&](std::int64_t start, std::int64_t columns, RowState& state) {
    return logprobs({.logits = Matrix<const float>(logits_.data() + start, 2, columns, 3),
                     .labels = labels,
                     .labels_per_row = 2,
                     .row_state = state.c()},
                    {.logit = {.vocab_start = start, .vocab_total = 3}});
  };
  ASSERT_TRUE(succeeds(sweep(0, 2, first)));
  ASSERT_TRUE(succeeds(sweep(2, 1, second)));
  EXPECT_EQ(second.label_logits()[0], -kInfinity) << "the first shard's";
  EXPECT_EQ(second.label_logits()[1], second.label_logit()[0]);
  ASSERT_TRUE(succeeds(first.merge(second)));
  EXPECT_EQ(first.label_logits().size(), 4U);
  ASSERT_TRUE(succeeds(logprobs_from_row_state({.labels = labels, .labels_per_row = 2, .logp = logp, .row_state = first.c()},
                                               {.logit = {.vocab_total = 3}})));
  for (std::size_t n = 0; n < logp.size(); ++n) EXPECT_NEAR(logp[n], whole[n], kTolerance) << n;
}

TEST(RowStateOwner, MergeKeepsNaN) {
  RowState a(1), b(1);
  a.c()->max[0] = std::numeric_limits<float>::quiet_NaN();
  a.c()->sum[0] = 1;
  b.c()->max[0] = 2;
  b.c()->sum[0] = 1;
  ASSERT_TRUE(succeeds(b.merge(a)));
  EXPECT_TRUE(std::isnan(b.max()[0]));
}

TEST(RowStateOwner, MergeRefusesOtherRows) {
  RowState two(2), three(3);
  EXPECT_EQ(two.merge(three).code(), StatusCode::kInvalidArgument);
}

TEST(Machine, ListsItsInstructionSets) {
  EXPECT_TRUE(supported(Isa::kBaseline));
  EXPECT_GE(default_threads(), 1);
  EXPECT_FALSE(std::string(version()).empty());
}

}  // namespace
}  // namespace tileloss::test
