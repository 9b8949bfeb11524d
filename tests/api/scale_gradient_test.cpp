// tileloss_scale_gradient on the CPU; devices have theirs in tests/backends.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/number_formats.h"
#include "tests/api/corrupted_call.h"

namespace tileloss::test {
namespace {

constexpr std::int64_t kRows = 3, kCols = 70001, kStride = 70003;  // rows of two pieces, with gaps

template <class T>
void scales_rows(tileloss_dtype dtype) {
  std::vector<T> values(kRows * kStride);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = impl::from_float<T>(static_cast<float>(i % 97) / 16 - 3);
  values[5] = impl::from_float<T>(std::numeric_limits<float>::infinity());
  const std::vector<T> before = values;
  const tileloss_matrix rows = tileloss_make_matrix(values.data(), dtype, kRows, kCols, kStride);
  for (const float factor : {1.0F, 1 / 3.0F, 65536.0F, 0.0F, std::numeric_limits<float>::quiet_NaN()}) {
    values = before;
    ASSERT_TRUE(succeeds(tileloss_scale_gradient(&rows, &factor, nullptr)));
    for (std::size_t i = 0; i < values.size(); ++i) {
      const bool is_gap = static_cast<std::int64_t>(i) % kStride >= kCols;
      const float old = impl::to_float(before[i]), wanted = is_gap ? old : impl::to_float(impl::from_float<T>(old * factor));
      const float found = impl::to_float(values[i]);
      ASSERT_TRUE(found == wanted || (std::isnan(found) && std::isnan(wanted)))
          << "element " << i << " times " << factor << ": " << found << ", not " << wanted;
    }
  }
}

TEST(ScaledGradientValidation, RowsAreMultipliedInFloat32AndRoundedOnce) {
  scales_rows<float>(TILELOSS_FLOAT32);
  scales_rows<impl::Bfloat16>(TILELOSS_BFLOAT16);
  scales_rows<impl::Float16>(TILELOSS_FLOAT16);
}

TEST(ScaledGradientValidation, TheCallersThreadsAreTaken) {
  std::vector<float> values(std::size_t{1} << 18, 2);
  const float factor = 3;
  std::int64_t tasks = 0;
  const auto one_by_one = [&](std::int64_t count, Task task) {
    for (std::int64_t i = 0; i < count; ++i, ++tasks) task(i);
  };
  const Executor executor = Executor::from_parallel_for(one_by_one, 2);
  const Matrix gradient(values, 2, std::int64_t{1} << 17);
  ASSERT_TRUE(scale_gradient(gradient, &factor, {.executor = &executor}).ok());
  EXPECT_THAT(values, testing::Each(6.0F));
  EXPECT_GT(tasks, 1);
}

TEST(ScaledGradientValidation, WhatIsWrongIsRefusedAndNothingIsDone) {
  struct Scaling {
    std::vector<float> values = std::vector<float>(12, 1);
    float number = 2;
    tileloss_matrix gradient = tileloss_make_matrix(values.data(), TILELOSS_FLOAT32, 3, 4, 4);
    const tileloss_matrix* given = &gradient;
    const float* factor = &number;
    tileloss_run run = init<tileloss_run>();
  };
  const CorruptionOf<Scaling> corruptions[] = {
      {"gradient", "a matrix", "null", [](auto& s) { s.given = nullptr; }},
      {"gradient.dtype", "float32, bfloat16 or float16", "none", [](auto& s) { s.gradient.dtype = TILELOSS_NONE; }},
      {"gradient.col_stride", "1", "3", [](auto& s) { s.gradient.col_stride = 3; }},
      {"gradient.row_stride", ">= cols = 4", "3", [](auto& s) { s.gradient.row_stride = 3; }},
      {"gradient.data", "a pointer", "null", [](auto& s) { s.gradient.data = nullptr; }},
      {"gradient.device_type", "of this build", "78", [](auto& s) { s.gradient.device_type = 78; }, TILELOSS_UNSUPPORTED},
      {"gradient.device_index", "0", "1", [](auto& s) { s.gradient.device_index = 1; }},
      {"factor", "a pointer", "null", [](auto& s) { s.factor = nullptr; }},
      {"run.struct_size", "that of its init function", "3", [](auto& s) { s.run.struct_size = 3; }},
      {"run.stream", "null", "a pointer", [](auto& s) { s.run.stream = &s; }},
      {"run.merge", "null", "a function", [](auto& s) { s.run.merge = [](void*) -> tileloss_status { return 0; }; }},
  };
  for (const auto& c : corruptions) {
    Scaling s;
    c.corrupt(s);
    EXPECT_TRUE(names<Scaling>(c, tileloss_scale_gradient(s.given, s.factor, &s.run)));
    EXPECT_THAT(s.values, testing::Each(1.0F)) << c.argument;
  }
  Scaling empty;
  empty.gradient.rows = 0;
  EXPECT_TRUE(succeeds(tileloss_scale_gradient(&empty.gradient, empty.factor, nullptr)));
}

}  // namespace
}  // namespace tileloss::test
