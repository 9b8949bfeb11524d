// The LM head of the CUDA backend, on the host (tests/cuda_on_host): budgets, graphs, what is chosen once, and bits that depend
// on nothing but the row. That its numbers are right is for the C API's own suites to say: cuda_in_place.cpp.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <functional>
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
constexpr std::int64_t kVocab = 700, kWidth = 24;

std::vector<std::uint16_t> random_words(std::uint64_t seed, std::int64_t count) {
  tools::Random random(seed, tools::Stream::kLogits, -1);
  std::vector<std::uint16_t> words(static_cast<std::size_t>(count));
  for (std::uint16_t& w : words) w = impl::from_float<impl::Bfloat16>(static_cast<float>(random.next_normal())).bits;
  return words;
}

struct Numbers {
  std::vector<float> logp, dhidden, dbias;
  std::vector<std::uint16_t> dhead;
  bool operator==(const Numbers&) const = default;
};

// A head in bfloat16 whose first rows are the same for any number of them; the second is ignored.
class Head {
 public:
  struct Shape {
    std::int64_t rows = 37;
    std::int64_t offset = 0, gap = 0;  // of the head, in elements: before the first row, and between two
    int device = 0;
    bool has_nan = false;  // in the last class of the head
  };

  Head() : Head(Shape{}) {}
  explicit Head(const Shape& shape)
      : rows_(shape.rows),
        hidden_(random_words(1, shape.rows * kWidth)),
        head_(gaps(shape)),
        labels_(labels(shape.rows)),
        logp_(static_cast<std::size_t>(shape.rows)),
        dhidden_(static_cast<std::size_t>(shape.rows * kWidth)),
        dbias_(kVocab),
        dhead_(kVocab * kWidth) {
    tileloss_args_init(&args);
    args.hidden = tileloss_make_matrix(hidden_.data(), TILELOSS_BFLOAT16, rows_, kWidth, kWidth);
    args.head = tileloss_make_matrix(head_.data() + shape.offset, TILELOSS_BFLOAT16, kVocab, kWidth, kWidth + shape.gap);
    args.labels = tileloss_make_vector(labels_.data(), TILELOSS_INT64, rows_);
    args.logp = tileloss_make_vector(logp_.data(), TILELOSS_FLOAT32, rows_);
    args.dhidden = tileloss_make_matrix(dhidden_.data(), TILELOSS_FLOAT32, rows_, kWidth, kWidth);
    args.dhead = tileloss_make_matrix(dhead_.data(), TILELOSS_BFLOAT16, kVocab, kWidth, kWidth);
    args.dbias = tileloss_make_vector(dbias_.data(), TILELOSS_FLOAT32, kVocab);
    for (tileloss_matrix* m : {&args.hidden, &args.head, &args.dhidden, &args.dhead}) {
      m->device_type = TILELOSS_CUDA;
      m->device_index = shape.device;
    }
    for (tileloss_vector* v : {&args.labels, &args.logp, &args.dbias}) {
      v->device_type = TILELOSS_CUDA;
      v->device_index = shape.device;
    }
    wishes.cuda.vocab_block = 256;
    wishes.cuda.row_block = 16;
  }

