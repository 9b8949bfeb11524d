// The CUDA backend through the C ABI, on the host (tests/cuda_on_host): streams, graphs, errors, and bits that depend on nothing
// but the row. That its numbers are right is for the C API's own suites to say: cuda_in_place.cpp.
#include "backends/cuda/cuda_backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <thread>

#include "backends/cuda/checks.h"
#include "backends/cuda/library.h"
#include "backends/cuda/runtime.h"
#include "tests/api/calls.h"
#include "tests/cuda_on_host/device_array.h"
#include "tests/cuda_on_host/streams.h"

extern "C" tileloss::impl::cuda::EntryPoint tileloss_cuda_backend;

namespace tileloss::test {
namespace {

const bool is_registered = (impl::add_backend(&impl::cuda::cuda_backend()), true);

constexpr std::int64_t kRows = 5, kVocab = 300;
constexpr std::int64_t stride_of(std::int64_t vocab) { return vocab + 31; }

std::vector<std::uint16_t> some_logits(int seed, std::int64_t vocab = kVocab) {
  std::vector<std::uint16_t> logits(static_cast<std::size_t>(kRows * stride_of(vocab)));
  for (std::size_t i = 0; i < logits.size(); ++i)
    logits[i] = impl::from_float<impl::Bfloat16>(static_cast<float>((i * 37 + static_cast<std::size_t>(seed)) % 101) / 8).bits;
  return logits;
}

// Rows of bfloat16 on the device, from its element `offset` on, their labels, and what comes of them.
class OnCuda : public testing::Test {
 protected:
  void set_up(std::int64_t offset = 0, std::vector<std::int32_t> labels = {0, 299, -100, 17, 150}) {
    std::vector<std::uint16_t> padded(static_cast<std::size_t>(offset), 0x7fc0);
    const std::vector<std::uint16_t> logits = some_logits(1, vocab_);
    padded.insert(padded.end(), logits.begin(), logits.end());
    logits_ = std::make_unique<DeviceArray<std::uint16_t>>(padded);
    labels_ = std::make_unique<DeviceArray<std::int32_t>>(labels);
    loss_ = std::make_unique<DeviceArray<float>>(1);
    tileloss_args_init(&args_);
    args_.logits = args_.dlogits =
        on_cuda(tileloss_make_matrix(logits_->data() + offset, TILELOSS_BFLOAT16, kRows, vocab_, stride_of(vocab_)));
    args_.labels = on_cuda(tileloss_make_vector(labels_->data(), TILELOSS_INT32, kRows));
    args_.loss = on_cuda(tileloss_make_vector(loss_->data(), TILELOSS_FLOAT32, 1));
  }
  template <class View>
  static View on_cuda(View view) {
    view.device_type = TILELOSS_CUDA;
    return view;
  }
  tileloss_status run(tileloss_cuda_kernel kernel = TILELOSS_CUDA_KERNEL_AUTO) {
    auto hints = init<tileloss_plan_options>();
    hints.cuda.kernel = kernel;
    auto plan = init<tileloss_plan>();
    const tileloss_status s =
        tileloss_make_plan("cross_entropy", TILELOSS_VALUE_AND_GRAD, &args_, &options_, &hints, nullptr, &plan);
    return s != TILELOSS_OK ? s : tileloss_cross_entropy_value_and_grad(&args_, &options_, &plan, nullptr);
  }
  // Of the first row to the last, without what lies between them.
  std::vector<std::uint16_t> gradient(std::int64_t offset = 0) const { return rows_of(logits_->get(), offset); }
  std::vector<std::uint16_t> rows_of(const std::vector<std::uint16_t>& all, std::int64_t offset) const {
    std::vector<std::uint16_t> rows;
    for (std::int64_t i = 0; i < kRows; ++i)
      rows.insert(rows.end(), all.begin() + offset + i * stride_of(vocab_),
                  all.begin() + offset + i * stride_of(vocab_) + vocab_);
    return rows;
  }

