// Short ways to call the library from a test.
#ifndef TILELOSS_TESTS_API_CALLS_H_
#define TILELOSS_TESTS_API_CALLS_H_

#include <gtest/gtest.h>
#include <tileloss/tileloss.h>

#include <cstring>
#include <string>
#include <vector>

#include "tests/shared/logits_case.h"

namespace tileloss::test {

inline tileloss_cross_entropy_options cross_entropy_options() {
  tileloss_cross_entropy_options options;
  tileloss_cross_entropy_options_init(&options);
  return options;
}

// Options that select different loops: smoothing's sum, a softcap that logits reach and one far from them, a scale.
inline std::vector<tileloss_cross_entropy_options> option_sets() {
  std::vector<tileloss_cross_entropy_options> sets(5, cross_entropy_options());
  sets[1].label_smoothing = 0.1;
  sets[2].logit.softcap = 30;
  sets[3].logit.temperature.value = 0.7;
  sets[4].logit.softcap = 15;
  sets[4].label_smoothing = 0.2;
  sets[4].z_loss = 1e-3;
  return sets;
}

inline tileloss_logprobs_options logprobs_options() {
  tileloss_logprobs_options options;
  tileloss_logprobs_options_init(&options);
  return options;
}

inline tileloss_plan_options plan_options() {
  tileloss_plan_options options;
  tileloss_plan_options_init(&options);
  return options;
}

inline tileloss_plan_options with_schedule(tileloss_schedule schedule) {
  tileloss_plan_options options = plan_options();
  options.schedule = schedule;
  return options;
}

inline testing::AssertionResult succeeds(tileloss_status status) {
  if (status == TILELOSS_OK) return testing::AssertionSuccess();
  return testing::AssertionFailure() << tileloss_status_name(status) << ": " << tileloss_last_error();
}

// Exactly this status and message.
inline testing::AssertionResult refused(tileloss_status status, tileloss_status wanted, const std::string& message) {
  if (status == wanted && tileloss_last_error() == message) return testing::AssertionSuccess();
  return testing::AssertionFailure() << tileloss_status_name(status) << " \"" << tileloss_last_error() << "\", not \"" << message
                                     << "\"";
}

// What the suites of plans and of their workspaces plan: more rows than a row block, more columns than a tile.
inline LogitsCaseSpec spec_of_plans() {
  return {.rows = 40, .vocab = 3000, .format = reference::NumberFormat::kBfloat16, .ignore_prob = 0.2, .extra_outputs = true};
}

// A cross-entropy's plan, which must succeed.
inline tileloss_plan plan_of(const LogitsCase& c, const tileloss_cross_entropy_options& options,
                             const tileloss_plan_options& wishes, tileloss_pass pass = TILELOSS_VALUE_AND_GRAD) {
  tileloss_plan plan;
  tileloss_plan_init(&plan);
  EXPECT_TRUE(succeeds(tileloss_make_plan("cross_entropy", pass, &c.args(), &options, &wishes, nullptr, &plan)));
  return plan;
}

// Plans and runs. `plan_out`, if given, receives the plan.
inline testing::AssertionResult runs(const char* function, tileloss_pass pass, const tileloss_args& args, const void* options,
                                     const tileloss_plan_options& wishes, const tileloss_run* run = nullptr,
                                     tileloss_plan* plan_out = nullptr) {
  tileloss_plan plan;
  tileloss_plan_init(&plan);
  const tileloss_executor* executor = run == nullptr ? nullptr : run->executor;
  const tileloss_status planned = tileloss_make_plan(function, pass, &args, options, &wishes, executor, &plan);
  if (planned != TILELOSS_OK) return succeeds(planned);
  if (plan_out != nullptr) *plan_out = plan;
  return succeeds(tileloss_call(function, pass, &args, options, &plan, run));
}

inline testing::AssertionResult runs_value_and_grad(LogitsCase& c, const tileloss_cross_entropy_options& options,
                                                    const tileloss_plan_options& wishes = plan_options()) {
  return runs("cross_entropy", TILELOSS_VALUE_AND_GRAD, c.args(), &options, wishes);
}

// The bytes of an output; empty if it is absent.
inline std::vector<unsigned char> bytes_of(const tileloss_vector& v) {
  if (v.dtype == TILELOSS_NONE || v.size == 0) return {};
  const std::size_t element = v.dtype == TILELOSS_INT64 ? 8 : v.dtype == TILELOSS_UINT8 ? 1 : 4;
  const auto* data = static_cast<const unsigned char*>(v.data);
  std::vector<unsigned char> bytes;
  for (std::int64_t i = 0; i < v.size; ++i) {
    const unsigned char* p = data + static_cast<std::size_t>(i * v.stride) * element;
    bytes.insert(bytes.end(), p, p + element);
  }
  return bytes;
}

inline std::vector<unsigned char> bytes_of(const tileloss_matrix& m) {
  if (m.dtype == TILELOSS_NONE || m.data == nullptr) return {};
  const std::size_t element = m.dtype == TILELOSS_FLOAT32 ? 4 : 2;
  std::vector<unsigned char> bytes;
  for (std::int64_t i = 0; i < m.rows; ++i) {
    const unsigned char* p = static_cast<const unsigned char*>(m.data) + static_cast<std::size_t>(i * m.row_stride) * element;
    bytes.insert(bytes.end(), p, p + static_cast<std::size_t>(m.cols) * element);
  }
  return bytes;
}

// All that a call has written.
inline std::vector<unsigned char> outputs_of(const tileloss_args& a) {
  std::vector<unsigned char> all;
  for (const tileloss_vector* v :
       {&a.loss, &a.logp, &a.lse, &a.entropy, &a.argmax, &a.correct, &a.log_sum_sq_probs, &a.mean_logit}) {
    const std::vector<unsigned char> part = bytes_of(*v);
    all.insert(all.end(), part.begin(), part.end());
  }
  const std::vector<unsigned char> gradient = bytes_of(a.dlogits);
  all.insert(all.end(), gradient.begin(), gradient.end());
  return all;
}

// Bitwise, without printing megabytes.
inline testing::AssertionResult same_bits(const std::vector<unsigned char>& a, const std::vector<unsigned char>& b) {
  if (a.empty() || a.size() != b.size()) return testing::AssertionFailure() << a.size() << " bytes against " << b.size();
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i] != b[i])
      return testing::AssertionFailure() << "byte " << i << " of " << a.size() << ": " << +a[i] << " against " << +b[i];
  }
  return testing::AssertionSuccess();
}

