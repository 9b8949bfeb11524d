// gradcheck --strict, with overruns planted in the kernels: every kind is caught, and told as argument, row and offset.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/exit_codes.h"
#include "tests/judge/strict_support.h"

namespace tileloss::tools {
namespace {

using Plant = void (*)(const tileloss_args& args, const tileloss_run& run);

struct Planted {
  const char* name;
  tileloss_pass where;
  Plant plant;
  Sets findings;
  Sets sets = {};
};

// The element of the first group that lies `past` its last row's start; nothing where rows are in no groups.
int64_t in_first_group(const tileloss_args& args, int64_t past) {
  return args.row_groups.rows == 0 ? 0 : (args.row_groups.rows - 1) * args.logits.row_stride + past;
}

TEST(StrictCatches, WhatIsPlanted) {
  const std::vector<Planted> cases = {
      {"a write past the gradient's end",
       TILELOSS_VALUE_AND_GRAD,
       [](const auto& a, const auto&) { write_at<uint16_t>(a.dlogits.data, 7 * a.dlogits.row_stride + 1000 + 2); },
       {"dlogits overrun: row 7, 3 elements past the end (write), flush right, cross_entropy value_and_grad",
        "dlogits overrun: row 7, 3 elements past the end (write), flush right, gaps between rows",
        "dlogits: bytes beside it were overwritten, flush left"}},
      {"a fault on another thread",
       TILELOSS_BACKWARD,
       [](const auto& a, const auto&) {
         std::thread([&] { write_at<uint16_t>(a.dlogits.data, 8 * a.dlogits.row_stride); }).join();
       },
       {"dlogits overrun: row 7, 1 element past the end (write), flush right, cross_entropy backward"}},
      {"a write before the gradient's start",
       TILELOSS_BACKWARD,
       [](const auto& a, const auto&) { write_at<uint16_t>(a.dlogits.data, -1); },
       {"dlogits overrun: row 0, 1 element before the start (write), flush left, cross_entropy backward"}},
      {"a read before the logits' start",
       TILELOSS_FORWARD,
       [](const auto& a, const auto&) { read_at<uint16_t>(a.logits.data, -32); },
       {"logits overrun: row 0, 32 elements before the start (read), flush left, cross_entropy forward"}},
      // Dense rows hide it: the next row lies there.
      {"a read past an inner row",
       TILELOSS_FORWARD,
       [](const auto& a, const auto&) { read_at<uint16_t>(a.logits.data, 3 * a.logits.row_stride + 1000 + 4); },
       {"logits overrun: row 3, 5 elements past the end (read), flush right, rows apart"}},
      {"a read before an inner row",
       TILELOSS_FORWARD,
       [](const auto& a, const auto&) { read_at<uint16_t>(a.logits.data, 3 * a.logits.row_stride - 1); },
       {"logits overrun: row 3, 1 element before the start (read), flush left, rows apart"}},
      {"a write between two rows",
       TILELOSS_VALUE_AND_GRAD,
       [](const auto& a, const auto&) { write_at<uint16_t>(a.dlogits.data, 3 * a.dlogits.row_stride + 1000 + 1); },
       {"dlogits overrun: row 3, 2 elements past the end (write), flush right, gaps between rows",
        "dlogits overrun: row 3, 2 elements past the end (write), flush right, rows apart"}},
      {"a write into an input",
       TILELOSS_FORWARD,
       [](const auto& a, const auto&) { write_at<uint16_t>(a.logits.data, 2 * a.logits.row_stride + 5); },
       {"logits: row 2, column 5 (write), flush right, which is an input"}},
      {"a write into the row state",
       TILELOSS_BACKWARD,
       [](const auto& a, const auto&) {
         if (a.row_state->sum != nullptr) write_at<float>(a.row_state->sum, 0);
       },
       {"row_state.sum: element 0 of 8 (write), flush right, which is an input"}},
      {"a read past the workspace",
       TILELOSS_FORWARD,
       [](const auto&, const auto& run) { read_at<char>(run.workspace, static_cast<int64_t>(run.workspace_bytes) + 63); },
       {"workspace overrun: 64 bytes past the end of 128 (read), flush right"}},
      {"a read past a group",
       TILELOSS_FORWARD,
       [](const auto& a, const auto&) { read_at<uint16_t>(a.logits.data, in_first_group(a, 1000)); },
       {"logits overrun: row 3, 1 element past the end (read), flush right, groups of rows, cross_entropy forward"}},
      {"a read before a group",
       TILELOSS_FORWARD,
       [](const auto& a, const auto&) {
         if (a.row_groups.rows != 0) read_at<uint16_t>(a.logits.data, a.row_groups.logits_stride - 2);
       },
       {"logits overrun: row 4, 2 elements before the start (read), flush left, groups of rows"}},
      {"a write past a group",
       TILELOSS_BACKWARD,
       [](const auto& a, const auto&) {
         if (a.row_groups.rows != 0) write_at<uint16_t>(a.dlogits.data, in_first_group(a, 1000 + 1));
       },
       {"dlogits overrun: row 3, 2 elements past the end (write), flush right, groups of rows",
        "dlogits overrun: row 3, 2 elements past the end (write), flush left, groups of rows"}},
      {"a write past what lies in place",
       TILELOSS_VALUE_AND_GRAD,
       [](const auto& a, const auto&) { write_at<uint16_t>(a.dlogits.data, 7 * a.dlogits.row_stride + 1000); },
       {"dlogits (in place) overrun: row 7, 1 element past the end (write), flush right"},
       {"kernel.in_place=true"}},
  };
  for (const Planted& one : cases) {
    const StrictReport report = strict_report(one.sets, planted(one.where, one.plant));
    for (const std::string& finding : one.findings) EXPECT_TRUE(finds(report, finding)) << one.name;
  }
}

// What a check of every function is called with.
TEST(StrictCatches, AnOverrunOfEveryTensor) {
  const std::string rows = " batch_size=2 seq_len=4 vocab_size=100 dtype=bf16 seed=3 ignore_prob=0.2 source.std=2 ";
  const std::string head = rows + "level=linear hidden_size=40 bias=random gradients=[dhidden, dhead, dbias] ";
  const std::string outputs = "outputs=[logp, lse, entropy, argmax, correct, log_sum_sq_probs] ";
  const std::string mean = "outputs=[logp, lse, entropy, mean_logit]";  // not with class weights
  const std::string of_teacher = " label_weight=0.3 divergence_weight=0.7 outputs=[logp, divergence, teacher_entropy, agreement]";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"loss=cross_entropy token_weights=random class_weights=random upstream=random" + rows + outputs,
       "logits dlogits labels token_weights class_weights loss loss_grad logp lse entropy argmax correct log_sum_sq_probs "
       "row_state.max row_state.sum row_state.label_logit row_state.entropy_sum row_state.collision_sum row_state.smoothing_sum "
       "row_state.argmax"},
      {"loss=logprobs upstream=per_row" + rows + outputs + mean, "logp_grad lse_grad entropy_grad mean_logit row_state.max"},
      {"loss=logprobs labels_per_row=3 upstream=per_row outputs=[logp, entropy]" + rows,
       "labels logp logp_grad row_state.label_logits"},
      {"loss=policy_loss preset=gspo mask_prob=0.3 old_logp_noise_scale=0.1 sampler_logp_noise_scale=0.1 "
       "ref_logp_noise_scale=0.1 beta=0.1 sampler_correction=truncate sampler_max=2 entropy_coef=0.1 sequences=offsets" +
           rows,
       "mask advantages sequence_offsets old_logp ref_logp sampler_logp metrics"},
      {"loss=distillation divergence=jsd" + rows + of_teacher, "teacher_logits divergence teacher_entropy agreement"},
      {"loss=sparse_distillation source.teacher_columns=5" + rows + of_teacher, "teacher_ids teacher_logprobs"},
      {"loss=soft_cross_entropy source.probs_dtype=bf16 allowed=half" + rows, "target_probs allowed"},
      {"loss=cross_entropy" + head + outputs, "hidden head bias dhidden dhead dbias loss row_state.max"},
      {"loss=cross_entropy head_layout=hv dhead_dtype=head" + head, "head dhead"},
      {"loss=cross_entropy rank=5" + head + "gradients=[dhidden, dhead, dbias, dhidden_r, dhead_r]",
       "hidden_r head_r dhidden_r dhead_r"},
      {"loss=distillation teacher_hidden_size=24" + head + of_teacher, "teacher_hidden teacher_head teacher_bias"},
      {"loss=sparse_distillation source.teacher_columns=5" + head, "teacher_ids teacher_logprobs"},
      {"loss=soft_cross_entropy" + head, "target_probs"},
  };
  for (const auto& [text, names] : cases) {
    SCOPED_TRACE(text);
    const std::set<std::string> overrun = overrun_every_tensor(text);
    for (const std::string& name : split(names, ' ')) EXPECT_TRUE(overrun.contains(name)) << name;
  }
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
