// A vocabulary in column shards, compared with a teacher's logits or class probabilities: states of all shards, then their sums,
// and from both the outputs and each shard's gradient, as if one matrix had held all columns.
// On toy and cuda: PairShards, HeadPairShards.
#include <gtest/gtest.h>

#include <functional>
#include <optional>

#include "tests/api/random_options.h"
#include "tests/api/shards.h"
#include "tests/shared/linear_pair_case.h"
#include "tests/shared/pair_case.h"
#include "tests/shared/wanted_case.h"

namespace tileloss::test {
namespace {

constexpr std::int64_t kRows = kShardRows, kVocab = kShardVocab;
const std::vector<Shard> kShards = {{0, 300}, {300, 1}, {301, 36}, {337, 663}};

class PairShards : public testing::TestWithParam<oracle::NumberFormat> {
 protected:
  static LogitsCaseSpec spec(const std::string& distribution) {
    return {.rows = kRows,
            .vocab = kVocab,
            .format = GetParam(),
            .distribution = distribution,
            .ignore_prob = 0.2,
            .token_weights = true,
            .loss_grad = Upstream::kScalar};
  }
  // The state of all shards, merged.
  static void gather(const tileloss_matrix& logits, const tileloss_vector& labels, const tileloss_logit_options& transform,
                     RowStateArrays& merged) {
    auto args = init<tileloss_args>();
    args.logits = logits;
    args.labels = labels;
    merge_states("logprobs", args, tileloss_logprobs_options{.logit = transform}, kShards, merged, kVocab, weight_of_columns);
  }

