// The LM head of the CUDA backend, on the host (tests/cuda_on_host): budgets, graphs, what is chosen once, and bits that depend
// on nothing but the row. That its numbers are right is for the C API's own suites to say: cuda_in_place.cpp.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <functional>
#include <tuple>
#include <utility>

#include "backends/cuda/cuda_backend.h"
#include "support/synthetic.h"
#include "tests/api/calls.h"
#include "tests/cuda_on_host/cublas_lt.h"
#include "tests/cuda_on_host/device_array.h"

namespace tileloss::test {
namespace {

const bool is_registered = (impl::add_backend(&impl::cuda::cuda_backend()), true);

constexpr tileloss_pass kBoth = TILELOSS_VALUE_AND_GRAD;
constexpr std::int64_t kVocab = 700, kWidth = 24, kTeacherWidth = 16, kRank = 12, kColumns = 5;
using impl::TargetKind;

std::vector<std::uint16_t> random_words(std::uint64_t seed, std::int64_t count) {
  tools::Random random(seed, tools::Stream::kLogits, -1);
  std::vector<std::uint16_t> words(static_cast<std::size_t>(count));
  for (std::uint16_t& w : words) w = impl::from_float<impl::Bfloat16>(static_cast<float>(random.next_normal())).bits;
  return words;
}

struct Numbers {
  std::vector<float> logp, loss, dhidden, dbias, dhidden_r;
  std::vector<std::uint16_t> dhead, dhead_r;
  bool operator==(const Numbers&) const = default;
};

// A head in bfloat16 whose first rows are the same for any number of them; the second is ignored. Held against any target.
class Head {
 public:
  struct Shape {
    std::int64_t rows = 37;
    std::int64_t offset = 0, gap = 0;  // of the head, in elements: before the first row, and between two
    int device = 0;
    bool has_nan = false;  // in the last class of the head
    TargetKind target = TargetKind::kLabels;
    double softcap = 0;
    float label_smoothing = 0;      // of labels
    std::int64_t dhead_offset = 0;  // in elements: before the first row
    std::int64_t rank = 0;          // of a low-rank part
  };

