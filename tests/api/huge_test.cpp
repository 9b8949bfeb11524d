// More than 2^32 elements, on memory that is only reserved: rows far apart, and a matrix of which nearly every row is ignored.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include "support/synthetic.h"
#include "tests/api/calls.h"

namespace tileloss::test {
namespace {

using oracle::NumberFormat;

// Address space; pages come as they are touched.
class Reserved {
 public:
  explicit Reserved(std::size_t bytes) : bytes_(bytes) {
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  ~Reserved() {
    if (ok()) munmap(data_, bytes_);
  }
  Reserved(const Reserved&) = delete;
  Reserved& operator=(const Reserved&) = delete;
  bool ok() const { return data_ != MAP_FAILED; }
  template <class T>
  T* at(std::int64_t element) const {
    return static_cast<T*>(data_) + element;
  }

 private:
  std::size_t bytes_;
  void* data_ = nullptr;
};

std::vector<double> draw_row(std::int64_t row, std::int64_t label, std::uint16_t* out, std::int64_t vocab) {
  tools::fill_logits_row(*tools::find_distribution("normal"), 3, row, label, NumberFormat::kBfloat16, out, vocab);
  std::vector<double> values(static_cast<std::size_t>(vocab));
  oracle::decode_row(NumberFormat::kBfloat16, out, values);
  return values;
}

void check_row(std::int64_t row, const std::vector<double>& logits, std::int64_t label, const std::uint16_t* dlogits, float loss,
               tools::GradientMetric& gradients, tools::OutputMetric& losses) {
  oracle::SoftmaxRow softmax;
  softmax.compute({}, logits, label);
  const std::vector<std::int64_t> labels = {label};
  oracle::CrossEntropyOptions options;
  options.reduction = oracle::Reduction::kNone;
  const oracle::CrossEntropy oracle(options, labels, {}, {}, {});
  oracle::GradientRow gradient;
  oracle.row_gradient(0, softmax, gradient);
  gradients.add_row(row, dlogits, static_cast<std::int64_t>(logits.size()), tools::make_row_reference(softmax, gradient));
  losses.add(row, loss, oracle.row_loss(0, softmax).total());
}

void expect_pass(const tools::GradientMetric& gradients, const tools::OutputMetric& losses) {
  for (const auto& gates : {gradients.gates(), losses.gates()}) {
    for (const tools::Gate& gate : gates) EXPECT_TRUE(gate.pass) << gate.name << " " << gate.value;
  }
}

tileloss_cross_entropy_options per_row() { return {.reduction = TILELOSS_REDUCTION_NONE}; }

// Five rows, 2^31 + 2^29 elements apart: the last starts 20 GB in, beyond what 32-bit element or byte offsets reach.
TEST(Huge, RowsFarApart) {
  constexpr std::int64_t kRows = 5, kVocab = 3001, kStride = (std::int64_t{1} << 31) + (std::int64_t{1} << 29);
  constexpr auto kElements = static_cast<std::size_t>((kRows - 1) * kStride + kVocab);
  const Reserved logits(kElements * 2), dlogits(kElements * 2);
  ASSERT_TRUE(logits.ok() && dlogits.ok());
  const std::vector<std::int64_t> labels = {5, 3000, -100, 17, 1234};
  std::vector<std::vector<double>> rows;
  for (std::int64_t i = 0; i < kRows; ++i)
    rows.push_back(draw_row(i, labels[static_cast<std::size_t>(i)], logits.at<std::uint16_t>(i * kStride), kVocab));
  std::vector<float> loss(kRows, -1);
  auto args = init<tileloss_args>();
  args.logits = tileloss_make_matrix(logits.at<std::uint16_t>(0), TILELOSS_BFLOAT16, kRows, kVocab, kStride);
  args.dlogits = tileloss_make_matrix(dlogits.at<std::uint16_t>(0), TILELOSS_BFLOAT16, kRows, kVocab, kStride);
  args.labels = tileloss_make_vector(labels.data(), TILELOSS_INT64, kRows);
  args.loss = tileloss_make_vector(loss.data(), TILELOSS_FLOAT32, kRows);
  const tileloss_cross_entropy_options options = per_row();
  for (const tileloss_schedule schedule : kSchedules) {
    ASSERT_TRUE(runs("cross_entropy", TILELOSS_VALUE_AND_GRAD, args, &options, with_schedule(schedule)));
    tools::GradientMetric gradients(NumberFormat::kBfloat16);
    tools::OutputMetric losses("loss");
    for (std::int64_t i = 0; i < kRows; ++i) {
      const std::int64_t label = labels[static_cast<std::size_t>(i)];
      const auto* row = dlogits.at<std::uint16_t>(i * kStride);
      if (label == -100) {
        gradients.add_ignored_row(i, row, kVocab);
        EXPECT_EQ(loss[2], 0.0F);
      } else {
        check_row(i, rows[static_cast<std::size_t>(i)], label, row, loss[static_cast<std::size_t>(i)], gradients, losses);
      }
    }
    expect_pass(gradients, losses);
  }
}

// 33000 x 151936 is 5.0e9 elements: forward only, all but six rows ignored and therefore never touched.
TEST(Huge, ForwardOfMoreThanFourBillionElements) {
  constexpr std::int64_t kRows = 33000, kVocab = 151936;
  static_assert(kRows * kVocab > (std::int64_t{1} << 32));
  const Reserved logits(static_cast<std::size_t>(kRows * kVocab) * 2);
  ASSERT_TRUE(logits.ok());
  std::vector<std::int32_t> labels(kRows, -100);
  const std::int64_t used[] = {0, 1, 14134, 14135, 28268, 32999};  // elements 2^31 and 2^32 lie in rows 14134 and 28268
  std::vector<std::vector<double>> rows;
  for (const std::int64_t i : used) {
    labels[static_cast<std::size_t>(i)] = static_cast<std::int32_t>((i * 7919) % kVocab);
    rows.push_back(draw_row(i, -1, logits.at<std::uint16_t>(i * kVocab), kVocab));
  }
  std::vector<float> logp(kRows, -1), lse(kRows, -1);
  auto args = init<tileloss_args>();
  args.logits = tileloss_make_matrix(logits.at<std::uint16_t>(0), TILELOSS_BFLOAT16, kRows, kVocab, kVocab);
  args.labels = tileloss_make_vector(labels.data(), TILELOSS_INT32, kRows);
  args.logp = tileloss_make_vector(logp.data(), TILELOSS_FLOAT32, kRows);
  args.lse = tileloss_make_vector(lse.data(), TILELOSS_FLOAT32, kRows);
  ASSERT_TRUE(succeeds(tileloss_logprobs(&args, nullptr, nullptr, nullptr)));
  tools::OutputMetric metric("logp"), lse_metric("lse");
  for (std::size_t k = 0; k < rows.size(); ++k) {
    const auto i = static_cast<std::size_t>(used[k]);
    oracle::SoftmaxRow softmax;
    softmax.compute({}, rows[k], labels[i]);
    metric.add(used[k], logp[i], softmax.outputs().logp);
    lse_metric.add(used[k], lse[i], softmax.outputs().lse);
    logp[i] = lse[i] = 0;
  }
  for (const auto& gates : {metric.gates(), lse_metric.gates()}) {
    for (const tools::Gate& gate : gates) EXPECT_TRUE(gate.pass) << gate.name << " " << gate.value;
  }
  EXPECT_EQ(logp, std::vector<float>(kRows, 0.0F));
  EXPECT_EQ(lse, std::vector<float>(kRows, 0.0F));
}

// Many short rows, 8192 elements apart: 2^20 * 8192 elements are spanned, and the last 2000 rows are used.
TEST(Huge, AMillionRowsThatSpanMoreThanFourBillionElements) {
  constexpr std::int64_t kRows = std::int64_t{1} << 20, kVocab = 8, kStride = 8192, kFirst = kRows - 2000;
  static_assert(kRows * kStride > (std::int64_t{1} << 32));
  const Reserved logits(static_cast<std::size_t>(kRows * kStride) * 2);
  ASSERT_TRUE(logits.ok());
  std::vector<std::int32_t> labels(kRows, -100);
  std::vector<float> loss(kRows, -1);
  for (std::int64_t i = kFirst; i < kRows; ++i) {
    labels[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(i % kVocab);
    draw_row(i, -1, logits.at<std::uint16_t>(i * kStride), kVocab);
  }
  auto args = init<tileloss_args>();
  args.logits = tileloss_make_matrix(logits.at<std::uint16_t>(0), TILELOSS_BFLOAT16, kRows, kVocab, kStride);
  args.labels = tileloss_make_vector(labels.data(), TILELOSS_INT32, kRows);
  args.loss = tileloss_make_vector(loss.data(), TILELOSS_FLOAT32, kRows);
  const tileloss_cross_entropy_options options = per_row();
  ASSERT_TRUE(runs("cross_entropy", TILELOSS_FORWARD, args, &options, plan_options()));
  tools::OutputMetric losses("loss");
  for (std::int64_t i = kFirst; i < kRows; ++i) {
    std::vector<double> row(kVocab);
    oracle::decode_row(NumberFormat::kBfloat16, logits.at<std::uint16_t>(i * kStride), row);
    oracle::SoftmaxRow softmax;
    softmax.compute({}, row, labels[static_cast<std::size_t>(i)]);
    losses.add(i, loss[static_cast<std::size_t>(i)], -softmax.outputs().logp);
  }
  for (const tools::Gate& gate : losses.gates()) EXPECT_TRUE(gate.pass) << gate.name << " " << gate.value;
  EXPECT_EQ(std::vector<float>(loss.begin(), loss.begin() + kFirst), std::vector<float>(kFirst, 0.0F));
}

}  // namespace
}  // namespace tileloss::test