  // `state`: teacher and label are there. Sums, then loss and outputs, then the gradient of every shard.
  template <class Options>
  static void run(const char* function, const tileloss_args& all, const Options& options, RowStateArrays& student,
                  tileloss_pair_state& state) {
    std::vector<double> sums[2], part[2];
    for (int k = 0; k < 2; ++k) {
      sums[k].assign(kRows, 0);
      part[k].assign(kRows, -7);
    }
    state.rows = kRows;
    state.divergence = part[0].data();
    state.mean = part[1].data();
    const auto call = [&](tileloss_pass pass, const std::optional<Shard>& shard, bool wants_gradient) {
      tileloss_args args = pass == TILELOSS_FORWARD ? without_outputs(all) : all;
      for (tileloss_matrix* m : {&args.logits, &args.teacher_logits, &args.target_probs, &args.dlogits}) {
        *m = shard && m->dtype != TILELOSS_NONE && (wants_gradient || m != &args.dlogits) ? columns_of(*m, *shard)
                                                                                          : tileloss_matrix{};
      }
      args.row_state = &student.get();
      args.pair_state = &state;
      const Options own = of_shard(options, shard.value_or(Shard{}));
      ASSERT_TRUE(runs(function, pass, args, &own, plan_options()));
    };
    for (const Shard& s : kShards) {
      call(TILELOSS_FORWARD, s, false);
      for (int k = 0; k < 2; ++k) {
        for (std::size_t i = 0; i < kRows; ++i) {
          sums[k][i] += part[k][i];
          const bool is_ignored = static_cast<const std::int64_t*>(all.labels.data)[i] == options.logit.ignore_index;
          EXPECT_TRUE(!is_ignored || part[k][i] == 0) << i;
        }
      }
    }
    state.divergence = sums[0].data();
    state.mean = sums[1].data();
    call(TILELOSS_FROM_ROW_STATE, std::nullopt, false);
    for (const Shard& s : kShards) call(TILELOSS_BACKWARD, s, true);
  }
};
INSTANTIATE_TEST_SUITE_P(Formats, PairShards, testing::ValuesIn(kFormats), format_name);

TEST_P(PairShards, OfATeacherGiveWhatTheWholeGives) {
  for (int divergence = 0; divergence < kDivergences; ++divergence) {
    for (const int variant : {0, 1, 2, 3}) {
      for (const std::string distribution : {"normal", "confident", "offset_plus"}) {
        PairCaseSpec with;
        with.student = spec(distribution);
        with.student.extra_outputs = true;
        PairCase c(with);
        tileloss_distillation_options o{.divergence = divergence, .beta = 0.3};
        leave_out_without_effect("distillation", o);
        if (variant >= 1) set_weights(o, 0.4);
        if (variant == 2) o.logit.softcap = 30, o.teacher_softcap = 0;
        if (variant == 3) {
          o.logit.temperature.value = 2;
          o.label_temperature.value = 0.7;
          o.scale_by_temperature_squared = 1;
        }
        const tileloss_args& a = c.args();
        RowStateArrays student(kRows), teacher(kRows), label(kRows);
        gather(a.logits, a.labels, o.logit, student);
        tileloss_logit_options transform = o.logit;
        transform.softcap = 0;
        gather(a.teacher_logits, a.labels, transform, teacher);
        transform = o.logit;
        transform.temperature.value = 0.7;
        gather(a.logits, a.labels, transform, label);
        auto state = init<tileloss_pair_state>();
        state.teacher = &teacher.get();
        if (variant == 3) state.label = &label.get();
        run("distillation", a, o, student, state);
        ASSERT_TRUE(agrees(check_distillation(c, o))) << divergence << " " << variant << " " << distribution;
      }
    }
  }
}

TEST_P(PairShards, OfClassProbabilitiesGiveWhatTheWholeGives) {
  for (const double smoothing : {0.0, 0.2}) {
    for (const double softcap : {0.0, 30.0}) {
      SoftLabelSpec with{.row = spec("normal")};
      with.row.class_weights = true;
      SoftLabelCase c(with);
      const tileloss_soft_cross_entropy_options o{.logit = {.softcap = softcap}, .label_smoothing = smoothing};
      RowStateArrays student(kRows);
      gather(c.args().logits, c.args().labels, o.logit, student);
      auto state = init<tileloss_pair_state>();
      run("soft_cross_entropy", c.args(), o, student, state);
      ASSERT_TRUE(agrees(c.check(o))) << smoothing << " " << softcap;
    }
  }
}

// From hidden states: the heads are cut.
TEST(HeadPairShards, GiveWhatTheWholeGives) {
  for (int divergence = 0; divergence < kDivergences; ++divergence) {
    LinearPair c({.student = {.row = {.rows = kRows, .vocab = kVocab, .ignore_prob = 0.2, .extra_outputs = true},
                              .hidden = 7,
                              .float32_dhidden = true},
                  .teacher_hidden = 5});
    const tileloss_args& all = c.args();
    auto options = c.student().with_linear(tileloss_distillation_options{.divergence = divergence, .beta = 0.3});
    set_weights(options, 0.4);
    leave_out_without_effect("distillation", options);
    const auto gather = [&](const tileloss_matrix& hidden, const tileloss_matrix& head, RowStateArrays& merged) {
      auto args = init<tileloss_args>();
      args.hidden = hidden;
      args.head = head;
      args.labels = all.labels;
      merge_states("linear_logprobs", args, tileloss_logprobs_options{}, kShards, merged, kVocab, weight_of_columns,
                   rows_of_head);
    };
    RowStateArrays student(kRows), teacher(kRows);
    gather(all.hidden, all.head, student);
    gather(all.teacher_hidden, all.teacher_head, teacher);
    std::vector<double> part(2 * kRows), sums(2 * kRows);
    auto state = init<tileloss_pair_state>();
    state.rows = kRows;
    state.teacher = &teacher.get();
    const auto call = [&](const char* function, tileloss_pass pass, tileloss_args args, const Shard& s) {
      std::vector<double>& to = pass == TILELOSS_FORWARD ? part : sums;
      state.divergence = to.data();
      state.mean = to.data() + kRows;
      args.row_state = &student.get();
      args.pair_state = &state;
      auto own = of_shard(options, s);
      if (pass == TILELOSS_FROM_ROW_STATE) own.linear = {};
      ASSERT_TRUE(runs(function, pass, args, &own, plan_options())) << function << " " << pass;
    };
    for (const Shard& s : kShards) {
      call("linear_distillation", TILELOSS_FORWARD, rows_of_head(without_outputs(all), s), s);
      for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += part[i];
    }
    tileloss_args merged = all;
    merged.hidden = merged.head = merged.teacher_hidden = merged.teacher_head = merged.dhidden = merged.dhead = {};
    call("distillation", TILELOSS_FROM_ROW_STATE, merged, {});
    std::vector<float> dhidden(kRows * 7), share(kRows * 7);
    for (const Shard& s : kShards) {
      tileloss_args args = rows_of_head(all, s);
      args.dhidden = view(share, kRows, 7);
      call("linear_distillation", TILELOSS_BACKWARD, args, s);
      for (std::size_t i = 0; i < share.size(); ++i) dhidden[i] += share[i];
    }
    for (std::int64_t i = 0; i < kRows; ++i) {
      for (std::int64_t h = 0; h < 7; ++h)
        static_cast<float*>(all.dhidden.data)[i * all.dhidden.row_stride + h] = dhidden[static_cast<std::size_t>(i * 7 + h)];
    }
    ASSERT_TRUE(agrees(c.check(options))) << divergence;
  }
}

// A call of distillation with everything in its place, then one thing corrupted.
TEST(PairShardArguments, NameWhatIsWrong) {
  PairCase c({.student = {.rows = kRows, .vocab = 20}});
  RowStateArrays student(kRows), teacher(kRows);
  std::vector<double> sums(2 * kRows);
  auto state = init<tileloss_pair_state>();
  state.rows = kRows;
  state.teacher = &teacher.get();
  state.divergence = sums.data();
  state.mean = sums.data() + kRows;
  tileloss_distillation_options options{.logit = {.vocab_total = 50}};
  tileloss_args args = c.args();
  args.dlogits = {};
  args.loss = args.logp = args.lse = {};
  args.row_state = &student.get();
  args.pair_state = &state;
  const auto status = [&](const char* function, tileloss_pass pass) {
    return tileloss_call(function, pass, &args, &options, nullptr, nullptr);
  };
  ASSERT_TRUE(succeeds(status("distillation", TILELOSS_FORWARD)));
  const struct {
    const char* message;
    std::function<void()> corrupt;
  } cases[] = {
      {"row_state: expected the student's, with a pair_state, got none", [&] { args.row_state = nullptr; }},
      {"row_state: expected none: distillation does not take it, got a row state", [&] { args.pair_state = nullptr; }},
      {"pair_state.teacher: expected the teacher's row state, got null", [&] { state.teacher = nullptr; }},
      {"pair_state.rows: expected 12, got 11", [&] { state.rows = 11; }},
      {"pair_state: expected the arrays divergence and mean, got a null one", [&] { state.mean = nullptr; }},
      {"loss: expected none in a forward with pair_state: from_row_state gives it, got a vector",
       [&] { args.loss = c.args().loss; }},
      {"pair_state.label: expected the row state at label_temperature, got null", [&] { options.label_temperature.value = 3; }},
  };
  for (const auto& k : cases) {
    const tileloss_args good = args;
    const tileloss_pair_state good_state = state;
    const tileloss_distillation_options good_options = options;
    k.corrupt();
    EXPECT_TRUE(refused(status("distillation", TILELOSS_FORWARD), TILELOSS_INVALID_ARGUMENT, k.message));
    args = good;
    state = good_state;
    options = good_options;
  }
  // Of the outputs that need the teacher's array, not the student's.
  teacher.get().argmax = nullptr;
  tileloss_args merged = c.args();
  merged.logits = merged.dlogits = merged.teacher_logits = {};
  merged.row_state = &student.get();
  merged.pair_state = &state;
  std::vector<std::int64_t> argmax(kRows);
  std::vector<std::uint8_t> agreement(kRows);
  merged.argmax = view(argmax);
  merged.agreement = view(agreement);
  EXPECT_TRUE(refused(tileloss_call("distillation", TILELOSS_FROM_ROW_STATE, &merged, &options, nullptr, nullptr),
                      TILELOSS_INVALID_ARGUMENT, "pair_state.teacher: expected argmax for agreement, got a null array"));
  EXPECT_TRUE(refused(status("distillation", TILELOSS_VALUE_AND_GRAD), TILELOSS_INVALID_ARGUMENT,
                      "dlogits: expected a matrix like the logits, got none"));
  EXPECT_TRUE(refused(status("cross_entropy", TILELOSS_FORWARD), TILELOSS_INVALID_ARGUMENT,
                      "pair_state: expected none: cross_entropy does not take it, got a pair state"));
}

}  // namespace
}  // namespace tileloss::test