  Head() : Head(Shape{}) {}
  explicit Head(const Shape& shape)
      : rows_(shape.rows),
        target_(shape.target),
        hidden_(random_words(1, shape.rows * kWidth)),
        head_(gaps(shape)),
        teacher_hidden_(random_words(3, shape.rows * kTeacherWidth)),
        teacher_head_(random_words(4, kVocab * kTeacherWidth)),
        probs_(probabilities(shape.rows)),
        logprobs_(std::vector<float>(static_cast<std::size_t>(shape.rows * kColumns), -2.5F)),
        ids_(columns(shape.rows)),
        labels_(labels(shape.rows)),
        logp_(static_cast<std::size_t>(shape.rows)),
        loss_(static_cast<std::size_t>(shape.rows)),
        dhidden_(static_cast<std::size_t>(shape.rows * kWidth)),
        dbias_(kVocab),
        dhead_offset_(shape.dhead_offset),
        dhead_(static_cast<std::size_t>(shape.dhead_offset + kVocab * kWidth)),
        hidden_r_(random_words(6, shape.rows * shape.rank)),
        head_r_(random_words(7, kVocab * shape.rank)),
        dhead_r_(static_cast<std::size_t>(kVocab * shape.rank)),
        dhidden_r_(static_cast<std::size_t>(shape.rows * shape.rank)) {
    tileloss_args_init(&args);
    args.hidden = tileloss_make_matrix(hidden_.data(), TILELOSS_BFLOAT16, rows_, kWidth, kWidth);
    args.head = tileloss_make_matrix(head_.data() + shape.offset, TILELOSS_BFLOAT16, kVocab, kWidth, kWidth + shape.gap);
    args.labels = tileloss_make_vector(labels_.data(), TILELOSS_INT64, rows_);
    args.logp = tileloss_make_vector(logp_.data(), TILELOSS_FLOAT32, rows_);
    args.loss = tileloss_make_vector(loss_.data(), TILELOSS_FLOAT32, rows_);
    args.dhidden = tileloss_make_matrix(dhidden_.data(), TILELOSS_FLOAT32, rows_, kWidth, kWidth);
    args.dhead = tileloss_make_matrix(dhead_.data() + dhead_offset_, TILELOSS_BFLOAT16, kVocab, kWidth, kWidth);
    args.dbias = tileloss_make_vector(dbias_.data(), TILELOSS_FLOAT32, kVocab);
    if (const std::int64_t rank = shape.rank; rank > 0) {
      args.hidden_r = tileloss_make_matrix(hidden_r_.data(), TILELOSS_BFLOAT16, rows_, rank, rank);
      args.head_r = tileloss_make_matrix(head_r_.data(), TILELOSS_BFLOAT16, kVocab, rank, rank);
      args.dhidden_r = tileloss_make_matrix(dhidden_r_.data(), TILELOSS_FLOAT32, rows_, rank, rank);
      args.dhead_r = tileloss_make_matrix(dhead_r_.data(), TILELOSS_BFLOAT16, kVocab, rank, rank);
    }
    if (target_ == TargetKind::kLogits) {
      args.teacher_hidden = tileloss_make_matrix(teacher_hidden_.data(), TILELOSS_BFLOAT16, rows_, kTeacherWidth, kTeacherWidth);
      args.teacher_head = tileloss_make_matrix(teacher_head_.data(), TILELOSS_BFLOAT16, kVocab, kTeacherWidth, kTeacherWidth);
    } else if (target_ == TargetKind::kColumns) {
      args.teacher_ids = tileloss_make_matrix(ids_.data(), TILELOSS_INT32, rows_, kColumns, kColumns);
      args.teacher_logprobs = tileloss_make_matrix(logprobs_.data(), TILELOSS_FLOAT32, rows_, kColumns, kColumns);
    } else if (target_ == TargetKind::kProbabilities) {
      args.target_probs = tileloss_make_matrix(probs_.data(), TILELOSS_BFLOAT16, rows_, kVocab, kVocab);
    }
    for (tileloss_matrix* m :
         {&args.hidden, &args.head, &args.dhidden, &args.dhead, &args.teacher_hidden, &args.teacher_head, &args.teacher_ids,
          &args.teacher_logprobs, &args.target_probs, &args.hidden_r, &args.head_r, &args.dhidden_r, &args.dhead_r}) {
      m->device_type = TILELOSS_CUDA;
      m->device_index = shape.device;
    }
    for (tileloss_vector* v : {&args.labels, &args.logp, &args.loss, &args.dbias}) {
      v->device_type = TILELOSS_CUDA;
      v->device_index = shape.device;
    }
    for (tileloss_logit_options* o : all_logit_options()) o->softcap = shape.softcap;
    options_.label_smoothing = shape.label_smoothing;
    hints.cuda.vocab_block = 256;
    hints.cuda.row_block = 16;
  }

  tileloss_status make_plan(tileloss_plan* plan, tileloss_pass pass = kBoth) const {
    return tileloss_make_plan(function(), pass, &args, options_of_target(), &hints, nullptr, plan);
  }
  // In a workspace of the plan's size, behind which nothing can be written.
  tileloss_plan run() {
    auto plan = init<tileloss_plan>();
    EXPECT_TRUE(succeeds(make_plan(&plan)));
    const DeviceArray<std::uint8_t> workspace(static_cast<std::size_t>(plan.workspace_bytes));
    auto run = init<tileloss_run>();
    run.workspace = workspace.data();
    run.workspace_bytes = static_cast<std::size_t>(plan.workspace_bytes);
    EXPECT_TRUE(succeeds(call(plan, &run)));
    cudaDeviceSynchronize();
    return plan;
  }
  tileloss_status call(const tileloss_plan& plan, const tileloss_run* run, tileloss_pass pass = kBoth) const {
    return tileloss_call(function(), pass, &args, options_of_target(), &plan, run);
  }
  Numbers get() const {
    std::vector<std::uint16_t> dhead = dhead_.get();
    dhead.erase(dhead.begin(), dhead.begin() + dhead_offset_);
    return {logp_.get(), loss_.get(), dhidden_.get(), dbias_.get(), dhidden_r_.get(), dhead, dhead_r_.get()};
  }
  Numbers run_and_get() {
    run();
    return get();
  }
  void forget() const {
    for (const auto* sums : {&logp_, &loss_, &dhidden_, &dbias_, &dhidden_r_})
      cudaMemset(sums->data(), 0, sums->get().size() * sizeof(float));
    cudaMemset(dhead_.data() + dhead_offset_, 0, kVocab * kWidth * 2);
    cudaMemset(dhead_r_.data(), 0, dhead_r_.get().size() * 2);
    cudaDeviceSynchronize();
  }

