// What must hold of the distillation losses whatever the numbers, and every line of the special-values table of distillation.h.
#include "oracle/distillation.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <stdexcept>
#include <vector>

namespace tileloss::oracle {
namespace {

using Values = std::vector<double>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

const Values kStudent{0.5, -1.25, 2.0, 0.0}, kTeacher{1.0, 0.25, -0.5, 3.0};
const std::vector<Divergence> kAll{Divergence::kForwardKl,     Divergence::kReverseKl,     Divergence::kJsd,
                                   Divergence::kJeffreys,      Divergence::kSkewForwardKl, Divergence::kSkewReverseKl,
                                   Divergence::kTotalVariation};

DistillationOptions with(Divergence divergence, double beta = 0.5) {
  DistillationOptions options;
  options.divergence = divergence;
  options.beta = beta;
  options.reduction = Reduction::kSum;
  return options;
}

struct OneRow {
  double loss = 0.0;
  Values dlogits;
  DistillationOutputs outputs;
};

OneRow finish(const DistillationOptions& options, const DistillationRow& row, std::int64_t label) {
  const std::vector<std::int64_t> labels(label == DistillationRow::kNoLabel ? 0 : 1, label);
  const Distillation oracle(options, 1, labels, {}, {});
  DistillationGradient gradient;
  oracle.row_gradient(0, row, gradient);
  return {oracle.row_loss(0, row), gradient.dlogits, row.outputs()};
}

OneRow one_row(const DistillationOptions& options, const Values& student, const Values& teacher,
               std::int64_t label = DistillationRow::kNoLabel) {
  DistillationRow row;
  row.compute(options, student, teacher, label);
  return finish(options, row, label);
}

OneRow one_row(Divergence divergence, double beta, const Values& student, const Values& teacher) {
  return one_row(with(divergence, beta), student, teacher);
}

OneRow sparse_row(const DistillationOptions& options, const Values& student, const std::vector<std::int64_t>& ids,
                  const Values& log_q, Tail tail) {
  DistillationRow row;
  row.compute_sparse(options, student, ids, log_q, tail);
  return finish(options, row, DistillationRow::kNoLabel);
}

Values softmax(const Values& logits) {
  double sum = 0.0;
  for (const double value : logits) sum += std::exp(value);
  Values p;
  for (const double value : logits) p.push_back(std::exp(value) / sum);
  return p;
}

Values logs(Values values) {
  for (double& value : values) value = std::log(value);
  return values;
}

void expect_near(const Values& found, const Values& expected, double tolerance = 1e-15) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t j = 0; j < found.size(); ++j) EXPECT_NEAR(found[j], expected[j], tolerance) << "column " << j;
}

void expect_all_nan(const Values& found) {
  ASSERT_FALSE(found.empty());
  for (const double value : found) EXPECT_TRUE(std::isnan(value)) << value;
}

// --------------------------------------------------------------------------------------------------------- identities

TEST(Distillation, EqualDistributionsGiveExactlyZero) {
  const Values teacher{1.5, -0.25, 3.0, 1.0};  // kStudent + 1
  for (const Divergence divergence : kAll) {
    for (const Values& other : {kStudent, teacher}) {
      DistillationOptions options = with(divergence, 0.3);
      options.student.temperature = 0.5;
      const OneRow row = one_row(options, kStudent, other);
      EXPECT_EQ(row.loss, 0.0);
      for (const double value : row.dlogits) EXPECT_EQ(value, 0.0);
      EXPECT_TRUE(row.outputs.agreement);
    }
  }
}

TEST(Distillation, JsdIsSymmetricAtOneHalf) {
  const double one = one_row(Divergence::kJsd, 0.5, kStudent, kTeacher).loss;
  EXPECT_GT(one, 0.1);
  EXPECT_NEAR(one, one_row(Divergence::kJsd, 0.5, kTeacher, kStudent).loss, 1e-16);
}

TEST(Distillation, JeffreysIsTheSumOfBothKls) {
  const OneRow forward = one_row(Divergence::kForwardKl, 0.5, kStudent, kTeacher);
  const OneRow reverse = one_row(Divergence::kReverseKl, 0.5, kStudent, kTeacher);
  const OneRow both = one_row(Divergence::kJeffreys, 0.5, kStudent, kTeacher);
  EXPECT_NEAR(both.loss, forward.loss + reverse.loss, 1e-15);
  for (std::size_t j = 0; j < 4; ++j) EXPECT_NEAR(both.dlogits[j], forward.dlogits[j] + reverse.dlogits[j], 1e-15);
  EXPECT_NEAR(forward.loss, one_row(Divergence::kReverseKl, 0.5, kTeacher, kStudent).loss, 1e-15);
}