  std::int64_t vocab_ = kVocab;
  std::unique_ptr<DeviceArray<std::uint16_t>> logits_;
  std::unique_ptr<DeviceArray<std::int32_t>> labels_;
  std::unique_ptr<DeviceArray<float>> loss_;
  tileloss_args args_;
  tileloss_cross_entropy_options options_ = cross_entropy_options();
};

TEST_F(OnCuda, BitsDependNeitherOnTheOrderOfBlocksNorOnAlignment) {
  std::vector<std::uint16_t> first;
  std::vector<float> loss;
  for (const std::int64_t offset : {0, 1, 8}) {
    for (const int seed : {1, 2, 3}) {
      cuda_on_host::set_seed(static_cast<std::uint64_t>(seed));
      set_up(offset);
      ASSERT_TRUE(succeeds(run()));
      cudaDeviceSynchronize();
      if (first.empty()) first = gradient(offset), loss = loss_->get();
      EXPECT_EQ(gradient(offset), first) << "offset " << offset << ", seed " << seed;
      EXPECT_EQ(loss_->get(), loss);
    }
  }
  EXPECT_TRUE(std::isfinite(loss[0]) && loss[0] > 0);
  EXPECT_EQ(logits_->get()[8 + kVocab], some_logits(1)[kVocab]) << "what lies behind a row was written";
}

// Each logit is read once, or twice, and its gradient written once; besides, the label's own each time.
TEST_F(OnCuda, BytesReadAndWrittenAreTheKernels) {
  for (const auto& [kernel, reads] : {std::pair{TILELOSS_CUDA_KERNEL_AUTO, 1}, {TILELOSS_CUDA_KERNEL_TWO_READS, 2}}) {
    set_up();
    cuda_on_host::counters() = {};
    ASSERT_TRUE(succeeds(run(kernel)));
    cudaDeviceSynchronize();
    constexpr std::int64_t kUsed = kRows - 1, kBytes = 2;
    EXPECT_EQ(cuda_on_host::counters().loaded, static_cast<std::uint64_t>(reads * kUsed * (kVocab + 1) * kBytes));
    EXPECT_EQ(cuda_on_host::counters().stored, static_cast<std::uint64_t>((kRows * kVocab + kUsed) * kBytes));
  }
}

// The tests run with launches that overlap, too (CMakeLists.txt).
const char* const asked_to_overlap = std::getenv("TILELOSS_CUDA_PDL");
const bool is_to_overlap = asked_to_overlap != nullptr && std::string(asked_to_overlap) == "1";

// One fill, one kernel that begins the call, the sum of the rows' weights, the rows, the row stage with the sum of its losses;
// two kernels for the rows where they are read twice.
TEST_F(OnCuda, LaunchesOfACall) {
  for (const auto& [kernel, launches] : {std::pair{TILELOSS_CUDA_KERNEL_AUTO, 5}, {TILELOSS_CUDA_KERNEL_TWO_READS, 6}}) {
    set_up();
    cuda_on_host::counters() = {};
    ASSERT_TRUE(succeeds(run(kernel)));
    cudaDeviceSynchronize();
    EXPECT_EQ(cuda_on_host::counters().queued, static_cast<std::uint64_t>(launches));
    EXPECT_EQ(cuda_on_host::counters().overlapping, static_cast<std::uint64_t>(is_to_overlap ? launches - 1 : 0));
  }
}

template <int kNumber>
__global__ void nothing() {
  impl::cuda::begin_kernel();
}

// What the code for sm_80 is, and what the driver makes of it for a later device, would not wait for the kernel before it.
TEST_F(OnCuda, AKernelBeginsEarlyWhereItsCodeWaits) {
  const cuda_on_host::Properties before = cuda_on_host::properties();
  const auto overlapping = [](void (*kernel)(), int compute_capability, int ptx_version) {
    cuda_on_host::properties().compute_capability = compute_capability;
    cuda_on_host::properties().ptx_version = ptx_version;
    cuda_on_host::counters() = {};
    impl::cuda::Queue queue(nullptr);
    for (int i = 0; i < 3; ++i) queue.launch(kernel, 1, 32);
    EXPECT_TRUE(queue.status().ok()) << queue.status().message;
    cudaDeviceSynchronize();
    return cuda_on_host::counters().overlapping;
  };
  const std::uint64_t all = is_to_overlap ? 3 : 0;
  EXPECT_EQ(overlapping(nothing<0>, 90, 120), all);
  EXPECT_EQ(overlapping(nothing<1>, 120, 90), all);
  EXPECT_EQ(overlapping(nothing<2>, 80, 120), 0u);
  EXPECT_EQ(overlapping(nothing<3>, 90, 80), 0u);
  cuda_on_host::properties() = before;
}

// A device whose blocks have little shared memory, for the time of a test.
class LittleMemory {
 public:
  explicit LittleMemory(int slice_bytes) : before_(cuda_on_host::properties()) {
    const int bytes = slice_bytes + impl::cuda::kSharedOfWholeRow;
    cuda_on_host::properties().shared_bytes_of_block = bytes;
    cuda_on_host::properties().shared_bytes_of_multiprocessor = 2 * (bytes + (1 << 10));
  }
  ~LittleMemory() { cuda_on_host::properties() = before_; }
  LittleMemory(const LittleMemory&) = delete;
  LittleMemory& operator=(const LittleMemory&) = delete;