  void set_ignore_index(std::int64_t index) {
    for (tileloss_logit_options* o : all_logit_options()) o->ignore_index = index;
  }

  tileloss_args args;
  tileloss_plan_options hints = plan_options();

 private:
  std::array<tileloss_logit_options*, 4> all_logit_options() {
    return {&options_.logit, &distillation_.logit, &sparse_.logit, &soft_.logit};
  }
  const char* function() const {
    switch (target_) {
      case TargetKind::kLogits: return "linear_distillation";
      case TargetKind::kColumns: return "linear_sparse_distillation";
      case TargetKind::kProbabilities: return "linear_soft_cross_entropy";
      default: return "linear_cross_entropy";
    }
  }
  const void* options_of_target() const {
    switch (target_) {
      case TargetKind::kLogits: return &distillation_;
      case TargetKind::kColumns: return &sparse_;
      case TargetKind::kProbabilities: return &soft_;
      default: return &options_;
    }
  }
  static std::vector<std::uint16_t> probabilities(std::int64_t rows) {
    std::vector<std::uint16_t> words = random_words(5, rows * kVocab);
    for (std::uint16_t& w : words) w = static_cast<std::uint16_t>((w & 0x7fff) - (8 << 7));  // |x| / 256
    return words;
  }
  // The label's own is among the first row's; those of a row lie in different chunks.
  static std::vector<std::int32_t> columns(std::int64_t rows) {
    std::vector<std::int32_t> all;
    for (std::int64_t i = 0; i < rows * kColumns; ++i)
      all.push_back(static_cast<std::int32_t>((i / kColumns * 7 + i % kColumns * 139) % kVocab));
    return all;
  }
  static std::vector<std::int64_t> labels(std::int64_t rows) {
    std::vector<std::int64_t> all;
    for (std::int64_t i = 0; i < rows; ++i) all.push_back(i == 1 ? -100 : i * 131 % kVocab);
    return all;
  }
  // What lies between the rows is NaN.
  static std::vector<std::uint16_t> gaps(const Shape& shape) {
    std::vector<std::uint16_t> values = random_words(2, kVocab * kWidth);
    if (shape.has_nan) values.back() = 0x7fc0;
    std::vector<std::uint16_t> all(static_cast<std::size_t>(shape.offset + kVocab * (kWidth + shape.gap)), 0x7fc0);
    for (std::int64_t v = 0; v < kVocab; ++v)
      std::copy_n(values.begin() + v * kWidth, kWidth, all.begin() + shape.offset + v * (kWidth + shape.gap));
    return all;
  }

