// Logits in groups of rows, as x[:, :-1] of a [B,T,V] tensor: the same bits as from rows that lie together, and no row in between
// is read or written.
// On cuda: RowGroups.
#include <gtest/gtest.h>
#include <tileloss/tileloss.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/api/calls.h"

namespace tileloss::test {
namespace {

constexpr std::int64_t kGroups = 3, kRows = 4, kColumns = 131;
constexpr std::int64_t kGroupStride = (kRows + 2) * kColumns;  // two rows between the groups
constexpr float kUntouched = 77;

// [kGroups, kRows, kColumns] as a slice of [kGroups, kRows + 2, kColumns], and the same rows side by side.
struct Batch {
  std::vector<float> sliced = std::vector<float>(kGroups * kGroupStride, std::numeric_limits<float>::quiet_NaN());
  std::vector<float> together;
  std::vector<std::int64_t> labels;

  explicit Batch(float size = 4) {
    for (std::int64_t i = 0; i < kGroups * kRows; ++i) {
      labels.push_back(i % 5 == 3 ? -100 : i * 7 % kColumns);
      for (std::int64_t j = 0; j < kColumns; ++j) {
        const float z = std::sin(static_cast<float>(i * kColumns + j) * 0.37f) * size;
        sliced[static_cast<std::size_t>(at(i) + j)] = z;
        together.push_back(z);
      }
    }
  }
  static std::int64_t at(std::int64_t row) { return row / kRows * kGroupStride + row % kRows * kColumns; }

  tileloss_args args(float* logits, float* loss, float* dlogits) {
    auto a = init<tileloss_args>();
    a.logits = tileloss_make_matrix(logits, TILELOSS_FLOAT32, kGroups * kRows, kColumns, kColumns);
    a.labels = tileloss_make_vector(labels.data(), TILELOSS_INT64, kGroups * kRows);
    a.loss = tileloss_make_vector(loss, TILELOSS_FLOAT32, 1);
    a.dlogits = tileloss_make_matrix(dlogits, TILELOSS_FLOAT32, kGroups * kRows, kColumns, kColumns);
    return a;
  }
  tileloss_args grouped(float* logits, float* loss, float* dlogits) {
    tileloss_args a = args(logits, loss, dlogits);
    a.row_groups = {kRows, kGroupStride, kGroupStride};
    return a;
  }
};

TEST(RowGroups, GiveTheBitsOfRowsSideBySideAndLeaveTheRowsInBetweenAlone) {
  Batch b;
  const tileloss_cross_entropy_options options = cross_entropy_options();
  float loss = 0, wanted_loss = 0;
  std::vector<float> gradient(b.sliced.size(), kUntouched), wanted(b.together.size());
  ASSERT_TRUE(runs("cross_entropy", TILELOSS_VALUE_AND_GRAD, b.args(b.together.data(), &wanted_loss, wanted.data()), &options,
                   plan_options()));
  for (const tileloss_schedule schedule : kSchedules) {
    ASSERT_TRUE(runs("cross_entropy", TILELOSS_VALUE_AND_GRAD, b.grouped(b.sliced.data(), &loss, gradient.data()), &options,
                     with_schedule(schedule)));
    EXPECT_EQ(loss, wanted_loss);
    for (std::int64_t i = 0; i < kGroups * kRows; ++i) {
      for (std::int64_t j = 0; j < kColumns; ++j) {
        ASSERT_EQ(gradient[static_cast<std::size_t>(Batch::at(i) + j)], wanted[static_cast<std::size_t>(i * kColumns + j)])
            << "row " << i << ", column " << j;
      }
    }
    EXPECT_EQ(std::ranges::count(gradient, kUntouched), kGroups * 2 * kColumns);
  }
}

TEST(RowGroups, OfATeacherGiveTheLossOfRowsSideBySide) {
  Batch student, teacher(1);
  const tileloss_distillation_options options = distillation_options(TILELOSS_REVERSE_KL);
  std::vector<float> losses;
  for (const bool is_grouped : {false, true}) {
    float loss = 0;
    std::vector<float> gradient(student.sliced.size());
    tileloss_args a = is_grouped ? student.grouped(student.sliced.data(), &loss, gradient.data())
                                 : student.args(student.together.data(), &loss, gradient.data());
    a.row_groups.teacher_logits_stride = is_grouped ? kGroupStride : 0;
    a.teacher_logits = a.logits;
    a.teacher_logits.data = is_grouped ? teacher.sliced.data() : teacher.together.data();
    ASSERT_TRUE(runs("distillation", TILELOSS_VALUE_AND_GRAD, a, &options, plan_options()));
    losses.push_back(loss);
  }
  EXPECT_EQ(losses[0], losses[1]);
  EXPECT_GT(losses[0], 0);
}

TEST(RowGroups, InPlaceWritesNoRowInBetween) {
  Batch b;
  const tileloss_cross_entropy_options options = cross_entropy_options();
  float loss = 0;
  ASSERT_TRUE(runs("cross_entropy", TILELOSS_VALUE_AND_GRAD, b.grouped(b.sliced.data(), &loss, b.sliced.data()), &options,
                   plan_options()));
  EXPECT_TRUE(std::isfinite(loss));
  EXPECT_EQ(std::ranges::count_if(b.sliced, [](float x) { return std::isnan(x); }), kGroups * 2 * kColumns);
}

TEST(RowGroups, StridesThatCannotBeAreNamed) {
  Batch b;
  const tileloss_cross_entropy_options options = cross_entropy_options();
  float loss = 0;
  std::vector<float> gradient(b.sliced.size());
  const auto message = [&](const tileloss_row_groups& groups, float* dlogits) -> std::string {
    tileloss_args args = b.args(b.sliced.data(), &loss, dlogits);
    args.row_groups = groups;
    return tileloss_call("cross_entropy", TILELOSS_VALUE_AND_GRAD, &args, &options, nullptr, nullptr) == TILELOSS_OK
               ? "accepted"
               : tileloss_last_error();
  };
  EXPECT_EQ(message({5, kGroupStride, kGroupStride}, gradient.data()),
            "row_groups.rows: expected 0 or a divisor of the number of rows, 12, got 5");
  EXPECT_EQ(message({-1, kGroupStride, kGroupStride}, gradient.data()),
            "row_groups.rows: expected 0 or a divisor of the number of rows, 12, got -1");
  EXPECT_EQ(message({kRows, 523, kGroupStride}, gradient.data()),
            "row_groups.logits_stride: expected >= 524, what a group spans, got 523");
  EXPECT_EQ(message({kRows, kGroupStride, 523}, gradient.data()),
            "row_groups.dlogits_stride: expected >= 524, what a group spans, got 523");
  EXPECT_EQ(message({kRows, kGroupStride, kGroupStride + 1}, b.sliced.data()),
            "row_groups.dlogits_stride: expected the logits', 786, when it is written over them, got 787");
  EXPECT_EQ(message({kRows, kGroupStride, kGroupStride}, b.sliced.data() + 2 * kGroupStride + kColumns),
            "dlogits.data: expected the logits' own, or a buffer apart from them, got one that overlaps them");
}

}  // namespace
}  // namespace tileloss::test