 private:
  cuda_on_host::Properties before_;
};

// Held by clusters of 1, 2, 4 and 8 blocks or read twice, aligned or not, in place or not, of all columns or some, whatever runs
// when.
TEST_F(OnCuda, ClustersAndTwoReadsGiveTheSameBits) {
  struct Case {
    std::int64_t vocab;
    int slice_bytes;
    float label_smoothing;
    bool is_masked = false;
  };
  // Of 8, 4, 2 and 1 blocks; with threads that have several groups at once; by the kernels of other sums, too.
  for (const auto& [vocab, slice_bytes, label_smoothing, is_masked] :
       {Case{300, 80, 0}, Case{317, 176, 0.125f}, Case{300, 304, 0}, Case{33507, 40000, 0.125f}, Case{41003, 42000, 0},
        Case{300, 80, 0, true}, Case{41003, 42000, 0, true}}) {
    const LittleMemory little(slice_bytes);
    vocab_ = vocab;
    options_.label_smoothing = label_smoothing;
    const std::int64_t words_of_a_row = (vocab + 31) / 32;
    std::vector<std::int32_t> words(static_cast<std::size_t>(kRows * words_of_a_row));
    for (std::size_t i = 0; i < words.size(); ++i) words[i] = i % 5 == 0 ? 0 : static_cast<std::int32_t>(i * 2654435761u);
    for (std::int64_t k = 0; k < words_of_a_row; ++k) words[static_cast<std::size_t>(3 * words_of_a_row + k)] = -1;
    for (const auto& [row, label] : {std::pair{0, 0}, {1, 299}, {4, 150}})
      words[static_cast<std::size_t>(row * words_of_a_row + label / 32)] |= 1 << label % 32;
    const DeviceArray<std::int32_t> allowed(words);
    std::vector<std::uint16_t> first;
    std::vector<float> loss;
    for (const auto kernel : {TILELOSS_CUDA_KERNEL_TWO_READS, TILELOSS_CUDA_KERNEL_CLUSTER}) {
      for (const std::int64_t offset : {0, 3}) {
        cuda_on_host::set_seed(static_cast<std::uint64_t>(offset + vocab));
        set_up(offset);
        const DeviceArray<std::uint16_t> elsewhere(logits_->get());
        const bool is_in_place = offset == 0 || vocab > kVocab;
        if (!is_in_place) args_.dlogits.data = elsewhere.data() + offset;
        if (is_masked)
          args_.allowed = on_cuda(tileloss_make_matrix(allowed.data(), TILELOSS_INT32, kRows, words_of_a_row, words_of_a_row));
        ASSERT_TRUE(succeeds(run(kernel)));
        cudaDeviceSynchronize();
        const std::vector<std::uint16_t> d = rows_of(is_in_place ? logits_->get() : elsewhere.get(), offset);
        if (first.empty()) first = d, loss = loss_->get();
        EXPECT_EQ(d, first) << vocab << " columns, kernel " << kernel << ", offset " << offset;
        EXPECT_EQ(loss_->get(), loss) << vocab << " columns, kernel " << kernel << ", offset " << offset;
      }
    }
    EXPECT_TRUE(std::isfinite(loss[0]) && loss[0] > 0);
  }
  cudaFuncAttributes own;
  cudaFuncGetAttributes(&own, nullptr);
  for (const auto& [kernel, bytes] : cuda_on_host::devices().not_dynamic_bytes)
    EXPECT_EQ(bytes, static_cast<int>(own.sharedSizeBytes)) << "a launch of another size would be refused";
}

// Rows that no cluster can hold are read twice, and so are all where there are no clusters for them.
TEST_F(OnCuda, APlanSaysHowRowsAreRead) {
  const auto facts_of = [&](std::int64_t vocab, tileloss_cuda_kernel hint = TILELOSS_CUDA_KERNEL_AUTO) {
    args_.logits.cols = args_.logits.row_stride = args_.dlogits.cols = args_.dlogits.row_stride = vocab;
    auto hints = init<tileloss_plan_options>();
    hints.cuda.kernel = hint;
    auto plan = init<tileloss_plan>();
    if (tileloss_make_plan("cross_entropy", TILELOSS_VALUE_AND_GRAD, &args_, &options_, &hints, nullptr, &plan) != TILELOSS_OK)
      return std::string(tileloss_last_error());
    char text[1024];
    tileloss_plan_describe(&plan, TILELOSS_TEXT, text, sizeof text, nullptr);
    std::string facts;
    for (const char* const name : {"threads", "blocks", "kernel"}) {
      std::istringstream lines(text);
      for (std::string line, word, value; std::getline(lines, line);) {
        if (std::istringstream(line) >> word >> value && word.starts_with(name)) facts += value + " ";
      }
    }
    return facts;
  };
  set_up();
  EXPECT_EQ(facts_of(300), "32 1 cluster ");
  EXPECT_EQ(facts_of(50257), "384 1 cluster ");
  EXPECT_EQ(facts_of(128256), "256 4 cluster ");
  EXPECT_EQ(facts_of(151936), "128 8 cluster ");
  EXPECT_EQ(facts_of(151936, TILELOSS_CUDA_KERNEL_TWO_READS), "128 8 two_reads ");
  EXPECT_EQ(facts_of(900000), "384 8 cluster ");
  EXPECT_EQ(facts_of(1000000), "384 1 two_reads ");
  EXPECT_THAT(facts_of(1000000, TILELOSS_CUDA_KERNEL_CLUSTER),
              testing::HasSubstr("kernel: expected auto or two_reads, as a row"));
  EXPECT_THAT(facts_of(300, 3), testing::HasSubstr("kernel: expected auto, two_reads or cluster (0 to 2), got 3"));
  const cuda_on_host::Properties before = cuda_on_host::properties();
  cuda_on_host::properties().largest_cluster = 4;  // a small part of a device
  EXPECT_EQ(facts_of(128256), "256 4 cluster ");
  EXPECT_EQ(facts_of(900000), "384 8 two_reads ");
  EXPECT_THAT(facts_of(900000, TILELOSS_CUDA_KERNEL_CLUSTER),
              testing::HasSubstr("kernel: expected auto or two_reads, as the device cannot place a cluster of 8 blocks"));
  cuda_on_host::properties().compute_capability = 80;
  cuda_on_host::properties().shared_bytes_of_multiprocessor = 164 << 10;
  cuda_on_host::properties().shared_bytes_of_block = 163 << 10;
  EXPECT_EQ(facts_of(50257), "384 1 cluster ");
  EXPECT_EQ(facts_of(151936), "384 1 two_reads ");
  cuda_on_host::properties() = before;
}

TEST_F(OnCuda, ABadLabelGivesNanAndIsReportedOnce) {
  set_up(0, {0, 300, -100, 301, 150});
  options_.reduction = TILELOSS_REDUCTION_SUM;
  ASSERT_TRUE(succeeds(run()));
  cudaDeviceSynchronize();
  EXPECT_TRUE(std::isnan(loss_->get()[0]));
  const std::vector<std::uint16_t> d = gradient();
  EXPECT_TRUE(std::isnan(impl::to_float(impl::Bfloat16{d[kVocab]})));
  EXPECT_FALSE(std::isnan(impl::to_float(impl::Bfloat16{d[0]})));
  EXPECT_TRUE(refused(tileloss_check_errors(TILELOSS_CUDA, 0, nullptr), TILELOSS_LABEL_OUT_OF_RANGE,
                      "labels[1]: expected 0 <= label < 300 or ignore_index -100, got 300"));
  EXPECT_TRUE(succeeds(tileloss_check_errors(TILELOSS_CUDA, 0, nullptr)));
}

TEST(CudaReport, IsWrittenByOneKernel) {
  namespace cuda = impl::cuda;
  cuda::Report report = {}, found = {};
  cuda::CallState state = {};
  found.what = cuda::Wrong::kOffset;
  report.state = cuda::kBeingWritten;  // by another stream's kernel
  cuda::Verdict{&report, &state}.condemn(found);
  EXPECT_TRUE(state.is_wrong == 1 && report.what == cuda::Wrong::kNothing);
  report.state = cuda::kUnwritten;
  cuda::Verdict{&report, &state}.condemn(found);
  EXPECT_TRUE(report.state == cuda::kWritten && report.what == cuda::Wrong::kOffset);
}

TEST_F(OnCuda, AWrongNumberBehindAPointerIsReported) {
  set_up();
  DeviceArray<float> temperature(std::vector<float>{-1});
  options_.logit.temperature.pointer = temperature.data();
  ASSERT_TRUE(succeeds(run()));
  cudaDeviceSynchronize();
  EXPECT_TRUE(std::isnan(loss_->get()[0]));
  EXPECT_TRUE(refused(tileloss_check_errors(TILELOSS_CUDA, 0, nullptr), TILELOSS_INVALID_ARGUMENT,
                      "temperature: expected a number > 0, got -1"));
  set_up();
  args_.teacher_logits = args_.logits;
  args_.dlogits = {};
  DeviceArray<float> weight(std::vector<float>{-1.5});
  tileloss_distillation_options options = distillation_options();
  options.label_weight.pointer = weight.data();
  ASSERT_TRUE(succeeds(tileloss_distillation(&args_, &options, nullptr, nullptr)));
  cudaDeviceSynchronize();
  EXPECT_TRUE(std::isnan(loss_->get()[0]));
  EXPECT_TRUE(refused(tileloss_check_errors(TILELOSS_CUDA, 0, nullptr), TILELOSS_INVALID_ARGUMENT,
                      "label_weight: expected a number >= 0, got -1.5"));
}

// Rows with gaps and without, aligned or not, of more than a block takes at a time: what is read and written, and the values.
template <class T>
void scales_rows(tileloss_dtype dtype) {
  for (const auto& [rows, columns, stride, offset] :
       {std::array{1, 70001, 70001, 0}, {3, 17, 17, 3}, {2, 33001, 33008, 0}, {2, 40, 47, 1}}) {
    std::vector<T> values(static_cast<std::size_t>(offset + rows * stride));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = impl::from_float<T>(static_cast<float>(i % 97) / 16 - 3);
    const DeviceArray<T> gradient(values);
    const DeviceArray<float> number(1);
    tileloss_matrix view = tileloss_make_matrix(gradient.data() + offset, dtype, rows, columns, stride);
    view.device_type = TILELOSS_CUDA;
    for (const float factor : {1.0f, 1 / 3.0f, 65536.0f, NAN}) {
      cudaMemcpy(number.data(), &factor, sizeof factor, cudaMemcpyHostToDevice);
      cuda_on_host::counters() = {};
      ASSERT_TRUE(succeeds(tileloss_scale_gradient(&view, number.data(), nullptr)));
      cudaDeviceSynchronize();
      const std::uint64_t bytes = factor == 1 ? 0 : static_cast<std::uint64_t>(rows * columns) * sizeof(T);
      EXPECT_EQ(cuda_on_host::counters().loaded, bytes) << factor;
      EXPECT_EQ(cuda_on_host::counters().stored, bytes) << factor;
      for (int i = 0; i < rows; ++i) {
        for (int j = 0; j < columns; ++j) {
          T& value = values[static_cast<std::size_t>(offset + i * stride + j)];
          value = impl::from_float<T>(impl::to_float(value) * factor);
        }
      }
      const std::vector<T> found = gradient.get();
      EXPECT_EQ(std::memcmp(found.data(), values.data(), values.size() * sizeof(T)), 0) << rows << " rows times " << factor;
    }
  }
}
TEST_F(OnCuda, AGradientIsScaledUnlessTheFactorIsOne) {
  scales_rows<float>(TILELOSS_FLOAT32);
  scales_rows<impl::Bfloat16>(TILELOSS_BFLOAT16);
  scales_rows<impl::Float16>(TILELOSS_FLOAT16);
}

// On its stream; a replay reads the factor anew.
TEST_F(OnCuda, AScaledGradientCanBeCaptured) {
  const DeviceArray<float> gradient(std::vector<float>{2, -5});
  const DeviceArray<float> factor(1);
  const tileloss_matrix view = on_cuda(tileloss_make_matrix(gradient.data(), TILELOSS_FLOAT32, 1, 2, 2));
  auto run = init<tileloss_run>();
  cudaStream_t stream = nullptr;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  run.stream = stream;
  cudaGraph_t graph = nullptr;
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
  ASSERT_TRUE(succeeds(tileloss_scale_gradient(&view, factor.data(), &run)));
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph), cudaSuccess);
  for (const float number : {3.0f, 1.0f, 0.5f}) {
    cudaMemcpy(factor.data(), &number, sizeof number, cudaMemcpyHostToDevice);
    cudaGraphLaunch(executable, stream);
    cudaStreamSynchronize(stream);
  }
  EXPECT_EQ(gradient.get(), (std::vector<float>{3, -7.5f}));
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  const float on_host = 1;
  EXPECT_TRUE(refused(tileloss_scale_gradient(&view, &on_host, nullptr), TILELOSS_INVALID_ARGUMENT,
                      "factor: expected memory of cuda:0, got a pointer of the host's"));
}

