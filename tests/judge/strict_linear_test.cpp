// gradcheck --strict at level linear: the shipped kernels pass on every instruction set; accesses beside its tensors are caught.
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "tests/judge/strict_support.h"

namespace tileloss::tools {
namespace {

// 8 rows, 300 classes, hidden size 40; bfloat16.
constexpr const char* kLinearConfig =
    "level=linear loss=cross_entropy batch_size=2 seq_len=4 vocab_size=300 hidden_size=40 dtype=bf16 seed=3 ignore_prob=0.2 "
    "source.std=2 bias=random gradients=[dhidden, dhead, dbias] outputs=[logp, lse, entropy, argmax, correct]";

StrictReport linear_report(const std::vector<std::string>& sets, const KernelCall& kernel = call) {
  return strict_report(sets, kernel, kLinearConfig);
}

class StrictLinear : public testing::TestWithParam<std::tuple<std::string, std::string>> {};

// Every layout, schedule and option that takes another path through memory. The first ones on every shape.
const std::vector<std::vector<std::string>> kVariants = {
    {},
    {"head_layout=hv", "accumulate=true"},
    {"dhead_dtype=head", "accumulate=true", "compute_dtype=bfloat16", "kernel.threads=2"},
    {"kernel.schedule=stash", "kernel.row_block=8", "dhead_dtype=head", "head_layout=hv", "kernel.vocab_block=64"},
    {"kernel.schedule=recompute", "kernel.vocab_block=64", "compute_dtype=float32", "softcap=20", "label_smoothing=0.1"},
    {"loss=logprobs", "upstream=per_row", "outputs=[logp, lse, entropy, log_sum_sq_probs, mean_logit]", "valid_vocab=290"},
    {"loss=policy_loss", "preset=gspo", "mask_prob=0.3", "old_logp_noise_scale=0.1", "bias=none", "gradients=[dhidden]"},
    {"token_weights=random", "class_weights=random", "upstream=random", "gradients=[dhead]", "kernel.schedule=sweeps"},
};

struct Shape {
  int64_t rows, vocab, hidden;
  size_t variants;
};
constexpr Shape kShapes[] = {{1, 1, 1, 3}, {3, 17, 7, 4}, {33, 300, 40, 8}};

TEST_P(StrictLinear, KernelsTouchNothingButTheirTensors) {
  const auto& [isa, dtype] = GetParam();
  for (const Shape& shape : kShapes) {
    for (size_t i = 0; i < shape.variants; ++i) {
      const StrictReport report = linear_report(
          joined(kVariants.at(i), {"kernel.isa=" + isa, "dtype=" + dtype, "batch_size=1", "seq_len=" + std::to_string(shape.rows),
                                   "vocab_size=" + std::to_string(shape.vocab), "hidden_size=" + std::to_string(shape.hidden)}));
      EXPECT_TRUE(report.findings.empty()) << shape.rows << " x " << shape.vocab << ", variant " << i << "\n" << report.text();
      EXPECT_GE(report.calls, 3);
      EXPECT_EQ(report.rows, shape.rows);
      EXPECT_EQ(report.columns, shape.vocab);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, StrictLinear,
                         testing::Combine(testing::ValuesIn(supported_isas()), testing::Values("fp32", "bf16", "fp16")),
                         [](const testing::TestParamInfo<StrictLinear::ParamType>& instance) {
                           return std::get<0>(instance.param) + "_" + std::get<1>(instance.param);
                         });

// ------------------------------------------------------------------------------------------------- planted in the kernels

TEST(StrictLinearCatches, AccessesBeforeTheStartBetweenRowsAndIntoInputs) {
  const auto before = [](const tileloss_args& args, const tileloss_run&) { read_at<uint16_t>(args.head.data, -1); };
  EXPECT_TRUE(finds(linear_report({}, planted(TILELOSS_FORWARD, before)),
                    "head overrun: row 0, 1 element before the start (read), flush left, linear_cross_entropy forward"));
  const auto between = [](const tileloss_args& args, const tileloss_run&) {
    write_at<float>(args.dhead.data, 3 * args.dhead.row_stride + 40);
  };
  EXPECT_TRUE(finds(linear_report({}, planted(TILELOSS_BACKWARD, between)),
                    "dhead overrun: row 3, 1 element past the end (write), flush right, gaps between rows"));
  EXPECT_TRUE(finds(linear_report({}, planted(TILELOSS_VALUE_AND_GRAD, between)),
                    "dhead overrun: row 3, 1 element past the end (write), flush right, rows apart"));
  const auto between_columns = [](const tileloss_args& args, const tileloss_run&) {
    write_at<float>(args.dhead.data, 3 * args.dhead.col_stride + 300);
  };
  EXPECT_TRUE(finds(linear_report({"head_layout=hv"}, planted(TILELOSS_BACKWARD, between_columns)),
                    "dhead overrun: column 3, 1 element past the end (write), flush right, rows apart"));
  const auto into_head = [](const tileloss_args& args, const tileloss_run&) {
    write_at<uint16_t>(args.head.data, 2 * args.head.row_stride + 5 * args.head.col_stride);
  };
  for (const char* layout : {"head_layout=vh", "head_layout=hv"}) {
    EXPECT_TRUE(finds(linear_report({layout}, planted(TILELOSS_FORWARD, into_head)),
                      "head: row 2, column 5 (write), flush right, which is an input"));
  }
  const auto into_bias = [](const tileloss_args& args, const tileloss_run&) { write_at<float>(args.bias.data, 7); };
  EXPECT_TRUE(finds(linear_report({}, planted(TILELOSS_FORWARD, into_bias)),
                    "bias: element 7 of 300 (write), flush right, which is an input"));
  const auto scratch = [](const tileloss_args&, const tileloss_run& run) {
    read_at<char>(run.workspace, static_cast<int64_t>(run.workspace_bytes));
  };
  const StrictReport workspace = linear_report({}, planted(TILELOSS_VALUE_AND_GRAD, scratch));
  ASSERT_FALSE(workspace.findings.empty());
  EXPECT_TRUE(workspace.findings.front().starts_with("workspace overrun: 1 byte past the end of ")) << workspace.text();
}

TEST(StrictLinearCatches, GradientsThatAreNotWrittenOrAddedWrongly) {
  const auto keep = [](const Function& function, tileloss_pass pass, const tileloss_args& args, const tileloss_plan& plan,
                       const tileloss_run* run) {
    if (args.dhidden.data == nullptr) return call(function, pass, args, plan, run);
    const auto before = read_at<uint16_t>(args.dhidden.data, 2 * args.dhidden.row_stride + 9);
    call(function, pass, args, plan, run);
    static_cast<uint16_t*>(args.dhidden.data)[2 * args.dhidden.row_stride + 9] = before;
  };
  EXPECT_TRUE(finds(linear_report({}, keep), "dhidden: row 2, column 9 was not written"));
  const auto twice = [](const Function& function, tileloss_pass pass, const tileloss_args& args, const tileloss_plan& plan,
                        const tileloss_run* run) {
    call(function, pass, args, plan, run);
    if (function.get_integer("accumulate", 0) != 0) call(function, pass, args, plan, run);
  };
  const StrictReport report = linear_report({"accumulate=true"}, twice);
  ASSERT_FALSE(report.findings.empty());
  EXPECT_NE(report.text().find("dhead: row 0, column 0 is 0x"), std::string::npos) << report.text();
  EXPECT_NE(report.text().find("dbias: element 0 of 300 is 0x"), std::string::npos) << report.text();
}

// ------------------------------------------------------------------------------------------------- the shipped vector code

// The kernel is told of one column more: of hidden and head in rows, of classes if the head lies as [H,V] or for the bias. Only
// the tensor named is still in its guarded memory; all others are zeros with room enough.
StrictReport one_too_many(const std::string& tested, const std::vector<std::string>& sets, bool more_classes) {
  const std::vector<double> roomy(1 << 16);
  const KernelCall kernel = [&](const Function& function, tileloss_pass pass, tileloss_args args, const tileloss_plan& plan,
                                const tileloss_run* run) {
    if (pass != TILELOSS_VALUE_AND_GRAD) return call(function, pass, args, plan, run);
    std::vector<std::vector<double>> buffers(4, roomy);
    size_t next = 0;
    const auto grow_matrix = [&](const char* name, tileloss_matrix& m) {
      ++(more_classes ? m.rows : m.cols);
      if (tested == name) return;
      m.data = buffers[next++].data();
      (m.col_stride == 1 ? m.row_stride : m.col_stride) = m.col_stride == 1 ? m.cols : m.rows;
    };
    const auto grow_vector = [&](const char* name, tileloss_vector& v) {
      ++v.size;
      if (tested != name) v.data = buffers[next++].data();
    };
    grow_matrix("head", args.head);
    grow_matrix("dhead", args.dhead);
    if (more_classes) {
      grow_vector("bias", args.bias);
      grow_vector("dbias", args.dbias);
    } else {
      grow_matrix("hidden", args.hidden);
      grow_matrix("dhidden", args.dhidden);
    }
    call(function, pass, args, make_plan(function, pass, args, {.isa = tileloss_isa_name(plan.cpu.isa)}), nullptr);
  };
  return linear_report(joined(sets, {"ignore_prob=0"}), kernel);
}

class StrictLinearKernels : public testing::TestWithParam<std::string> {};

TEST_P(StrictLinearKernels, OwnLoadsAndStoresAreSeen) {
  for (const std::string dtype : {"fp32", "bf16", "fp16"}) {
    const std::vector<std::string> sets = {"dtype=" + dtype, "kernel.isa=" + GetParam()};
    const auto sees = [&](const std::string& tensor, const std::string& place, const std::string& access, bool more_classes,
                          const char* layout) {
      const std::string where = place + "1 element past the end" + (tensor.ends_with("bias") ? " of 300" : "");
      return finds(
          one_too_many(tensor, joined(sets, {std::string("head_layout=") + layout}), more_classes),
          tensor + " overrun: " + where + " (" + access + "), flush right" + (place.empty() ? "" : ", gaps between rows"));
    };
    EXPECT_TRUE(sees("hidden", "row 7, ", "read", false, "vh")) << dtype;
    EXPECT_TRUE(sees("dhidden", "row 7, ", "write", false, "vh")) << dtype;
    EXPECT_TRUE(sees("head", "row 299, ", "read", false, "vh")) << dtype;
    EXPECT_TRUE(sees("dhead", "row 299, ", "write", false, "vh")) << dtype;
    EXPECT_TRUE(sees("head", "column 39, ", "read", true, "hv")) << dtype;
    EXPECT_TRUE(sees("dhead", "column 39, ", "write", true, "hv")) << dtype;
    EXPECT_TRUE(sees("bias", "", "read", true, "vh")) << dtype;
    EXPECT_TRUE(sees("dbias", "", "write", true, "vh")) << dtype;
  }
}

INSTANTIATE_TEST_SUITE_P(All, StrictLinearKernels, testing::ValuesIn(supported_isas()),
                         [](const auto& instance) { return instance.param; });

TEST(StrictLinearConfigs, LargeHeadsAreCutAndRealHiddenStatesPass) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer ends a forked child whose new thread gets the id of a joinable thread of the parent";
#endif
  const StrictReport cut = strict_report({"seq_len=400", "vocab_size=9000", "hidden_size=8", "valid_vocab=8900"}, call,
                                         "gradcheck_linear_ce_qwen2.5_1.5b.yaml");
  EXPECT_TRUE(cut.text().ends_with(" buffers, 320 of 400 rows, 8192 of 9000 columns: nothing found\n")) << cut.text();
  const StrictReport real = strict_report({}, call, "gradcheck_linear_safetensors.yaml");
  EXPECT_TRUE(real.findings.empty()) << real.text();
}

}  // namespace
}  // namespace tileloss::tools
