// gradcheck --strict, with overruns planted in the kernels: every kind is caught, and told as argument, row and offset.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <string>
#include <thread>
#include <vector>

#include "support/exit_codes.h"
#include "tests/api/calls.h"
#include "tests/judge/strict_support.h"
#include "tests/shared/logits_case.h"

namespace tileloss::tools {
namespace {

TEST(StrictCatches, AWritePastTheGradientsEnd) {
  const auto plant = [](const tileloss_args& args, const tileloss_run&) {
    write_at<uint16_t>(args.dlogits.data, 7 * args.dlogits.row_stride + 1000 + 2);
  };
  const StrictReport report = strict_report({}, planted(TILELOSS_VALUE_AND_GRAD, plant));
  EXPECT_TRUE(finds(report, "dlogits overrun: row 7, 3 elements past the end (write), flush right, cross_entropy value_and_grad"))
      << report.text();
  EXPECT_TRUE(finds(report, "dlogits overrun: row 7, 3 elements past the end (write), flush right, gaps between rows"));
  EXPECT_TRUE(finds(report, "dlogits: bytes beside it were overwritten, flush left"));
}

TEST(StrictCatches, AFaultOnAnotherThread) {
  const auto plant = [](const tileloss_args& args, const tileloss_run&) {
    std::thread([&] { write_at<uint16_t>(args.dlogits.data, 8 * args.dlogits.row_stride); }).join();
  };
  EXPECT_TRUE(finds(strict_report({}, planted(TILELOSS_BACKWARD, plant)),
                    "dlogits overrun: row 7, 1 element past the end (write), flush right, cross_entropy backward"));
}

TEST(StrictCatches, AWriteBeforeTheGradientsStart) {
  const auto plant = [](const tileloss_args& args, const tileloss_run&) { write_at<uint16_t>(args.dlogits.data, -1); };
  const StrictReport report = strict_report({}, planted(TILELOSS_BACKWARD, plant));
  EXPECT_TRUE(finds(report, "dlogits overrun: row 0, 1 element before the start (write), flush left, cross_entropy backward"));
}

TEST(StrictCatches, AReadPastTheLogitsEnd) {
  const auto plant = [](const tileloss_args& args, const tileloss_run&) {
    read_at<uint16_t>(args.logits.data, 7 * args.logits.row_stride + 1000);
  };
  const StrictReport report = strict_report({}, planted(TILELOSS_FORWARD, plant));
  EXPECT_TRUE(finds(report, "logits overrun: row 7, 1 element past the end (read), flush right, cross_entropy forward"));
}

TEST(StrictCatches, AReadBeforeTheLogitsStart) {
  const auto plant = [](const tileloss_args& args, const tileloss_run&) { read_at<uint16_t>(args.logits.data, -32); };
  const StrictReport report = strict_report({}, planted(TILELOSS_FORWARD, plant));
  EXPECT_TRUE(finds(report, "logits overrun: row 0, 32 elements before the start (read), flush left, cross_entropy forward"));
}

// Dense rows hide it: the next row lies there.
TEST(StrictCatches, AReadBesideAnInnerRow) {
  const auto past = [](const tileloss_args& args, const tileloss_run&) {
    read_at<uint16_t>(args.logits.data, 3 * args.logits.row_stride + 1000 + 4);
  };
  EXPECT_TRUE(finds(strict_report({}, planted(TILELOSS_FORWARD, past)),
                    "logits overrun: row 3, 5 elements past the end (read), flush right, rows apart"));
  const auto before = [](const tileloss_args& args, const tileloss_run&) {
    read_at<uint16_t>(args.logits.data, 3 * args.logits.row_stride - 1);
  };
  EXPECT_TRUE(finds(strict_report({}, planted(TILELOSS_FORWARD, before)),
                    "logits overrun: row 3, 1 element before the start (read), flush left, rows apart"));
}

TEST(StrictCatches, AWriteBetweenTwoRows) {
  const auto plant = [](const tileloss_args& args, const tileloss_run&) {
    write_at<uint16_t>(args.dlogits.data, 3 * args.dlogits.row_stride + 1000 + 1);
  };
  const StrictReport report = strict_report({}, planted(TILELOSS_VALUE_AND_GRAD, plant));
  EXPECT_TRUE(finds(report, "dlogits overrun: row 3, 2 elements past the end (write), flush right, gaps between rows"));
  EXPECT_TRUE(finds(report, "dlogits overrun: row 3, 2 elements past the end (write), flush right, rows apart"));
}

TEST(StrictCatches, AWriteIntoAnInput) {
  const auto plant = [](const tileloss_args& args, const tileloss_run&) {
    write_at<uint16_t>(args.logits.data, 2 * args.logits.row_stride + 5);
  };
  const StrictReport report = strict_report({}, planted(TILELOSS_FORWARD, plant));
  EXPECT_TRUE(finds(report, "logits: row 2, column 5 (write), flush right, which is an input"));
}

TEST(StrictCatches, OverrunsOfTheRowStateAndTheWorkspace) {
  const auto state = [](const tileloss_args& args, const tileloss_run&) {
    if (args.row_state->sum != nullptr) write_at<float>(args.row_state->sum, 0);
  };
  EXPECT_TRUE(finds(strict_report({}, planted(TILELOSS_BACKWARD, state)),
                    "row_state.sum: element 0 of 8 (write), flush right, which is an input"));
  const auto scratch = [](const tileloss_args&, const tileloss_run& run) {
    read_at<char>(run.workspace, static_cast<int64_t>(run.workspace_bytes) + 63);
  };
  EXPECT_TRUE(finds(strict_report({}, planted(TILELOSS_FORWARD, scratch)),
                    "workspace overrun: 64 bytes past the end of 128 (read), flush right"));
}

// A call that has everything which the function takes in this pass, the whole row state included.
class EveryTensor {
 public:
  EveryTensor(const std::string& function, tileloss_pass pass, int64_t labels_per_row)
      : pass_(pass), function_(function), case_(spec(function)), state_(5, labels_per_row) {
    tileloss_args& args = case_.args();
    args.row_state = &state_.get();
    if (function == "policy_loss") add_policy(args);
    if (labels_per_row > 1) add_labels(args, labels_per_row);
    const tileloss_args forward = without_gradients(args);
    if (pass == TILELOSS_FORWARD) args = forward;
    if (pass == TILELOSS_FORWARD || pass == TILELOSS_VALUE_AND_GRAD) return;
    call(function_, TILELOSS_FORWARD, forward, make_plan(function_, TILELOSS_FORWARD, forward, {}));
    if (pass == TILELOSS_FROM_ROW_STATE) {
      args = forward;
      args.logits = {};
      set_options("vocab_total=100");
    }
  }