// A replay reads what lies behind pointers then.
TEST_F(OnCuda, ACallCanBeCapturedInAGraph) {
  set_up();
  args_.dlogits = {};
  DeviceArray<float> temperature(std::vector<float>{1});
  options_.logit.temperature.pointer = temperature.data();
  auto plan = init<tileloss_plan>();
  ASSERT_TRUE(succeeds(tileloss_make_plan("cross_entropy", TILELOSS_FORWARD, &args_, &options_, nullptr, nullptr, &plan)));
  DeviceArray<std::uint8_t> workspace(static_cast<std::size_t>(plan.workspace_bytes));
  cudaStream_t stream = nullptr;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  auto run = init<tileloss_run>();
  run.stream = stream;
  const auto call = [&] { return tileloss_cross_entropy(&args_, &options_, &plan, &run); };
  cudaGraph_t graph = nullptr;
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
  EXPECT_TRUE(refused(call(), TILELOSS_INVALID_ARGUMENT,
                      "workspace: expected device memory, while the stream is being captured, got null"));
  run.workspace = workspace.data();
  run.workspace_bytes = static_cast<std::size_t>(plan.workspace_bytes);
  ASSERT_TRUE(succeeds(call()));
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph), cudaSuccess);
  std::vector<float> losses;
  for (const float t : {1.0f, 0.5f}) {
    cudaMemcpy(temperature.data(), &t, sizeof t, cudaMemcpyHostToDevice);
    cudaGraphLaunch(executable, stream);
    cudaStreamSynchronize(stream);
    losses.push_back(loss_->get()[0]);
    options_.logit.temperature = {t, nullptr};
    ASSERT_TRUE(succeeds(tileloss_cross_entropy(&args_, &options_, nullptr, nullptr)));
    cudaDeviceSynchronize();
    EXPECT_EQ(loss_->get()[0], losses.back()) << "temperature " << t;
    options_.logit.temperature = {1, temperature.data()};
  }
  EXPECT_NE(losses[0], losses[1]);
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST_F(OnCuda, AnotherDeviceThanTheCurrentOneDoesTheCall) {
  set_up();
  ASSERT_TRUE(succeeds(run()));
  cudaDeviceSynchronize();
  const std::vector<std::uint16_t> expected = gradient();
  cudaSetDevice(1);
  set_up();
  cudaSetDevice(0);
  for (tileloss_vector* v : {&args_.loss, &args_.labels}) v->device_index = 1;
  for (tileloss_matrix* m : {&args_.logits, &args_.dlogits}) m->device_index = 1;
  ASSERT_TRUE(succeeds(run()));
  int current = -1;
  cudaGetDevice(&current);
  EXPECT_EQ(current, 0);
  cudaSetDevice(1);
  cudaDeviceSynchronize();
  EXPECT_EQ(gradient(), expected);
  // A thread that has not chosen a device: the first one is left alone.
  std::thread([&] {
    cuda_on_host::devices().started = 0;
    EXPECT_TRUE(succeeds(run()));
    EXPECT_TRUE(succeeds(tileloss_check_errors(TILELOSS_CUDA, 1, nullptr)));
    impl::DeviceMemory& memory = *impl::cuda::cuda_backend().memory();
    void* data = nullptr;
    float value = 3;
    EXPECT_TRUE(memory.allocate(1, sizeof value, &data).ok());
    EXPECT_TRUE(memory.copy(1, data, &value, sizeof value).ok());
    value = 0;
    EXPECT_TRUE(memory.copy(1, &value, data, sizeof value).ok());
    EXPECT_TRUE(memory.synchronise(1).ok());
    EXPECT_EQ(value, 3);
    memory.release(1, data);
    EXPECT_EQ(cuda_on_host::devices().started, 1u << 1);
    cudaGetDevice(&current);
    EXPECT_EQ(current, 0);
    EXPECT_THAT(memory.allocate(2, 4, &data).message, testing::HasSubstr("cuda: the device: cudaErrorInvalidDevice"));
  }).join();
  labels_ = {}, logits_ = {}, loss_ = {};
  cudaSetDevice(0);
}

