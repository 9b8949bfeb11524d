// Short ways to call the library from a test.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <tileloss/tileloss.hpp>
#include <vector>

#include "support/arg_slots.h"
#include "tests/shared/logits_case.h"

namespace tileloss::test {

// A struct of the ABI as its init function fills it.
template <class Struct>
Struct init() {
  Struct filled;
  tileloss_struct_init(&filled, sizeof filled);
  return filled;
}

inline tileloss_cross_entropy_options cross_entropy_options() { return {}; }
inline tileloss_logprobs_options logprobs_options() { return {}; }
inline tileloss_distillation_options distillation_options(std::int32_t divergence = TILELOSS_FORWARD_KL) {
  return {.divergence = divergence};
}
inline tileloss_policy_loss_options policy_options(const char* preset) {
  tileloss_policy_loss_options options;
  EXPECT_EQ(tileloss_options_preset("policy_loss", preset, &options, sizeof options), TILELOSS_OK);
  return options;
}

inline constexpr int kDivergences = TILELOSS_TOTAL_VARIATION + 1;
inline constexpr tileloss_schedule kSchedules[] = {TILELOSS_SCHEDULE_STASH, TILELOSS_SCHEDULE_RECOMPUTE,
                                                   TILELOSS_SCHEDULE_SWEEPS};
inline constexpr tileloss_reduction kReductions[] = {TILELOSS_REDUCTION_NONE, TILELOSS_REDUCTION_SUM, TILELOSS_REDUCTION_MEAN};

// Of a test of every storage type: INSTANTIATE_TEST_SUITE_P(Formats, Name, testing::ValuesIn(kFormats), format_name).
inline std::string format_name(const testing::TestParamInfo<oracle::NumberFormat>& format) {
  return oracle::format_info(format.param).name;
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

inline tileloss_plan_options plan_options() { return init<tileloss_plan_options>(); }

inline tileloss_plan_options with_schedule(tileloss_schedule schedule) {
  tileloss_plan_options options = plan_options();
  options.cpu.schedule = schedule;
  return options;
}

inline testing::AssertionResult succeeds(tileloss_status status) {
  if (status == TILELOSS_OK) return testing::AssertionSuccess();
  return testing::AssertionFailure() << tileloss_status_name(status) << ": " << tileloss_last_error();
}

// Exactly this status and message; a message that ends in "..." may go on.
inline testing::AssertionResult refused(tileloss_status status, tileloss_status wanted, const std::string& message) {
  const std::string said = tileloss_last_error();
  const bool is_start = message.ends_with("...") && said.starts_with(message.substr(0, message.size() - 3));
  if (status == wanted && (said == message || is_start)) return testing::AssertionSuccess();
  return testing::AssertionFailure() << tileloss_status_name(status) << " \"" << said << "\", not \"" << message << "\"";
}

// What the library says of a call: the message of its error, or that it was accepted.
inline std::string answer(const char* function, const tileloss_args& args, const void* options,
                          tileloss_pass pass = TILELOSS_VALUE_AND_GRAD) {
  return tileloss_call(function, pass, &args, options, nullptr, nullptr) == TILELOSS_OK ? "accepted" : tileloss_last_error();
}

// Views of all that an array holds.
template <class Array>
tileloss_vector view(Array& values) {
  return Vector(values).c();
}
template <class Array>
tileloss_matrix view(Array& values, std::int64_t rows, std::int64_t cols) {
  return Matrix(values, rows, cols).c();
}

// What the suites of plans and of their workspaces plan: more rows than a row block, more columns than a tile.
inline LogitsCaseSpec spec_of_plans() {
  return {.rows = 40, .vocab = 3000, .format = oracle::NumberFormat::kBfloat16, .ignore_prob = 0.2, .extra_outputs = true};
}

// A plan, which must succeed.
inline tileloss_plan plan_for(const char* function, tileloss_pass pass, const tileloss_args& args, const void* options,
                              const tileloss_plan_options& hints = plan_options(), const tileloss_executor* executor = nullptr) {
  auto plan = init<tileloss_plan>();
  EXPECT_TRUE(succeeds(tileloss_make_plan(function, pass, &args, options, &hints, executor, &plan)));
  return plan;
}

inline tileloss_plan plan_of(const LogitsCase& c, const tileloss_cross_entropy_options& options,
                             const tileloss_plan_options& hints, tileloss_pass pass = TILELOSS_VALUE_AND_GRAD) {
  return plan_for("cross_entropy", pass, c.args(), &options, hints);
}

// Plans and runs. `plan_out`, if given, receives the plan.
inline testing::AssertionResult runs(const char* function, tileloss_pass pass, const tileloss_args& args, const void* options,
                                     const tileloss_plan_options& hints, const tileloss_run* run = nullptr,
                                     tileloss_plan* plan_out = nullptr) {
  auto plan = init<tileloss_plan>();
  const tileloss_executor* executor = run == nullptr ? nullptr : run->executor;
  const tileloss_status planned = tileloss_make_plan(function, pass, &args, options, &hints, executor, &plan);
  if (planned != TILELOSS_OK) return succeeds(planned);
  if (plan_out != nullptr) *plan_out = plan;
  return succeeds(tileloss_call(function, pass, &args, options, &plan, run));
}

inline testing::AssertionResult runs_value_and_grad(LogitsCase& c, const tileloss_cross_entropy_options& options,
                                                    const tileloss_plan_options& hints = plan_options()) {
  return runs("cross_entropy", TILELOSS_VALUE_AND_GRAD, c.args(), &options, hints);
}

// In every schedule; the last one's outputs stay.
inline testing::AssertionResult agrees_in_every_schedule(LogitsCase& c, const tileloss_cross_entropy_options& options,
                                                         tileloss_plan_options hints = plan_options()) {
  for (const tileloss_schedule schedule : kSchedules) {
    hints.cpu.schedule = schedule;
    c.reset();
    testing::AssertionResult result = runs_value_and_grad(c, options, hints);
    if (result) result = agrees(check_cross_entropy(c, options));
    if (!result) return result << "schedule " << schedule;
  }
  return testing::AssertionSuccess();
}

// The bytes of an output; empty if it is absent.
inline std::vector<unsigned char> bytes_of(const tileloss_matrix& m) {
  if (m.dtype == TILELOSS_NONE || m.data == nullptr) return {};
  const std::size_t element = tools::element_bytes(m.dtype);
  std::vector<unsigned char> bytes;
  // Rows whose elements lie side by side at once.
  const std::int64_t parts = m.col_stride == 1 ? 1 : m.cols;
  for (std::int64_t i = 0; i < m.rows * parts; ++i) {
    const std::int64_t at = i / parts * m.row_stride + i % parts * m.col_stride;
    const auto* p = static_cast<const unsigned char*>(m.data) + static_cast<std::size_t>(at) * element;
    bytes.insert(bytes.end(), p, p + static_cast<std::size_t>(m.cols / parts) * element);
  }
  return bytes;
}
inline std::vector<unsigned char> bytes_of(const tileloss_vector& v) {
  return bytes_of(tileloss_make_matrix(v.data, v.dtype, v.size, 1, v.stride));
}

// All that a call has written.
inline std::vector<unsigned char> outputs_of(const tileloss_args& a) {
  std::vector<unsigned char> all;
  for (const impl::TensorSlot& slot : impl::tensor_slots()) {
    if (!slot.is_output()) continue;
    const std::vector<unsigned char> part = slot.vector != nullptr ? bytes_of(a.*slot.vector) : bytes_of(a.*slot.matrix);
    all.insert(all.end(), part.begin(), part.end());
  }
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

// The arrays of a row state, all of them, and the struct that points at them. Not to be copied: the struct points into it.
class RowStateArrays {
 public:
  // With labels_per_row > 1: label_logits too. Of allowed columns: allowed_count and allowed_weight.
  explicit RowStateArrays(std::int64_t rows, std::int64_t labels_per_row = 0, bool of_allowed = false)
      : floats_(8, std::vector<float>(static_cast<std::size_t>(rows), -7.0F)), argmax_(static_cast<std::size_t>(rows), -7) {
    state_ = init<tileloss_row_state>();
    state_.rows = rows;
    float** const arrays[] = {&state_.max,           &state_.sum,           &state_.label_logit,   &state_.entropy_sum,
                              &state_.collision_sum, &state_.smoothing_sum, &state_.allowed_count, &state_.allowed_weight};
    floats_.resize(of_allowed ? 8 : 6);
    for (std::size_t i = 0; i < floats_.size(); ++i) *arrays[i] = floats_[i].data();
    state_.argmax = argmax_.data();
    if (labels_per_row < 2) return;
    floats_.emplace_back(static_cast<std::size_t>(rows * labels_per_row), -7.0F);
    state_.label_logits = floats_.back().data();
    state_.labels_per_row = labels_per_row;
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