TEST(Distillation, SkewedDivergencesEndInTheKlAndInNothing) {
  const std::vector<std::pair<Divergence, Divergence>> pairs{{Divergence::kSkewForwardKl, Divergence::kForwardKl},
                                                             {Divergence::kSkewReverseKl, Divergence::kReverseKl}};
  for (const auto& [skewed, kl] : pairs) {
    const OneRow start = one_row(skewed, 0.0, kStudent, kTeacher), plain = one_row(kl, 0.5, kStudent, kTeacher);
    EXPECT_NEAR(start.loss, plain.loss, 1e-15);
    expect_near(start.dlogits, plain.dlogits);
    EXPECT_NEAR(one_row(skewed, 1e-9, kStudent, kTeacher).loss, plain.loss, 1e-7);
    const OneRow end = one_row(skewed, 1.0, kStudent, kTeacher);
    EXPECT_EQ(end.loss, 0.0);
    expect_near(end.dlogits, {0.0, 0.0, 0.0, 0.0}, 0.0);
  }
}

// 0 <= TV <= 1, KL >= 2 TV^2 (Pinsker), JSD <= log 2.
TEST(Distillation, BoundsHold) {
  const double tv = one_row(Divergence::kTotalVariation, 0.5, kStudent, kTeacher).loss;
  EXPECT_GT(tv, 0.5);
  EXPECT_LT(tv, 1.0);
  EXPECT_GE(one_row(Divergence::kForwardKl, 0.5, kStudent, kTeacher).loss, 2.0 * tv * tv);
  EXPECT_NEAR(one_row(Divergence::kJsd, 0.5, {800.0, 0.0}, {0.0, 800.0}).loss, std::log(2.0), 1e-15);
  EXPECT_EQ(one_row(Divergence::kTotalVariation, 0.5, {800.0, 0.0}, {0.0, 800.0}).loss, 1.0);
}

// A list of all columns is the dense teacher, with any tail.
TEST(Distillation, AListOfAllColumnsIsTheDenseTeacher) {
  const Values q = softmax(kTeacher);
  for (const Divergence divergence : kAll) {
    const DistillationOptions options = with(divergence, 0.3);
    const OneRow dense = one_row(options, kStudent, kTeacher);
    for (const Tail tail : {Tail::kIgnore, Tail::kLump, Tail::kRenormalise}) {
      const OneRow row = sparse_row(options, kStudent, {2, 0, 3, 1}, logs({q[2], q[0], q[3], q[1]}), tail);
      EXPECT_NEAR(row.loss, dense.loss, 1e-15);
      expect_near(row.dlogits, dense.dlogits);
      EXPECT_NEAR(row.outputs.teacher_entropy, dense.outputs.teacher_entropy, 1e-15);
      EXPECT_EQ(row.outputs.agreement, dense.outputs.agreement);
    }
  }
}

// ---------------------------------------------------------------------------------------------- outputs and reductions

TEST(Distillation, OutputsAreThoseOfEachSide) {
  DistillationOptions options = with(Divergence::kForwardKl);
  options.student.temperature = 2.0;
  const OneRow row = one_row(options, kStudent, kTeacher, 1);
  Values half, teacher_half;
  for (const double value : kStudent) half.push_back(value / 2.0);
  for (const double value : kTeacher) teacher_half.push_back(value / 2.0);
  const Values p = softmax(half), q = softmax(teacher_half);
  double entropy = 0.0, teacher_entropy = 0.0, divergence = 0.0;
  for (std::size_t j = 0; j < 4; ++j) {
    entropy -= p[j] * std::log(p[j]);
    teacher_entropy -= q[j] * std::log(q[j]);
    divergence += q[j] * std::log(q[j] / p[j]);
  }
  EXPECT_NEAR(row.outputs.student_entropy, entropy, 1e-15);
  EXPECT_NEAR(row.outputs.teacher_entropy, teacher_entropy, 1e-15);
  EXPECT_NEAR(row.outputs.divergence, divergence, 1e-15);
  EXPECT_NEAR(row.outputs.logp, std::log(p[1]), 1e-15);
  EXPECT_NEAR(row.outputs.student_lse, half[1] - std::log(p[1]), 1e-15);
  EXPECT_NEAR(row.outputs.teacher_lse, teacher_half[1] - std::log(q[1]), 1e-15);
  EXPECT_FALSE(row.outputs.agreement);
  EXPECT_TRUE(std::isnan(one_row(options, kStudent, kTeacher).outputs.logp));
  options.scale_by_temperature_squared = true;
  EXPECT_NEAR(one_row(options, kStudent, kTeacher).outputs.divergence, 4.0 * divergence, 4e-15);
  EXPECT_NEAR(one_row(options, kStudent, kTeacher).loss, 4.0 * divergence, 4e-15);
}