TEST(CudaLibrary, SaysWhatIsMissing) {
  const cuda_on_host::Properties before = cuda_on_host::properties();
  const auto missing = [&](const char* version, int driver, int devices) {
    cuda_on_host::properties().driver = driver, cuda_on_host::properties().devices = devices;
    char text[64] = "";
    const impl::Backend* const backend = tileloss_cuda_backend(version, text, sizeof text);
    cuda_on_host::properties() = before;
    cudaGetLastError();
    EXPECT_EQ(backend, text[0] == '\0' ? &impl::cuda::cuda_backend() : nullptr);
    return std::string(text);
  };
  const char* const version = tileloss_version();
  EXPECT_EQ(missing(version, 13000, 2), "");
  EXPECT_EQ(missing("0", 13000, 2), "expected version 0, got " + std::string(version));
  EXPECT_EQ(missing(version, 0, 2), "there is no driver");
  EXPECT_EQ(missing(version, 12080, 2), "cudaErrorInsufficientDriver");
  EXPECT_EQ(missing(version, 13000, 0), "cudaErrorNoDevice");
}

// A program's own context is left alone: a call runs in the device's primary one, where its memory has to be, and its stream.
TEST_F(OnCuda, ACallRunsInThePrimaryContext) {
  set_up();
  ASSERT_TRUE(succeeds(run()));
  cudaDeviceSynchronize();
  const std::vector<std::uint16_t> expected = gradient();
  set_up();
  {
    const cuda_on_host::OwnContext own(0);
    int device = 1;
    ASSERT_EQ(cudaGetDevice(&device), cudaSuccess);
    EXPECT_EQ(device, 0) << "that is all that the runtime says";
    EXPECT_TRUE(succeeds(run()));
    const DeviceArray<float> loss(1);
    tileloss_args args = args_;
    args.loss.data = loss.data();
    EXPECT_TRUE(refused(tileloss_cross_entropy_value_and_grad(&args, &options_, nullptr, nullptr), TILELOSS_INVALID_ARGUMENT,
                        "loss.data: expected memory of cuda:0, got memory of another context on cuda:0"));
    cudaStream_t stream = nullptr;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    auto run = init<tileloss_run>();
    run.stream = stream;
    EXPECT_TRUE(refused(tileloss_cross_entropy_value_and_grad(&args_, &options_, nullptr, &run), TILELOSS_INVALID_ARGUMENT,
                        "cuda: a kernel could not be launched: cudaErrorInvalidResourceHandle"));
    cudaStreamDestroy(stream);
  }
  cudaDeviceSynchronize();
  EXPECT_EQ(gradient(), expected);
}