  StrictReport check(const KernelCall& kernel) {
    StrictReport report;
    call_strictly(function_, pass_, case_.args(), make_plan(function_, pass_, case_.args(), {}), kernel, report);
    return report;
  }

  tileloss_args& args() { return case_.args(); }

 private:
  static test::LogitsCaseSpec spec(const std::string& function) {
    using test::Upstream;
    test::LogitsCaseSpec spec{.rows = 5, .vocab = 100, .extra_outputs = true};
    spec.token_weights = spec.class_weights = function == "cross_entropy";
    spec.loss = function != "logprobs";
    spec.loss_grad = spec.loss ? Upstream::kScalar : Upstream::kAbsent;
    spec.logp_grad = spec.lse_grad = spec.entropy_grad = spec.mean_logit_grad =
        spec.loss ? Upstream::kAbsent : Upstream::kStrided;
    return spec;
  }

  void set_options(const std::string& options) {
    const ConfigNode root = config_tree(options);
    ConfigReader reader(root);
    function_.read_options(reader);
  }

  void add_policy(tileloss_args& args) {
    set_options("sampler_correction=truncate sampler_max=2 beta=0.1 entropy_coef=0.1");
    args.mask = tileloss_make_vector(mask_.data(), TILELOSS_UINT8, 5);
    for (tileloss_vector* logp : {&args.old_logp, &args.ref_logp, &args.sampler_logp}) {
      *logp = tileloss_make_vector(logp_.data(), TILELOSS_FLOAT32, 5);
    }
    args.advantages = tileloss_make_vector(advantages_.data(), TILELOSS_FLOAT32, 2);
    args.sequence_offsets = tileloss_make_vector(offsets_.data(), TILELOSS_INT32, 3);
    args.metrics = tileloss_make_vector(metrics_.data(), TILELOSS_FLOAT32, TILELOSS_POLICY_METRICS);
  }