  std::int64_t rows_;
  TargetKind target_;
  tileloss_cross_entropy_options options_{.reduction = TILELOSS_REDUCTION_NONE};
  // Of a transform that rounds; a divergence whose gradient in all chunks follows from the row's largest column; a label with a
  // temperature of its own.
  static constexpr tileloss_logit_options kWarm = {.temperature = {0.7, nullptr}};
  tileloss_distillation_options distillation_{.logit = kWarm,
                                              .divergence = TILELOSS_SKEW_FORWARD_KL,
                                              .reduction = TILELOSS_REDUCTION_NONE,
                                              .beta = 0.25,
                                              .label_weight = {0.25, nullptr},
                                              .divergence_weight = {0.75, nullptr},
                                              .label_temperature = {2, nullptr}};
  tileloss_sparse_distillation_options sparse_{.logit = kWarm,
                                               .divergence = TILELOSS_REVERSE_KL,
                                               .reduction = TILELOSS_REDUCTION_NONE,
                                               .label_weight = {0.25, nullptr},
                                               .divergence_weight = {0.75, nullptr}};
  tileloss_soft_cross_entropy_options soft_{.logit = kWarm, .label_smoothing = 0.125, .reduction = TILELOSS_REDUCTION_NONE};
  DeviceArray<std::uint16_t> hidden_, head_, teacher_hidden_, teacher_head_, probs_;
  DeviceArray<float> logprobs_;
  DeviceArray<std::int32_t> ids_;
  DeviceArray<std::int64_t> labels_;
  DeviceArray<float> logp_, loss_, dhidden_, dbias_;
  std::int64_t dhead_offset_;
  DeviceArray<std::uint16_t> dhead_, hidden_r_, head_r_, dhead_r_;
  DeviceArray<float> dhidden_r_;
};

// The least budget is the one that the error names.
std::int64_t least_budget(Head& head) {
  head.hints.workspace_bytes = 1;
  auto plan = init<tileloss_plan>();
  EXPECT_EQ(head.make_plan(&plan), TILELOSS_WORKSPACE_TOO_SMALL);
  std::int64_t needed = 0;
  EXPECT_EQ(std::sscanf(tileloss_last_error(), "workspace_bytes: expected at least %ld, got a budget of 1", &needed), 1);
  return needed;
}

// With a budget that holds so much more than a plan that keeps nothing.
void keep(Head& head, std::int64_t bytes) {
  head.hints.cuda.schedule = TILELOSS_SCHEDULE_RECOMPUTE;
  auto plan = init<tileloss_plan>();
  EXPECT_TRUE(succeeds(head.make_plan(&plan)));
  head.hints.cuda.schedule = TILELOSS_SCHEDULE_AUTO;
  head.hints.workspace_bytes = plan.workspace_bytes + bytes;
}

// What the first of three blocks of the vocabulary takes. All of them take twice as much: dlogits lie over words then.
constexpr std::int64_t kBlockOfWords = 37 * 256 * 2 + 64;
// And 16 rows of a target that is not labels.
constexpr std::int64_t kRowsOfTarget = 16 * 704 * 4;

// Held against a target, with a low-rank part or without.
class CudaHeadOf : public testing::TestWithParam<std::tuple<TargetKind, std::int64_t>> {
 protected:
  static Head::Shape shape(Head::Shape of = {}) {
    std::tie(of.target, of.rank) = GetParam();
    return of;
  }
};
std::string head_name(const testing::TestParamInfo<CudaHeadOf::ParamType>& of) {
  const char* const names[] = {"labels", "logits", "columns", "probabilities"};
  const auto [target, rank] = of.param;
  return std::string(names[static_cast<int>(target)]) + (rank > 0 ? "_low_rank" : "");
}
INSTANTIATE_TEST_SUITE_P(Targets, CudaHeadOf,
                         testing::Combine(testing::Values(TargetKind::kLabels, TargetKind::kLogits, TargetKind::kColumns,
                                                          TargetKind::kProbabilities),
                                          testing::Values(0, kRank)),
                         head_name);

TEST_P(CudaHeadOf, EveryBudgetIsKeptAndChangesNoRowsOutputs) {
  Head whole(shape());
  const std::int64_t all = whole.run().workspace_bytes;
  const Numbers expected = whole.get();
  EXPECT_TRUE(std::isfinite(expected.logp[0]) && expected.logp[0] < 0);
  EXPECT_TRUE(std::isfinite(expected.loss[0]) && expected.loss[0] != 0);
  Head head(shape());
  head.hints.cuda.row_block = 0;
  const std::int64_t least = least_budget(head);
  EXPECT_LT(least, all);
  for (const std::int64_t budget : {least, (3 * least + all) / 4, (least + all) / 2, all}) {
    head.hints.workspace_bytes = budget;
    head.forget();
    const tileloss_plan plan = head.run();
    EXPECT_LE(plan.workspace_bytes, budget);
    std::int64_t parts = 0;
    for (std::int64_t i = 0; i < plan.buffer_count; ++i) parts += plan.buffers[i].bytes;
    EXPECT_EQ(parts, plan.workspace_bytes);
    const Numbers got = head.get();
    EXPECT_EQ(got.logp, expected.logp) << budget;
    EXPECT_EQ(got.loss, expected.loss) << budget;
    for (std::size_t i = 0; i < got.dhidden.size(); ++i) ASSERT_NEAR(got.dhidden[i], expected.dhidden[i], 1e-5) << i;
    for (std::size_t i = 0; i < got.dbias.size(); ++i) ASSERT_NEAR(got.dbias[i], expected.dbias[i], 1e-6) << i;
  }
}

// Whatever of the logits waits for the backward, and whatever of both sides is made again; in words, of labels, or in float32.
TEST_P(CudaHeadOf, WhatIsKeptChangesNoBits) {
  for (const auto& [softcap, label_smoothing] : {std::pair{0.0, 0.0f}, {5.0, 0.0f}, {0.0, 0.25f}}) {
    const Head::Shape with = shape({.softcap = softcap, .label_smoothing = label_smoothing});
    const Numbers expected = Head(with).run_and_get();
    for (const std::int64_t bytes : {std::int64_t{0}, kBlockOfWords, 2 * kBlockOfWords, kRowsOfTarget, 2 * kRowsOfTarget}) {
      Head head(with);
      keep(head, bytes);
      EXPECT_TRUE(head.run_and_get() == expected) << bytes << ", softcap " << softcap << ", smoothing " << label_smoothing;
    }
  }
}

TEST(CudaHead, APlanHoldsWhatItsCallTakesAndNoLess) {
  const Head head;
  auto plan = init<tileloss_plan>();
  ASSERT_TRUE(succeeds(head.make_plan(&plan)));
  const std::string needed = std::to_string(plan.workspace_bytes);
  plan.workspace_bytes -= 64;
  EXPECT_TRUE(refused(head.call(plan, nullptr), TILELOSS_INVALID_ARGUMENT,
                      "plan.workspace_bytes: expected at least the " + needed + " that the rows and the head need, got " +
                          std::to_string(plan.workspace_bytes)));
  plan.other[3] = 96;  // chunk_columns
  EXPECT_TRUE(refused(head.call(plan, nullptr), TILELOSS_INVALID_ARGUMENT,
                      "plan.cuda: expected a row_block, a vocab_block of 64s up to 8192 and a chunk_columns of 64s that divides "
                      "it, got 16, 256 and 96"));
  plan.other[6] = 3;
  EXPECT_TRUE(refused(head.call(plan, nullptr), TILELOSS_INVALID_ARGUMENT, "plan.cuda.kept_bytes: expected 2 or 4, got 3"));
  plan.other[2] = 0;
  EXPECT_TRUE(refused(head.call(plan, nullptr), TILELOSS_INVALID_ARGUMENT,
                      "plan.cuda.vocab_block: expected that of an LM head, got none"));
  const Head capped({.softcap = 5});
  ASSERT_TRUE(succeeds(capped.make_plan(&plan)));
  plan.other[6] = 2;
  EXPECT_TRUE(
      refused(capped.call(plan, nullptr), TILELOSS_INVALID_ARGUMENT, "plan.cuda.kept_bytes: expected 4 for this call, got 2"));
}

// Of Qwen3-8B's head; no data.
TEST(CudaHead, APlanOfAModelsShapeFitsCacheAndBudget) {
  constexpr std::int64_t kRows = 8192, kClasses = 151936, kHidden = 4096, kLogits = kRows * kClasses * 2;
  const auto take_its_shape = [&](Head& head) {
    tileloss_args& a = head.args;
    for (tileloss_matrix* m : {&a.hidden, &a.dhidden, &a.teacher_hidden, &a.head, &a.dhead, &a.teacher_head}) {
      const bool is_of_rows = m == &a.hidden || m == &a.dhidden || m == &a.teacher_hidden;
      if (m->cols == 0) continue;
      *m = tileloss_make_matrix(nullptr, TILELOSS_BFLOAT16, is_of_rows ? kRows : kClasses, kHidden, kHidden);
      m->device_type = TILELOSS_CUDA;
    }
    a.labels.size = a.logp.size = a.loss.size = kRows;
    a.dbias = {};
    head.hints = plan_options();
  };
  Head head;
  take_its_shape(head);
  auto plan = init<tileloss_plan>();
  for (const auto& [l2_mib, rows] : {std::pair{50, 1024}, {126, 2048}, {40, 512}, {6, 512}}) {
    const int before = std::exchange(cuda_on_host::properties().l2_bytes, l2_mib << 20);
    EXPECT_TRUE(succeeds(head.make_plan(&plan)));
    cuda_on_host::properties().l2_bytes = before;
    EXPECT_EQ(plan.other[1], static_cast<std::uint64_t>(rows)) << l2_mib;  // row_block
    EXPECT_EQ(plan.other[2], 8192u);                                       // vocab_block
    EXPECT_EQ(plan.other[3], 8192u);                                       // chunk_columns
    EXPECT_GE(plan.other[4], 3 * 8192u);                                   // kept_columns
    EXPECT_EQ(plan.other[6], 2u);                                          // kept_bytes
    EXPECT_LE(plan.workspace_bytes, kLogits / 2);
  }
  head.args.dhidden = head.args.dhead = {};
  EXPECT_TRUE(succeeds(head.make_plan(&plan, TILELOSS_FORWARD)));
  EXPECT_LE(plan.workspace_bytes, kLogits / 12);
  Head pair({.target = TargetKind::kLogits});
  take_its_shape(pair);
  EXPECT_TRUE(succeeds(pair.make_plan(&plan)));
  EXPECT_EQ(plan.other[1], 1024u);  // row_block
  EXPECT_LE(plan.workspace_bytes, kLogits);
  pair.hints.workspace_bytes = kLogits / 4;
  EXPECT_TRUE(succeeds(pair.make_plan(&plan)));
  EXPECT_EQ(plan.other[1], 128u);
}

TEST_P(CudaHeadOf, ARowsBitsDoNotDependOnHowManyThereAre) {
  for (const double softcap : {0, 5}) {
    const Numbers few = Head(shape({.rows = 5, .softcap = softcap})).run_and_get();
    const Numbers many = Head(shape({.rows = 70, .softcap = softcap})).run_and_get();
    for (std::size_t i = 0; i < 5; ++i) {
      EXPECT_EQ(few.logp[i], many.logp[i]) << i;
      EXPECT_EQ(few.loss[i], many.loss[i]) << i;
      for (std::size_t h = 0; h < kWidth; ++h) EXPECT_EQ(few.dhidden[i * kWidth + h], many.dhidden[i * kWidth + h]) << i;
    }
  }
}

// dhidden is a sum over chunks.
TEST_P(CudaHeadOf, AChunksWidthChangesNoBitsOfTheHeadsGradient) {
  Numbers expected = Head(shape()).run_and_get();
  for (const std::int64_t width : {128, 64}) {
    Head head(shape());
    head.hints.cuda.chunk_columns = width;
    const Numbers got = head.run_and_get();
    EXPECT_NE(got.dhidden, expected.dhidden) << width;
    expected.dhidden = got.dhidden;
    expected.dhidden_r = got.dhidden_r;
    EXPECT_TRUE(got == expected) << width;
  }
}

TEST_P(CudaHeadOf, BitsDependNeitherOnAlignmentNorOnTheOrderOfBlocksNorOnTheDevice) {
  const Numbers expected = Head(shape()).run_and_get();
  for (const Head::Shape& of :
       {Head::Shape{.offset = 1}, {.offset = 8}, {.gap = 3}, {.gap = 8}, {.device = 1}, {.dhead_offset = 3}}) {
    cudaSetDevice(of.device);
    cuda_on_host::set_seed(static_cast<std::uint64_t>(7 + of.offset + of.gap));
    EXPECT_TRUE(Head(shape(of)).run_and_get() == expected)
        << of.offset << " " << of.gap << " " << of.device << " " << of.dhead_offset;
  }
  cudaSetDevice(0);
}

// In products of all rows and columns.
double products(const std::function<void(Head&)>& change, tileloss_pass pass = kBoth, const Head::Shape& shape = {}) {
  Head head(shape);
  change(head);
  auto plan = init<tileloss_plan>();
  EXPECT_TRUE(succeeds(head.make_plan(&plan, pass)));
  const std::int64_t before = cuda_on_host::products().multiply_adds;
  EXPECT_TRUE(succeeds(head.call(plan, nullptr, pass)));
  cudaDeviceSynchronize();
  return static_cast<double>(cuda_on_host::products().multiply_adds - before) / static_cast<double>(37 * kVocab * kWidth);
}
TEST(CudaHead, ProductsAreAsManyAsThePlanSays) {
  const auto recompute = [](Head& h) { h.hints.cuda.schedule = TILELOSS_SCHEDULE_RECOMPUTE; };
  EXPECT_EQ(products([](Head&) {}), 3);
  EXPECT_EQ(products(recompute), 4);
  EXPECT_EQ(products([&](Head& h) { recompute(h), h.args.dhead = {}, h.args.dbias = {}; }), 3);
  EXPECT_EQ(products([&](Head& h) { recompute(h), h.args.dhidden = h.args.dhead = {}; }), 2);
  EXPECT_EQ(products([](Head& h) { h.args.dhidden = h.args.dhead = {}, h.args.dbias = {}; }, TILELOSS_FORWARD), 1);
  // One of the three blocks.
  EXPECT_DOUBLE_EQ(products([](Head& h) { keep(h, kBlockOfWords); }), 4 - 256.0 / kVocab);
}

// A frozen head's product with hidden is made for the logits alone, or for dhidden too.
TEST(CudaHead, ProductsOfALowRankPartAreItsOwn) {
  constexpr double kPart = double{kRank} / kWidth;
  const Head::Shape low_rank = {.rank = kRank};
  const auto of = [&](const auto& change, tileloss_pass pass = kBoth) {
    return products([&](Head& h) { h.hints.cuda.schedule = TILELOSS_SCHEDULE_RECOMPUTE, h.args.dbias = {}, change(h.args); },
                    pass, low_rank);
  };
  EXPECT_DOUBLE_EQ(of([](tileloss_args&) {}), 4 + 4 * kPart);
  EXPECT_DOUBLE_EQ(of([](tileloss_args& a) { a.dhead = {}; }), 3 + 4 * kPart);
  EXPECT_DOUBLE_EQ(of([](tileloss_args& a) { a.dhidden = a.dhead = {}; }), 2 + 4 * kPart);
  EXPECT_DOUBLE_EQ(of([](tileloss_args& a) { a.dhidden = a.dhead = a.dhidden_r = {}; }), 2 + 3 * kPart);
  EXPECT_DOUBLE_EQ(of([](tileloss_args& a) { a.dhidden_r = a.dhead_r = {}; }), 4 + 2 * kPart);
  EXPECT_DOUBLE_EQ(of([](tileloss_args& a) { a.dhidden = a.dhead = a.dhidden_r = a.dhead_r = {}; }, TILELOSS_FORWARD), 1 + kPart);
  EXPECT_DOUBLE_EQ(products([](Head&) {}, kBoth, low_rank), 3 + 3 * kPart);
}

// As head_model.py counts them. Of the call: a fill, its beginning, the row stage, the losses. Of the head: a copy of hidden, the
// merge of the blocks, the rows' gradients, a fill of dhidden and its store.
TEST(CudaHead, LaunchesOfACall) {
  constexpr int kCall = 3, kHead = 5, kRowBlocks = 3, kBlocks = 3;
  for (const int kept : {0, 1, 3}) {
    Head head;
    head.args.dbias = {};
    keep(head, std::min(kept, 2) * kBlockOfWords);
    auto plan = init<tileloss_plan>();
    ASSERT_TRUE(succeeds(head.make_plan(&plan)));
    ASSERT_EQ(plan.other[4], std::min<std::uint64_t>(kept * 256u, kVocab));
    cuda_on_host::counters() = {};
    head.run();
    // A product and a kernel for the rows of each block; again, or a kernel for all that are kept; dhidden and dhead.
    const int forward = kBlocks * kRowBlocks * 2, backward = (kBlocks - kept) * kRowBlocks * 2 + kept + kBlocks * 2;
    EXPECT_EQ(cuda_on_host::counters().queued, static_cast<std::uint64_t>(kCall + kHead + forward + backward)) << kept;
  }
}

TEST(CudaHead, ProductsOfATargetAreAsManyAsThePlanSays) {
  constexpr double kTeachers = double{kTeacherWidth} / kWidth;
  for (const TargetKind target : {TargetKind::kLogits, TargetKind::kColumns, TargetKind::kProbabilities}) {
    const double of_logits = target == TargetKind::kLogits ? 1 + kTeachers : 1;
    const std::int64_t sides = target == TargetKind::kLogits ? 2 : 1;
    const auto recompute = [](Head& h) { h.hints.cuda.schedule = TILELOSS_SCHEDULE_RECOMPUTE; };
    EXPECT_DOUBLE_EQ(products([](Head&) {}, kBoth, {.target = target}), of_logits + 2);
    EXPECT_DOUBLE_EQ(products(recompute, kBoth, {.target = target}), 2 * of_logits + 2);
    EXPECT_DOUBLE_EQ(
        products([](Head& h) { h.args.dhidden = h.args.dhead = {}, h.args.dbias = {}; }, TILELOSS_FORWARD, {.target = target}),
        of_logits);
    // 16 of the 37 rows, whose stride is 704.
    EXPECT_DOUBLE_EQ(products([&](Head& h) { keep(h, sides * 16 * 704 * 4); }, kBoth, {.target = target}),
                     (2 - 16.0 / 37) * of_logits + 2);
  }
}

TEST(CudaHead, AlgorithmsAreFoundOnceForAnyNumberOfRows) {
  Head first;
  first.hints.cuda.vocab_block = 128;  // as no other test has it
  const std::int64_t before = cuda_on_host::products().searches;
  first.run();
  EXPECT_EQ(cuda_on_host::products().searches - before, 6) << "three products, of whole blocks and of the last one";
  Head second({.rows = 50});
  second.hints.cuda.vocab_block = 128;
  second.run();
  EXPECT_EQ(cuda_on_host::products().searches - before, 6);
}

// What is found for many rows may not be for the call's.
TEST_P(CudaHeadOf, AnAlgorithmThatIsNotForACallsRowsIsReplaced) {
  const Head::Shape of = shape({.rows = 21});  // the last 5 are a block
  const Numbers expected = Head(of).run_and_get();
  const std::int64_t before = cuda_on_host::products().searches;
  cuda_on_host::products().fewest_rows = 16;
  EXPECT_TRUE(Head(of).run_and_get() == expected);
  cuda_on_host::products().fewest_rows = 0;
  EXPECT_GT(cuda_on_host::products().searches, before);
}

// The first call with such a head, too: the plan and what is made once are apart from the capture.
TEST_P(CudaHeadOf, CallCanBeCaptured) {
  Head head(shape());
  head.hints.cuda.vocab_block = 192;  // as no other test has it
  const DeviceArray<std::uint8_t> workspace(std::size_t{8} << 20);
  cudaStream_t stream = nullptr;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  auto plan = init<tileloss_plan>();
  auto run = init<tileloss_run>();
  run.stream = stream;
  run.workspace = workspace.data();
  run.workspace_bytes = std::size_t{8} << 20;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
  ASSERT_TRUE(succeeds(head.make_plan(&plan)));
  ASSERT_TRUE(succeeds(head.call(plan, &run)));
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph), cudaSuccess);
  const Numbers expected = head.run_and_get();
  for (int replay = 0; replay < 2; ++replay) {
    head.forget();
    cudaGraphLaunch(executable, stream);
    cudaStreamSynchronize(stream);
    EXPECT_TRUE(head.get() == expected) << replay;
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST(CudaHead, AMissingCublasLtIsSaid) {
  Head head;
  head.hints.cuda.vocab_block = 384;  // as no other test has it
  cuda_on_host::products().missing = "libcublasLt.so.13: cannot open shared object file";
  auto plan = init<tileloss_plan>();
  EXPECT_TRUE(refused(head.make_plan(&plan), TILELOSS_UNSUPPORTED,
                      "cuda: the LM head needs cuBLASLt 13 or 12, which TILELOSS_CUBLASLT can name: libcublasLt.so.13: cannot "
                      "open shared object file"));
  cuda_on_host::products().missing.clear();
  EXPECT_TRUE(succeeds(head.make_plan(&plan)));
}

TEST_P(CudaHeadOf, AnIgnoredRowsGradientIs0WhateverTheHeadHolds) {
  const Numbers got = Head(shape({.has_nan = true})).run_and_get();
  EXPECT_TRUE(std::isnan(got.dhidden[0]));
  for (std::size_t h = 0; h < kWidth; ++h) EXPECT_EQ(got.dhidden[kWidth + h], 0) << h;
}

// Its row alone is NaN where the others' gradients do not hold it.
TEST_P(CudaHeadOf, ABadLabelGivesNanAndIsReported) {
  Head head(shape());
  head.set_ignore_index(-1);  // so that -100 is no class
  head.run();
  const Numbers got = head.get();
  EXPECT_TRUE(std::isnan(got.logp[1]) && std::isnan(got.dhidden[kWidth]) && std::isnan(got.dbias[0]));
  EXPECT_TRUE(std::isfinite(got.logp[2]) && std::isfinite(got.dhidden[0]));
  EXPECT_TRUE(refused(tileloss_check_errors(TILELOSS_CUDA, 0, nullptr), TILELOSS_LABEL_OUT_OF_RANGE,
                      "labels[1]: expected 0 <= label < 700 or ignore_index -1, got -100"));
}

}  // namespace
}  // namespace tileloss::test