  tileloss_status make_plan(tileloss_plan* plan, tileloss_pass pass = kBoth) const {
    return tileloss_make_plan("linear_cross_entropy", pass, &args, &options, &wishes, nullptr, plan);
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
  tileloss_status call(const tileloss_plan& plan, const tileloss_run* run) const {
    return tileloss_call("linear_cross_entropy", kBoth, &args, &options, &plan, run);
  }
  Numbers get() const { return {logp_.get(), dhidden_.get(), dbias_.get(), dhead_.get()}; }
  Numbers run_and_get() {
    run();
    return get();
  }
  void forget() const {
    for (const auto* sums : {&logp_, &dhidden_, &dbias_}) cudaMemset(sums->data(), 0, sums->get().size() * sizeof(float));
    cudaMemset(dhead_.data(), 0, kVocab * kWidth * 2);
    cudaDeviceSynchronize();
  }

  tileloss_args args;
  tileloss_cross_entropy_options options{.reduction = TILELOSS_REDUCTION_SUM};
  tileloss_plan_options wishes = plan_options();

 private:
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
  DeviceArray<std::uint16_t> hidden_, head_;
  DeviceArray<std::int64_t> labels_;
  DeviceArray<float> logp_, dhidden_, dbias_;
  DeviceArray<std::uint16_t> dhead_;
};

// The least budget is the one that the error names.
std::int64_t least_budget(Head& head) {
  head.wishes.workspace_bytes = 1;
  auto plan = init<tileloss_plan>();
  EXPECT_EQ(head.make_plan(&plan), TILELOSS_WORKSPACE_TOO_SMALL);
  std::int64_t needed = 0;
  EXPECT_EQ(std::sscanf(tileloss_last_error(), "workspace_bytes: expected at least %ld, got a budget of 1", &needed), 1);
  return needed;
}

TEST(CudaHead, EveryBudgetIsKeptAndChangesNoLogp) {
  Head whole;
  const std::int64_t all = whole.run().workspace_bytes;
  const Numbers expected = whole.get();
  EXPECT_TRUE(std::isfinite(expected.logp[0]) && expected.logp[0] < 0);
  Head head;
  head.wishes.cuda.row_block = 0;
  const std::int64_t least = least_budget(head);
  EXPECT_LT(least, all);
  for (const std::int64_t budget : {least, (3 * least + all) / 4, (least + all) / 2, all}) {
    head.wishes.workspace_bytes = budget;
    head.forget();
    const tileloss_plan plan = head.run();
    EXPECT_LE(plan.workspace_bytes, budget);
    std::int64_t parts = 0;
    for (std::int64_t i = 0; i < plan.buffer_count; ++i) parts += plan.buffers[i].bytes;
    EXPECT_EQ(parts, plan.workspace_bytes);
    const Numbers got = head.get();
    EXPECT_EQ(got.logp, expected.logp) << budget;
    for (std::size_t i = 0; i < got.dhidden.size(); ++i) ASSERT_NEAR(got.dhidden[i], expected.dhidden[i], 1e-5) << i;
    for (std::size_t i = 0; i < got.dbias.size(); ++i) ASSERT_NEAR(got.dbias[i], expected.dbias[i], 1e-6) << i;
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
  plan.other[2] = 0;
  EXPECT_TRUE(refused(head.call(plan, nullptr), TILELOSS_INVALID_ARGUMENT,
                      "plan.cuda.vocab_block: expected that of an LM head, got none"));
}

// Of Qwen3-8B's head; no data.
TEST(CudaHead, APlanOfAModelsShapeFitsCacheAndBudget) {
  constexpr std::int64_t kRows = 8192, kClasses = 151936, kHidden = 4096, kLogits = kRows * kClasses * 2;
  Head head;
  for (tileloss_matrix* m : {&head.args.hidden, &head.args.dhidden, &head.args.head, &head.args.dhead}) {
    const bool is_of_rows = m == &head.args.hidden || m == &head.args.dhidden;
    *m = tileloss_make_matrix(nullptr, TILELOSS_BFLOAT16, is_of_rows ? kRows : kClasses, kHidden, kHidden);
    m->device_type = TILELOSS_CUDA;
  }
  head.args.labels.size = head.args.logp.size = kRows;
  head.args.dbias = {};
  head.wishes = plan_options();
  auto plan = init<tileloss_plan>();
  for (const auto& [l2_mib, rows] : {std::pair{50, 1024}, {126, 2048}, {6, 1024}}) {
    const int before = std::exchange(cuda_on_host::properties().l2_bytes, l2_mib << 20);
    EXPECT_TRUE(succeeds(head.make_plan(&plan)));
    cuda_on_host::properties().l2_bytes = before;
    EXPECT_EQ(plan.other[1], static_cast<std::uint64_t>(rows)) << l2_mib;  // row_block
    EXPECT_EQ(plan.other[2], 4096u);                                       // vocab_block
    EXPECT_EQ(plan.other[3], 4096u);                                       // chunk_columns
    EXPECT_GT(plan.other[4], 4096u);                                       // kept_columns
    EXPECT_LE(plan.workspace_bytes, kLogits / 2);
  }
  head.args.dhidden = head.args.dhead = {};
  EXPECT_TRUE(succeeds(head.make_plan(&plan, TILELOSS_FORWARD)));
  EXPECT_LE(plan.workspace_bytes, kLogits / 16);
}

TEST(CudaHead, ARowsBitsDoNotDependOnHowManyThereAre) {
  const Numbers few = Head({.rows = 5}).run_and_get();
  const Numbers many = Head({.rows = 70}).run_and_get();
  for (std::size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(few.logp[i], many.logp[i]) << i;
    for (std::size_t h = 0; h < kWidth; ++h) EXPECT_EQ(few.dhidden[i * kWidth + h], many.dhidden[i * kWidth + h]) << i;
  }
}

TEST(CudaHead, BitsDependNeitherOnAlignmentNorOnTheOrderOfBlocksNorOnTheDevice) {
  const Numbers expected = Head().run_and_get();
  for (const Head::Shape& shape : {Head::Shape{.offset = 1}, {.offset = 8}, {.gap = 3}, {.gap = 8}, {.device = 1}}) {
    cudaSetDevice(shape.device);
    cuda_on_host::set_seed(static_cast<std::uint64_t>(7 + shape.offset + shape.gap));
    EXPECT_TRUE(Head(shape).run_and_get() == expected) << shape.offset << " " << shape.gap << " " << shape.device;
  }
  cudaSetDevice(0);
}

// In products of all rows and columns.
double products(const std::function<void(Head&)>& change, tileloss_pass pass = kBoth) {
  Head head;
  change(head);
  auto plan = init<tileloss_plan>();
  EXPECT_TRUE(succeeds(head.make_plan(&plan, pass)));
  const std::int64_t before = cuda_on_host::products().multiply_adds;
  EXPECT_TRUE(succeeds(tileloss_call("linear_cross_entropy", pass, &head.args, &head.options, &plan, nullptr)));
  cudaDeviceSynchronize();
  return static_cast<double>(cuda_on_host::products().multiply_adds - before) / static_cast<double>(37 * kVocab * kWidth);
}

TEST(CudaHead, ProductsAreAsManyAsThePlanSays) {
  const auto recompute = [](Head& h) { h.wishes.cuda.schedule = TILELOSS_SCHEDULE_RECOMPUTE; };
  EXPECT_EQ(products([](Head&) {}), 3);
  EXPECT_EQ(products(recompute), 4);
  EXPECT_EQ(products([&](Head& h) { recompute(h), h.args.dhead = {}, h.args.dbias = {}; }), 3);
  EXPECT_EQ(products([&](Head& h) { recompute(h), h.args.dhidden = h.args.dhead = {}; }), 2);
  EXPECT_EQ(products([](Head& h) { h.args.dhidden = h.args.dhead = {}, h.args.dbias = {}; }, TILELOSS_FORWARD), 1);
  // A budget that holds one of the three blocks.
  EXPECT_DOUBLE_EQ(products([&](Head& h) {
                     recompute(h);
                     auto plan = init<tileloss_plan>();
                     EXPECT_TRUE(succeeds(h.make_plan(&plan)));
                     h.wishes.cuda.schedule = TILELOSS_SCHEDULE_AUTO;
                     h.wishes.workspace_bytes = plan.workspace_bytes + 37 * 256 * 4 + 64;
                   }),
                   4 - 256.0 / kVocab);
}

TEST(CudaHead, AlgorithmsAreFoundOnceForAnyNumberOfRows) {
  Head first;
  first.wishes.cuda.vocab_block = 128;  // as no other test has it
  const std::int64_t before = cuda_on_host::products().searches;
  first.run();
  EXPECT_EQ(cuda_on_host::products().searches - before, 6) << "three products, of whole blocks and of the last one";
  Head second({.rows = 50});
  second.wishes.cuda.vocab_block = 128;
  second.run();
  EXPECT_EQ(cuda_on_host::products().searches - before, 6);
}

TEST(CudaHead, ACallCanBeCapturedOnceItsPlanWasMade) {
  Head head;
  const Numbers expected = head.run_and_get();
  auto plan = init<tileloss_plan>();
  ASSERT_TRUE(succeeds(head.make_plan(&plan)));
  const DeviceArray<std::uint8_t> workspace(static_cast<std::size_t>(plan.workspace_bytes));
  cudaStream_t stream = nullptr;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  auto run = init<tileloss_run>();
  run.stream = stream;
  run.workspace = workspace.data();
  run.workspace_bytes = static_cast<std::size_t>(plan.workspace_bytes);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
  ASSERT_TRUE(succeeds(head.call(plan, &run)));
  // A stored plan of another process, say, whose products nobody has looked for.
  tileloss_plan foreign = plan;
  foreign.other[2] = foreign.other[3] = 192;  // vocab_block and chunk_columns
  foreign.workspace_bytes *= 2;
  run.workspace_bytes *= 2;
  EXPECT_TRUE(refused(head.call(foreign, &run), TILELOSS_INVALID_ARGUMENT,
                      "plan: expected one made before the stream was captured, got none"));
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph), cudaSuccess);
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
  head.wishes.cuda.vocab_block = 384;  // as no other test has it
  cuda_on_host::products().missing = "libcublasLt.so.13: cannot open shared object file";
  auto plan = init<tileloss_plan>();
  EXPECT_TRUE(refused(head.make_plan(&plan), TILELOSS_UNSUPPORTED,
                      "cuda: the LM head needs cuBLASLt 13 or 12, which TILELOSS_CUBLASLT can name: libcublasLt.so.13: cannot "
                      "open shared object file"));
  cuda_on_host::products().missing.clear();
  EXPECT_TRUE(succeeds(head.make_plan(&plan)));
}

TEST(CudaHead, AnIgnoredRowsGradientIs0WhateverTheHeadHolds) {
  const Numbers got = Head({.has_nan = true}).run_and_get();
  EXPECT_TRUE(std::isnan(got.dhidden[0]));
  for (std::size_t h = 0; h < kWidth; ++h) EXPECT_EQ(got.dhidden[kWidth + h], 0) << h;
}

// Its row alone is NaN where the others' gradients do not hold it.
TEST(CudaHead, ABadLabelGivesNanAndIsReported) {
  Head head;
  head.options.logit.ignore_index = -1;  // so that -100 is no class
  head.run();
  const Numbers got = head.get();
  EXPECT_TRUE(std::isnan(got.logp[1]) && std::isnan(got.dhidden[kWidth]) && std::isnan(got.dbias[0]));
  EXPECT_TRUE(std::isfinite(got.logp[2]) && std::isfinite(got.dhidden[0]));
  EXPECT_TRUE(refused(tileloss_check_errors(TILELOSS_CUDA, 0, nullptr), TILELOSS_LABEL_OUT_OF_RANGE,
                      "labels[1]: expected 0 <= label < 700 or ignore_index -1, got -100"));
}

}  // namespace
}  // namespace tileloss::test