TEST(Distillation, AgreementTakesTheLowestIndexOnTies) {
  const DistillationOptions options = with(Divergence::kForwardKl);
  EXPECT_TRUE(one_row(options, {0.0, 2.0, 2.0}, {1.0, 3.0, 3.0}).outputs.agreement);
  EXPECT_FALSE(one_row(options, {0.0, 2.0, 2.0}, {1.0, 2.0, 3.0}).outputs.agreement);
  EXPECT_TRUE(sparse_row(options, {0.0, 2.0, 2.0}, {2, 1}, {-1.0, -1.0}, Tail::kLump).outputs.agreement);
}

TEST(Distillation, MeanDividesByTheWeightsInUseOrNumItems) {
  const std::vector<std::int64_t> labels{0, -100, 2};
  const Values weights{0.5, 100.0, 1.5}, losses{3.0, 0.0, 5.0};
  DistillationOptions options = with(Divergence::kForwardKl);
  EXPECT_EQ(Distillation(options, 3, labels, weights, {}).reduce(losses), 8.0);
  options.reduction = Reduction::kMean;
  EXPECT_EQ(Distillation(options, 3, labels, weights, {}).reduce(losses), 4.0);
  options.num_items = 16.0;
  EXPECT_EQ(Distillation(options, 3, labels, weights, {}).reduce(losses), 0.5);
  options.num_items = 0.0;
  EXPECT_EQ(Distillation(options, 3, labels, weights, {}).reduce({{kInfinity, kNan, 1.0}}), 0.0);
  options.num_items = DistillationOptions::kNotGiven;
  const std::vector<std::int64_t> ignored{-100, -100, -100};
  EXPECT_EQ(Distillation(options, 3, ignored, weights, {}).reduce({{0.0, 0.0, 0.0}}), 0.0);
  EXPECT_EQ(Distillation(options, 0, {}, {}, {}).reduce({}), 0.0);
}

TEST(Distillation, PaddingIsNotReadAndSidesMayBePaddedApart) {
  DistillationOptions options = with(Divergence::kJsd);
  const OneRow plain = one_row(options, kStudent, kTeacher);
  options.valid_vocab = 4;
  const OneRow row = one_row(options, {0.5, -1.25, 2.0, 0.0, kNan}, {1.0, 0.25, -0.5, 3.0, kInfinity, 9.0});
  EXPECT_EQ(row.loss, plain.loss);
  Values expected = plain.dlogits;
  expected.push_back(0.0);
  expect_near(row.dlogits, expected, 0.0);
}

// ----------------------------------------------------------------------------------------------------- special values

TEST(DistillationSpecial, RowsNotInUseAreZero) {
  DistillationOptions options = with(Divergence::kForwardKl);
  const std::vector<std::int64_t> labels{-100};
  const Distillation oracle(options, 1, labels, {}, {});
  DistillationRow row;
  row.compute(options, {{kNan, 1.0}}, {{kInfinity, 2.0}});
  EXPECT_TRUE(oracle.is_ignored(0));
  EXPECT_EQ(oracle.row_loss(0, row), 0.0);
  DistillationGradient gradient;
  oracle.row_gradient(0, row, gradient);
  expect_near(gradient.dlogits, {0.0, 0.0}, 0.0);
}