inline float float_at(const tileloss_vector& v, std::int64_t i) { return static_cast<const float*>(v.data)[i * v.stride]; }

// The arrays of a row state, all of them, and the struct that points at them. Not to be copied: the struct points into it.
class RowStateArrays {
 public:
  explicit RowStateArrays(std::int64_t rows)
      : floats_(6, std::vector<float>(static_cast<std::size_t>(rows), -7.0F)), argmax_(static_cast<std::size_t>(rows), -7) {
    tileloss_row_state_init(&state_);
    state_.rows = rows;
    state_.max = floats_[0].data();
    state_.sum = floats_[1].data();
    state_.target = floats_[2].data();
    state_.entropy_sum = floats_[3].data();
    state_.collision_sum = floats_[4].data();
    state_.smoothing_sum = floats_[5].data();
    state_.argmax = argmax_.data();
  }
  RowStateArrays(const RowStateArrays&) = delete;
  RowStateArrays& operator=(const RowStateArrays&) = delete;

  tileloss_row_state& get() { return state_; }
  const std::vector<std::vector<float>>& floats() const { return floats_; }
  const std::vector<std::int64_t>& argmax() const { return argmax_; }

 private:
  std::vector<std::vector<float>> floats_;
  std::vector<std::int64_t> argmax_;
  tileloss_row_state state_{};
};

}  // namespace tileloss::test

#endif  // TILELOSS_TESTS_API_CALLS_H_