TEST_F(OnCuda, MemoryThatTheDeviceCannotReachIsRefused) {
  set_up();
  args_.dlogits = {};
  std::vector<float> host(64);
  cudaSetDevice(1);
  const DeviceArray<float> other(1);
  cudaSetDevice(0);
  const struct {
    const char* message;
    std::function<void(tileloss_args&, tileloss_cross_entropy_options&)> break_it;
  } cases[] = {
      {"logits.data: expected memory of cuda:0, got a pointer of the host's",
       [&](auto& a, auto&) { a.logits.data = host.data(); }},
      {"labels.data: expected memory of cuda:0, got a pointer of the host's",
       [&](auto& a, auto&) { a.labels.data = host.data(); }},
      {"loss.data: expected memory of cuda:0, got memory of cuda:1", [&](auto& a, auto&) { a.loss.data = other.data(); }},
      {"temperature: expected memory of cuda:0, got a pointer of the host's",
       [&](auto&, auto& o) { o.logit.temperature.pointer = host.data(); }},
  };
  for (const auto& c : cases) {
    tileloss_args args = args_;
    tileloss_cross_entropy_options options = options_;
    c.break_it(args, options);
    EXPECT_TRUE(refused(tileloss_cross_entropy(&args, &options, nullptr, nullptr), TILELOSS_INVALID_ARGUMENT, c.message));
  }
  auto run = init<tileloss_run>();
  alignas(64) std::byte workspace[4096];
  run.workspace = workspace, run.workspace_bytes = sizeof workspace;
  EXPECT_TRUE(refused(tileloss_cross_entropy(&args_, &options_, nullptr, &run), TILELOSS_INVALID_ARGUMENT,
                      "workspace: expected memory of cuda:0, got a pointer of the host's"));
  const impl::Backend& backend = impl::cuda::cuda_backend();
  EXPECT_EQ(backend.out_of_reach(other.data(), 1), "") << "whatever device is current";
  const cuda_on_host::Properties before = cuda_on_host::properties();
  cuda_on_host::properties().peers_are_mapped = true;
  EXPECT_EQ(backend.out_of_reach(other.data(), 0), "");
  // Pages that a driver moves (HMM), and those of a device that reads as the host does.
  cuda_on_host::properties().reads_pageable_memory = true;
  EXPECT_EQ(backend.out_of_reach(host.data(), 0), "a pointer of the host's");
  cuda_on_host::properties().uses_host_page_tables = true;
  EXPECT_EQ(backend.out_of_reach(host.data(), 0), "");
  cuda_on_host::properties() = before;
  float* pinned = nullptr;
  for (const unsigned flags : {cudaHostAllocDefault, cudaHostAllocWriteCombined}) {
    cudaHostAlloc(&pinned, sizeof(float), flags);
    const bool is_elsewhere = flags == cudaHostAllocWriteCombined;
    EXPECT_EQ(backend.out_of_reach(pinned, 0), is_elsewhere ? "a pointer of the host's" : "");
    cudaFreeHost(pinned);
  }
}