TEST(DistillationSpecial, CorruptedSidesCorruptTheRowButNotTheOtherSidesOutputs) {
  const Values corrupted[] = {{0.0, kNan, 1.0}, {0.0, kInfinity, 1.0}, {-kInfinity, -kInfinity, -kInfinity}};
  const double lse[] = {kNan, kInfinity, -kInfinity};
  const Values clean{0.0, 1.0, 2.0};
  for (const Divergence divergence : kAll) {
    for (const double label : {0.0, 0.5, 1.0}) {
      DistillationOptions options = with(divergence);
      options.label_weight = label;
      options.divergence_weight = 1.0 - label;
      const OneRow good = one_row(options, clean, clean, 0);
      for (std::size_t i = 0; i < 3; ++i) {
        const OneRow teacher = one_row(options, clean, corrupted[i], 0), student = one_row(options, corrupted[i], clean, 0);
        for (const OneRow* row : {&teacher, &student}) {
          EXPECT_TRUE(std::isnan(row->loss));
          EXPECT_TRUE(std::isnan(row->outputs.divergence));
          expect_all_nan(row->dlogits);
        }
        EXPECT_EQ(teacher.outputs.student_entropy, good.outputs.student_entropy);
        EXPECT_EQ(teacher.outputs.student_lse, good.outputs.student_lse);
        EXPECT_EQ(teacher.outputs.logp, good.outputs.logp);
        EXPECT_TRUE(std::isnan(teacher.outputs.teacher_entropy));
        EXPECT_TRUE(std::isnan(lse[i]) ? std::isnan(teacher.outputs.teacher_lse) : teacher.outputs.teacher_lse == lse[i]);
        EXPECT_EQ(student.outputs.teacher_entropy, good.outputs.teacher_entropy);
        EXPECT_EQ(student.outputs.teacher_lse, good.outputs.teacher_lse);
        EXPECT_TRUE(std::isnan(student.outputs.student_entropy));
        EXPECT_TRUE(std::isnan(student.outputs.logp));
        EXPECT_TRUE(std::isnan(lse[i]) ? std::isnan(student.outputs.student_lse) : student.outputs.student_lse == lse[i]);
      }
    }
  }
}

// A column that neither has is as if it were not there.
TEST(DistillationSpecial, ColumnsWithoutBothHaveNoPart) {
  for (const Divergence divergence : kAll) {
    const OneRow row = one_row(divergence, 0.3, {0.5, -kInfinity, 2.0}, {1.0, -kInfinity, -0.5});
    const OneRow without = one_row(divergence, 0.3, {0.5, 2.0}, {1.0, -0.5});
    EXPECT_EQ(row.loss, without.loss);
    expect_near(row.dlogits, {without.dlogits[0], 0.0, without.dlogits[1]}, 0.0);
  }
}

// Two columns, of which one side has one only.
TEST(DistillationSpecial, ColumnsWithoutQ) {
  const Values student{0.0, 0.0}, teacher{-kInfinity, 0.0};
  const double log2 = std::log(2.0);
  const OneRow forward = one_row(Divergence::kForwardKl, 0.5, student, teacher);
  EXPECT_NEAR(forward.loss, log2, 1e-15);
  expect_near(forward.dlogits, {0.5, -0.5});
  for (const auto& [divergence, beta] : {std::pair{Divergence::kReverseKl, 0.5}, std::pair{Divergence::kJeffreys, 0.5},
                                         std::pair{Divergence::kSkewReverseKl, 0.0}}) {
    const OneRow row = one_row(divergence, beta, student, teacher);
    EXPECT_EQ(row.loss, kInfinity);
    EXPECT_TRUE(std::isnan(row.dlogits[0]));
    EXPECT_EQ(row.dlogits[1], -kInfinity);
  }
  // With a column that has q alone beside it.
  const OneRow reverse = one_row(Divergence::kReverseKl, 0.5, {0.0, 0.0, -kInfinity}, {-kInfinity, 0.0, 0.0});
  EXPECT_EQ(reverse.loss, kInfinity);
  EXPECT_EQ(reverse.dlogits[2], 0.0);
  EXPECT_EQ(one_row(Divergence::kJeffreys, 0.5, {0.0, 0.0, -kInfinity}, {-kInfinity, 0.0, 0.0}).dlogits[2], -0.5);
  // beta = 1/4. m of JSD and skewed forward: (3/8, 5/8); of skewed reverse: (1/8, 7/8).
  const OneRow jsd = one_row(Divergence::kJsd, 0.25, student, teacher);
  EXPECT_NEAR(jsd.loss, 0.25 * std::log(8.0 / 5.0) + 0.75 * (0.5 * std::log(4.0 / 3.0) + 0.5 * std::log(4.0 / 5.0)), 1e-15);
  const double jsd_slope = 0.75 * 0.25 * (std::log(4.0 / 3.0) - std::log(4.0 / 5.0));
  expect_near(jsd.dlogits, {jsd_slope, -jsd_slope});
  const OneRow skew = one_row(Divergence::kSkewForwardKl, 0.25, student, teacher);
  EXPECT_NEAR(skew.loss, std::log(8.0 / 5.0), 1e-15);
  expect_near(skew.dlogits, {0.75 * 0.25 * 8.0 / 5.0, -0.75 * 0.25 * 8.0 / 5.0});
  const OneRow turned = one_row(Divergence::kSkewReverseKl, 0.25, student, teacher);
  EXPECT_NEAR(turned.loss, 0.5 * std::log(4.0) + 0.5 * std::log(4.0 / 7.0), 1e-15);
  const double turned_slope = 0.25 * (std::log(7.0) - 0.75 * 8.0 / 7.0);
  expect_near(turned.dlogits, {turned_slope, -turned_slope});
  const OneRow tv = one_row(Divergence::kTotalVariation, 0.5, student, teacher);
  EXPECT_EQ(tv.loss, 0.5);
  expect_near(tv.dlogits, {0.25, -0.25});
}