  void add_labels(tileloss_args& args, int64_t per_row) {
    const int64_t count = 5 * per_row;
    for (int64_t n = 0; n < count; ++n) labels_.push_back(n * 13 % 100);
    of_labels_.resize(static_cast<size_t>(2 * count));
    args.labels = tileloss_make_vector(labels_.data(), TILELOSS_INT64, count);
    args.labels_per_row = per_row;
    args.logp = tileloss_make_vector(of_labels_.data(), TILELOSS_FLOAT32, count);
    args.logp_grad = tileloss_make_vector(of_labels_.data() + count, TILELOSS_FLOAT32, count);
    args.correct = {};
  }

  static tileloss_args without_gradients(tileloss_args args) {
    args.dlogits = {};
    args.loss_grad = args.logp_grad = args.lse_grad = args.entropy_grad = args.mean_logit_grad = {};
    return args;
  }

  tileloss_pass pass_;
  Function function_;
  test::LogitsCase case_;
  test::RowStateArrays state_;
  std::vector<int64_t> labels_;
  std::vector<float> of_labels_;
  std::vector<uint8_t> mask_{1, 1, 0, 1, 1};
  std::vector<float> logp_{-4, -5, -6, -5, -4}, advantages_{1, -1}, metrics_ = std::vector<float>(TILELOSS_POLICY_METRICS);
  std::vector<int32_t> offsets_{0, 3, 5};
};

// How many tensors there were, each of which was overrun by one element.
int overrun_every_tensor(const std::string& function, tileloss_pass pass, int64_t labels_per_row = 1) {
  EveryTensor everything(function, pass, labels_per_row);
  const StrictReport clean = everything.check(call);
  EXPECT_TRUE(clean.findings.empty()) << clean.text();
  int tensors = 0;
  for_each_tensor(everything.args(), pass, [&](const TensorView& tensor) {
    const std::string name = tensor.name;
    const auto read_past = [&](const Function&, tileloss_pass, tileloss_args args, const tileloss_plan&, const tileloss_run*) {
      for_each_tensor(args, pass, [&](const TensorView& view) {
        const int64_t elements = (view.rows - 1) * view.stride + view.cols;
        if (view.name == name) read_at<char>(view.data, elements * static_cast<int64_t>(view.element));
      });
    };
    const StrictReport report = everything.check(read_past);
    const std::string place = tensor.is_matrix ? "row 4, 1 element" : tensor.element == 1 ? "1 byte" : "1 element";
    EXPECT_FALSE(report.findings.empty()) << name;
    if (!report.findings.empty()) {
      EXPECT_TRUE(report.findings.front().starts_with(name + " overrun: " + place + " past the end")) << report.text();
    }
    ++tensors;
  });
  return tensors;
}

TEST(StrictCatches, AnOverrunOfEveryTensor) {
  // The row state has 7 arrays, of several labels 8; `correct` is of one.
  EXPECT_EQ(overrun_every_tensor("cross_entropy", TILELOSS_FORWARD), 11 + 7);
  EXPECT_EQ(overrun_every_tensor("cross_entropy", TILELOSS_BACKWARD), 13 + 7);
  EXPECT_EQ(overrun_every_tensor("cross_entropy", TILELOSS_VALUE_AND_GRAD), 13 + 7);
  EXPECT_EQ(overrun_every_tensor("cross_entropy", TILELOSS_FROM_ROW_STATE), 10 + 7);
  EXPECT_EQ(overrun_every_tensor("logprobs", TILELOSS_FORWARD), 9 + 7);
  EXPECT_EQ(overrun_every_tensor("logprobs", TILELOSS_BACKWARD), 14 + 7);
  EXPECT_EQ(overrun_every_tensor("logprobs", TILELOSS_FORWARD, 3), 8 + 8);
  EXPECT_EQ(overrun_every_tensor("logprobs", TILELOSS_FROM_ROW_STATE, 3), 7 + 8);
  EXPECT_EQ(overrun_every_tensor("logprobs", TILELOSS_BACKWARD, 3), 13 + 8);
  EXPECT_EQ(overrun_every_tensor("policy_loss", TILELOSS_FORWARD), 17 + 7);
  EXPECT_EQ(overrun_every_tensor("policy_loss", TILELOSS_VALUE_AND_GRAD), 19 + 7);
}

TEST(StrictCatches, AnOverrunOfAGroupOfRows) {
  const auto last_of_group = [](const tileloss_args& args) {
    return args.row_groups.rows == 0 ? 0 : (args.row_groups.rows - 1) * args.logits.row_stride;
  };
  const auto read = [&](const tileloss_args& args, const tileloss_run&) {
    if (args.row_groups.rows != 0) read_at<uint16_t>(args.logits.data, last_of_group(args) + 1000);
  };
  EXPECT_TRUE(finds(strict_report({}, planted(TILELOSS_FORWARD, read)),
                    "logits overrun: row 3, 1 element past the end (read), flush right, groups of rows, cross_entropy forward"));
  const auto write = [&](const tileloss_args& args, const tileloss_run&) {
    if (args.row_groups.rows != 0) write_at<uint16_t>(args.dlogits.data, last_of_group(args) + 1000 + 1);
  };
  const StrictReport report = strict_report({}, planted(TILELOSS_BACKWARD, write));
  EXPECT_TRUE(finds(report, "dlogits overrun: row 3, 2 elements past the end (write), flush right, groups of rows"));
  EXPECT_TRUE(finds(report, "dlogits overrun: row 3, 2 elements past the end (write), flush left, groups of rows"));
  const auto before = [](const tileloss_args& args, const tileloss_run&) {
    if (args.row_groups.rows != 0) read_at<uint16_t>(args.logits.data, args.row_groups.logits_stride - 2);
  };
  EXPECT_TRUE(finds(strict_report({}, planted(TILELOSS_FORWARD, before)),
                    "logits overrun: row 4, 2 elements before the start (read), flush left, groups of rows"));
}

// A caller's own groups: what lies between them is no part of the tensors, and may be anything.
TEST(StrictCatches, GroupsThatTheCallerHas) {
  constexpr int64_t kRows = 6, kColumns = 100, kGroupRows = 3, kGroupStride = 5 * kColumns;
  std::vector<float> logits(2 * kGroupStride, NAN), dlogits(logits.size()), loss(1);
  std::vector<int64_t> labels;
  for (int64_t i = 0; i < kRows; ++i) {
    for (int64_t j = 0; j < kColumns; ++j) {
      logits[static_cast<size_t>(i / kGroupRows * kGroupStride + i % kGroupRows * kColumns + j)] =
          static_cast<float>((i * 31 + j * 7) % 19);
    }
    labels.push_back(3 * i);
  }
  tileloss_args args;
  tileloss_args_init(&args);
  args.logits = tileloss_make_matrix(logits.data(), TILELOSS_FLOAT32, kRows, kColumns, kColumns);
  args.dlogits = tileloss_make_matrix(dlogits.data(), TILELOSS_FLOAT32, kRows, kColumns, kColumns);
  args.labels = tileloss_make_vector(labels.data(), TILELOSS_INT64, kRows);
  args.loss = tileloss_make_vector(loss.data(), TILELOSS_FLOAT32, 1);
  args.row_groups = {kGroupRows, kGroupStride, kGroupStride};
  const Function function("cross_entropy");
  StrictReport report;
  call_strictly(function, TILELOSS_VALUE_AND_GRAD, args, make_plan(function, TILELOSS_VALUE_AND_GRAD, args, {}), call, report);
  EXPECT_TRUE(report.findings.empty()) << report.text();
  EXPECT_EQ(report.layouts, 7);
  EXPECT_TRUE(std::isfinite(loss[0]));
}

TEST(StrictCatches, AnOverrunInPlace) {
  const auto plant = [](const tileloss_args& args, const tileloss_run&) {
    write_at<uint16_t>(args.dlogits.data, 7 * args.dlogits.row_stride + 1000);
  };
  EXPECT_TRUE(finds(strict_report({"kernel.in_place=true"}, planted(TILELOSS_VALUE_AND_GRAD, plant)),
                    "dlogits (in place) overrun: row 7, 1 element past the end (write), flush right"));
}

// Not a planted access but the shipped vector code itself, told that the only row is a column longer than it is.
StrictReport one_column_too_many(const std::string& isa, const std::string& dtype, tileloss_pass where, bool only_the_gradient) {
  const std::vector<char> longer_logits(1001 * sizeof(float));
  const KernelCall kernel = [&](const Function& function, tileloss_pass pass, tileloss_args args, const tileloss_plan& plan,
                                const tileloss_run* run) {
    if (pass != where) return call(function, pass, args, plan, run);
    ++args.logits.cols;
    if (pass != TILELOSS_FORWARD) ++args.dlogits.cols;
    if (only_the_gradient) args.logits.data = const_cast<char*>(longer_logits.data());
    call(function, pass, args, make_plan(function, pass, args, {.isa = isa}), nullptr);
  };
  return strict_report({"batch_size=1", "seq_len=1", "ignore_prob=0", "kernel.isa=" + isa, "dtype=" + dtype}, kernel);
}

TEST(StrictCatches, TheKernelsOwnLoadsAndStores) {
  for (const std::string& isa : supported_isas()) {
    for (const std::string dtype : {"fp32", "bf16", "fp16"}) {
      for (const tileloss_pass pass : {TILELOSS_FORWARD, TILELOSS_VALUE_AND_GRAD, TILELOSS_BACKWARD}) {
        const std::string read = "logits overrun: row 0, 1 element past the end (read), flush right, cross_entropy ";
        EXPECT_TRUE(finds(one_column_too_many(isa, dtype, pass, false), read + pass_name(pass))) << isa << " " << dtype;
        if (pass == TILELOSS_FORWARD) continue;
        const std::string write = "dlogits overrun: row 0, 1 element past the end (write), flush right, cross_entropy ";
        EXPECT_TRUE(finds(one_column_too_many(isa, dtype, pass, true), write + pass_name(pass))) << isa << " " << dtype;
      }
    }
  }
}

TEST(StrictCatches, OutputsThatAreNotWrittenOrDiffer) {
  const auto keep_last = [](const Function& function, tileloss_pass pass, const tileloss_args& args, const tileloss_plan& plan,
                            const tileloss_run* run) {
    if (args.lse.data == nullptr) return call(function, pass, args, plan, run);
    const float before = read_at<float>(args.lse.data, 7);
    call(function, pass, args, plan, run);
    static_cast<float*>(args.lse.data)[7] = before;
  };
  EXPECT_TRUE(finds(strict_report({}, keep_last), "lse: element 7 of 8 was not written"));

  const auto flip_bit = [](const tileloss_args& args, const tileloss_run&) {
    static_cast<uint16_t*>(args.dlogits.data)[2 * args.dlogits.row_stride + 9] ^= 1;
  };
  const StrictReport report = strict_report({}, planted(TILELOSS_BACKWARD, flip_bit));
  ASSERT_EQ(report.findings.size(), 7U) << report.text();
  EXPECT_TRUE(report.findings[0].starts_with("dlogits: row 2, column 9 is 0x")) << report.text();
}

TEST(StrictCatches, CallsThatDoNotReturn) {
  const auto end_with = [](int signal) { return [signal](const tileloss_args&, const tileloss_run&) { raise(signal); }; };
  EXPECT_TRUE(finds(strict_report({}, planted(TILELOSS_FORWARD, end_with(SIGKILL))), "the call ended with signal 9 (Killed)"));
  EXPECT_TRUE(
      finds(strict_report({}, planted(TILELOSS_FORWARD, [](const tileloss_args&, const tileloss_run&) { _exit(kExitPass); })),
            "the call ended the process"));
  EXPECT_TRUE(finds(strict_report({}, planted(TILELOSS_FORWARD,
                                              [](const tileloss_args&, const tileloss_run&) {
                                                throw ToolError(kExitCheckFailed, "the library refused");
                                              })),
                    "the library refused"));
}

TEST(StrictCatches, FaultsAwayFromEveryTensor) {
  const auto wild = [](const tileloss_args&, const tileloss_run&) {
    const volatile uintptr_t address = 0x1000;
    read_at<char>(reinterpret_cast<const char*>(address), 0);
  };
  EXPECT_TRUE(
      finds(strict_report({}, planted(TILELOSS_FORWARD, wild)), "address 0x1000 is near no argument (read), flush right"));
  const GuardedArgs nothing(TILELOSS_FORWARD, tileloss_args{}, {Flush::kLeft, GuardLayout::Rows::kAdjoining}, false);
  EXPECT_EQ(nothing.describe({0, MemoryFault::kRead}), "a misaligned vector access, or a null or wild pointer, flush left");
}

}  // namespace
}  // namespace tileloss::tools