TEST_F(OnCuda, WithoutRowsDataMayBeNull) {
  set_up();
  args_.logits.rows = args_.dlogits.rows = args_.labels.size = 0;
  args_.class_weights = on_cuda(tileloss_make_vector(nullptr, TILELOSS_FLOAT32, kVocab));
  EXPECT_TRUE(succeeds(run()));
  cudaDeviceSynchronize();
  EXPECT_EQ(loss_->get()[0], 0);
}

// It is every later call's, and none of the arguments is to blame.
TEST_F(OnCuda, AnEarlierKernelsErrorIsReportedAsWhatItIs) {
  set_up();
  ASSERT_TRUE(succeeds(run()));
  const cuda_on_host::Properties before = cuda_on_host::properties();
  cuda_on_host::properties().lasting_error = cudaErrorAssert;
  const tileloss_status status = run();
  cuda_on_host::properties() = before;
  EXPECT_TRUE(refused(status, TILELOSS_INTERNAL, "cuda: the workspace: cudaErrorAssert"));
  cudaGetLastError();
}

TEST_F(OnCuda, WhatADeviceLacksIsSaidAndNothingIsDone) {
  set_up();
  const std::vector<std::uint16_t> before = logits_->get();
  const cuda_on_host::Properties whole = cuda_on_host::properties();
  cuda_on_host::properties().memory_bytes = 64;
  EXPECT_TRUE(refused(run(), TILELOSS_OUT_OF_MEMORY, "cuda: the workspace: cudaErrorMemoryAllocation"));
  cuda_on_host::properties() = whole;
  cuda_on_host::properties().compute_capability = 75;
  EXPECT_TRUE(refused(run(), TILELOSS_UNSUPPORTED, "cuda: a kernel could not be launched: cudaErrorNoKernelImageForDevice"));
  cuda_on_host::properties() = whole;
  cudaDeviceSynchronize();
  EXPECT_EQ(logits_->get(), before);
  EXPECT_TRUE(succeeds(run()));
}

TEST(CudaQueue, MoreBlocksThanAGridHasAreRefused) {
  impl::cuda::Queue queue(nullptr);
  queue.launch(
      +[] {}, (std::int64_t{1} << 32) + 1, 32);  // one, in 32 bits
  EXPECT_EQ(queue.status().message, "cuda: a kernel's blocks: expected at most 2^31 - 1, got 4294967297");
  EXPECT_EQ(queue.status().code, TILELOSS_UNSUPPORTED);
}