TEST(DistillationSpecial, ColumnsWithoutP) {
  const Values student{-kInfinity, 0.0}, teacher{0.0, 0.0};
  for (const auto& [divergence, beta] : {std::pair{Divergence::kForwardKl, 0.5}, std::pair{Divergence::kJeffreys, 0.5},
                                         std::pair{Divergence::kSkewForwardKl, 0.0}}) {
    const OneRow row = one_row(divergence, beta, student, teacher);
    EXPECT_EQ(row.loss, kInfinity);
    expect_near(row.dlogits, {-0.5, 0.5});
  }
  const OneRow reverse = one_row(Divergence::kReverseKl, 0.5, student, teacher);
  EXPECT_NEAR(reverse.loss, std::log(2.0), 1e-15);
  expect_near(reverse.dlogits, {0.0, 0.0});
  // beta = 1/4. m of JSD and skewed forward: (1/8, 7/8); of skewed reverse: (3/8, 5/8).
  const double from_teacher = 0.5 * std::log(4.0) + 0.5 * std::log(4.0 / 7.0);
  const OneRow jsd = one_row(Divergence::kJsd, 0.25, student, teacher);
  EXPECT_NEAR(jsd.loss, 0.25 * from_teacher + 0.75 * std::log(8.0 / 7.0), 1e-15);
  expect_near(jsd.dlogits, {0.0, 0.0});
  const OneRow skew = one_row(Divergence::kSkewForwardKl, 0.25, student, teacher);
  EXPECT_NEAR(skew.loss, from_teacher, 1e-15);
  expect_near(skew.dlogits, {0.0, 0.0});
  const OneRow turned = one_row(Divergence::kSkewReverseKl, 0.25, student, teacher);
  EXPECT_NEAR(turned.loss, std::log(8.0 / 5.0), 1e-15);
  expect_near(turned.dlogits, {0.0, 0.0});
  const OneRow tv = one_row(Divergence::kTotalVariation, 0.5, student, teacher);
  EXPECT_EQ(tv.loss, 0.5);
  expect_near(tv.dlogits, {0.0, 0.0});
}

TEST(DistillationSpecial, AlphaDecidesWhichInfinityCounts) {
  const Values student{-kInfinity, 0.0}, teacher{0.0, 0.0};
  DistillationOptions options = with(Divergence::kForwardKl);
  options.label_weight = 1.0;
  options.divergence_weight = 0.0;  // no D, which is infinite
  EXPECT_EQ(one_row(options, student, teacher, 1).loss, 0.0);
  const OneRow row = one_row(options, student, teacher, 0);
  EXPECT_EQ(row.loss, kInfinity);
  EXPECT_EQ(row.outputs.logp, -kInfinity);
  expect_near(row.dlogits, {-1.0, 1.0}, 0.0);
  options = with(Divergence::kReverseKl);  // label_weight = 0: no cross-entropy
  EXPECT_NEAR(one_row(options, student, teacher, 0).loss, std::log(2.0), 1e-15);
}

TEST(DistillationSpecial, SparseTeachers) {
  const DistillationOptions options = with(Divergence::kForwardKl);
  // The lumped class without q (the list holds all of it, and a rounding more), and without p.
  const OneRow no_q = sparse_row(options, {0.0, 0.0}, {0}, {1e-16}, Tail::kLump);
  EXPECT_NEAR(no_q.loss, std::log(2.0), 1e-15);
  expect_near(no_q.dlogits, {-0.5, 0.5});
  const OneRow no_p = sparse_row(options, {0.0, -kInfinity}, {0}, {std::log(0.5)}, Tail::kLump);
  EXPECT_EQ(no_p.loss, kInfinity);
  EXPECT_EQ(no_p.dlogits[1], 0.0);
  EXPECT_EQ(sparse_row(with(Divergence::kReverseKl), {0.0, 0.0}, {0}, {0.0}, Tail::kLump).loss, kInfinity);
  // Nothing listed that has anything.
  EXPECT_EQ(sparse_row(options, {0.0, 0.0}, {}, {}, Tail::kIgnore).loss, 0.0);
  EXPECT_EQ(sparse_row(options, {0.0, 0.0}, {}, {}, Tail::kLump).loss, 0.0);
  EXPECT_EQ(sparse_row(options, {0.0, 0.0}, {0}, {-kInfinity}, Tail::kIgnore).loss, 0.0);
  for (const OneRow& row : {sparse_row(options, {0.0, 0.0}, {0}, {-kInfinity}, Tail::kRenormalise),
                            sparse_row(options, {-kInfinity, 0.0}, {0}, {-1.0}, Tail::kRenormalise),
                            sparse_row(options, {0.0, 0.0}, {0}, {kNan}, Tail::kIgnore),
                            sparse_row(options, {0.0, 0.0}, {0}, {kInfinity}, Tail::kLump)}) {
    EXPECT_TRUE(std::isnan(row.loss));
    expect_all_nan(row.dlogits);
  }
}

TEST(DistillationSpecial, AStudentWithoutADistributionLeavesTheSparseTeachersEntropy) {
  const DistillationOptions options = with(Divergence::kJsd, 0.5);
  const Values log_q = {std::log(0.25), std::log(0.5)};
  for (const Tail tail : {Tail::kIgnore, Tail::kLump, Tail::kRenormalise}) {
    const OneRow usual = sparse_row(options, {0.0, 1.0, 2.0}, {0, 2}, log_q, tail);
    for (const double corrupted : {kInfinity, kNan}) {
      const OneRow row = sparse_row(options, {0.0, 1.0, corrupted}, {0, 2}, log_q, tail);
      EXPECT_TRUE(std::isnan(row.loss));
      expect_all_nan(row.dlogits);
      EXPECT_EQ(row.outputs.teacher_entropy, usual.outputs.teacher_entropy);
    }
  }
}

TEST(DistillationSpecial, WrongArgumentsAreRefused) {
  DistillationRow row;
  const auto refused = [&](const DistillationOptions& options) {
    EXPECT_THROW(row.compute(options, kStudent, kTeacher, 0), std::invalid_argument);
    EXPECT_THROW(Distillation(options, 1, {}, {}, {}), std::invalid_argument);
  };
  for (const double beta : {0.0, 1.0, kNan}) refused(with(Divergence::kJsd, beta));
  for (const double beta : {-0.1, 1.1, kNan}) refused(with(Divergence::kSkewForwardKl, beta));
  DistillationOptions options = with(Divergence::kForwardKl);
  options.label_weight = -0.5;
  refused(options);
  options = with(Divergence::kForwardKl);
  options.teacher.temperature = 0.0;
  refused(options);
  options = with(Divergence::kForwardKl);
  options.student.temperature_on = TemperatureOn::kLogprob;
  refused(options);
  options = with(Divergence::kForwardKl);
  EXPECT_THROW(row.compute(options, kStudent, {{1.0}}), std::invalid_argument);
  EXPECT_THROW(row.compute(options, kStudent, kTeacher, 4), std::invalid_argument);
  EXPECT_THROW(row.compute_sparse(options, kStudent, {{0, 0}}, {{-1.0, -1.0}}, Tail::kLump), std::invalid_argument);
  EXPECT_THROW(row.compute_sparse(options, kStudent, {{4}}, {{-1.0}}, Tail::kLump), std::invalid_argument);
  EXPECT_THROW(row.compute_sparse(options, kStudent, {{1}}, {{-1.0, -1.0}}, Tail::kLump), std::invalid_argument);
  options.label_weight = 0.5;
  EXPECT_THROW(row.compute(options, kStudent, kTeacher), std::invalid_argument);
}

}  // namespace
}  // namespace tileloss::oracle