// Of a call that ends well, and of one whose shards cannot be merged.
TEST_F(OnCuda, AWorkspaceOfItsOwnIsGivenBack) {
  set_up();
  const auto pieces = [] {
    cudaDeviceSynchronize();
    return cuda_on_host::devices().pieces.size();
  };
  ASSERT_TRUE(succeeds(run()));
  const std::size_t before = pieces();
  ASSERT_TRUE(succeeds(tileloss_cross_entropy_value_and_grad(&args_, &options_, nullptr, nullptr)));
  EXPECT_EQ(pieces(), before);
  const DeviceArray<float> sums(3 * kRows);
  tileloss_row_state state;
  tileloss_row_state_init(&state);
  state.rows = kRows;
  state.device_type = TILELOSS_CUDA;
  state.max = sums.data(), state.sum = sums.data() + kRows, state.label_logit = sums.data() + 2 * kRows;
  args_.row_state = &state;
  options_.logit.vocab_total = 2 * kVocab;
  auto run = init<tileloss_run>();
  run.merge = [](void* /*context*/) -> tileloss_status { return TILELOSS_OUT_OF_MEMORY; };
  EXPECT_TRUE(refused(tileloss_cross_entropy_value_and_grad(&args_, &options_, nullptr, &run), TILELOSS_OUT_OF_MEMORY,
                      "run.merge: expected TILELOSS_OK, got 3"));
  EXPECT_EQ(pieces(), before + 1) << "that of the row state";
}

// A teacher whose rows lie elsewhere: bits, and what is read of both and written.
TEST_F(OnCuda, ATeacherIsReadAsOftenAsTheStudent) {
  tileloss_distillation_options options = distillation_options();
  options.divergence = TILELOSS_JSD;
  std::vector<std::uint16_t> first;
  for (const std::int64_t offset : {0, 1, 8}) {
    for (const std::int64_t teacher_offset : {0, 3}) {
      cuda_on_host::set_seed(static_cast<std::uint64_t>(offset + teacher_offset));
      set_up(offset);
      std::vector<std::uint16_t> padded(static_cast<std::size_t>(teacher_offset), 0x7fc0);
      const std::vector<std::uint16_t> logits = some_logits(5);
      padded.insert(padded.end(), logits.begin(), logits.end());
      DeviceArray<std::uint16_t> teacher(padded);
      args_.teacher_logits =
          on_cuda(tileloss_make_matrix(teacher.data() + teacher_offset, TILELOSS_BFLOAT16, kRows, kVocab, stride_of(kVocab)));
      cuda_on_host::counters() = {};
      ASSERT_TRUE(succeeds(tileloss_distillation_value_and_grad(&args_, &options, nullptr, nullptr)));
      cudaDeviceSynchronize();
      constexpr std::int64_t kUsed = kRows - 1, kBytes = 2;
      // Once for the state, once for the divergence, once for the gradient, and the label's own.
      EXPECT_EQ(cuda_on_host::counters().loaded, static_cast<std::uint64_t>(kUsed * (2 * 3 * kVocab + 3) * kBytes));
      EXPECT_EQ(cuda_on_host::counters().stored, static_cast<std::uint64_t>(kRows * kVocab * kBytes));
      if (first.empty()) first = gradient(offset);
      EXPECT_EQ(gradient(offset), first) << "offsets " << offset << ", " << teacher_offset;
      EXPECT_TRUE(std::isfinite(loss_->get()[0]) && loss_->get()[0] > 0);
    }
  }
}

TEST_F(OnCuda, WhatASparseTeacherMayNotKnowIsReportedOnce) {
  const struct {
    std::vector<std::int32_t> ids;  // of the second row
    float log_q;
    const char* message;
  } cases[] = {
      {{7, 300}, -1, "teacher_ids[1,1]: expected a column < 300, or a negative number for none, got 300"},
      {{7, 7}, -1, "teacher_ids[1]: expected distinct columns, got 7 twice"},
      {{7, 8}, 0.5F, "teacher_logprobs[1,1]: expected the logarithm of a probability, <= 0 but for rounding, got 0.500000"}};
  for (const auto& [second, log_q, message] : cases) {
    set_up();
    std::vector<std::int32_t> ids = {1, 2, second[0], second[1], 999, 999, 5, -1, 6, 7};  // the third row is not in use
    std::vector<float> log_qs(2 * kRows, -1);
    log_qs[3] = log_q;
    DeviceArray<std::int32_t> on_device(ids);
    DeviceArray<float> logs(log_qs);
    args_.teacher_ids = on_cuda(tileloss_make_matrix(on_device.data(), TILELOSS_INT32, kRows, 2, 2));
    args_.teacher_logprobs = on_cuda(tileloss_make_matrix(logs.data(), TILELOSS_FLOAT32, kRows, 2, 2));
    ASSERT_TRUE(succeeds(tileloss_sparse_distillation_value_and_grad(&args_, nullptr, nullptr, nullptr)));
    cudaDeviceSynchronize();
    EXPECT_TRUE(std::isnan(loss_->get()[0]));
    const std::vector<std::uint16_t> d = gradient();
    EXPECT_TRUE(std::isnan(impl::to_float(impl::Bfloat16{d[kVocab]})));
    EXPECT_FALSE(std::isnan(impl::to_float(impl::Bfloat16{d[0]})));
    EXPECT_TRUE(refused(tileloss_check_errors(TILELOSS_CUDA, 0, nullptr), TILELOSS_INVALID_ARGUMENT, message));
    EXPECT_TRUE(succeeds(tileloss_check_errors(TILELOSS_CUDA, 0, nullptr)));
  }
}

}  // namespace
}  // namespace tileloss::test
