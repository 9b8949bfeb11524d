// Outputs of somebody else's, judged by gradcheck's gates. The library's own kernels stand for something else.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "tests/shared/gradcheck_call.h"

namespace tileloss::tools {
namespace {

using oracle::NumberFormat;

constexpr const char* kCrossEntropy =
    "loss=cross_entropy batch_size=2 seq_len=9 vocab_size=3001 dtype=bf16 seed=3 ignore_prob=0.2 source.std=2 "
    "outputs=[logp, lse, entropy, argmax, correct, log_sum_sq_probs, mean_logit]";
constexpr const char* kLinear =
    "level=linear loss=cross_entropy batch_size=2 seq_len=20 vocab_size=500 hidden_size=48 dtype=bf16 bias=random "
    "ignore_prob=0.2 token_weights=random source.std=2 gradients=[dhidden, dhead, dbias]";
constexpr const char* kLogprobs =
    "loss=logprobs batch_size=2 seq_len=9 vocab_size=300 dtype=fp32 upstream=per_row outputs=[logp, lse, entropy]";
constexpr const char* kPolicy =
    "loss=policy_loss preset=gspo batch_size=3 seq_len=11 vocab_size=300 dtype=bf16 mask_prob=0.2 sequences=offsets "
    "beta=0.1 old_logp_noise_scale=0.1 ref_logp_noise_scale=0.1 sampler_logp_noise_scale=0.1 source.std=2";

constexpr const char* kDistillation =
    "loss=distillation divergence=reverse_kl label_weight=0.3 divergence_weight=0.7 batch_size=2 seq_len=9 vocab_size=300 "
    "dtype=bf16 mask_prob=0.2 temperature=2 source.std=2 source.teacher=near source.special_rows=[same, both_zeros] "
    "outputs=[logp, lse, entropy, correct, divergence, teacher_entropy, agreement]";

constexpr int64_t kTile = 64;

// A case and what the library's kernels make of it, as somebody hands it in.
struct Outputs {
  explicit Outputs(const std::string& text, const Sets& sets = {}) : Outputs(config_of(text, sets)) {}
  explicit Outputs(GradcheckConfig given) : config(std::move(given)) {
    forget_kernels(config);
    config.kernel.vocab_block = kTile;
    inputs = make_inputs(config, team);
    results = run_kernels(config, inputs);
  }

  // Their elements live as long as this.
  std::vector<StoredTensor> tensors() const {
    std::vector<StoredTensor> tensors;
    const auto add = [&](const char* name, const char* dtype, const auto& values, std::vector<int64_t> shape) {
      if (!values.empty()) tensors.push_back(stored(name, dtype, std::move(shape), values));
    };
    const std::vector<int64_t> rows = {inputs.rows};
    add("loss", "F32", results.loss, config.per_row_loss() ? rows : std::vector<int64_t>{});
    for (size_t o = 0; o < kOutputCount; ++o) {
      const RowOutput& output = checked_outputs()[o];
      const std::vector<double>& values = results.outputs[o];
      if (output.dtype == TILELOSS_INT64) {
        kept.integers.assign(values.begin(), values.end());
        add(output.name, "I64", kept.integers, rows);
      } else if (output.dtype == TILELOSS_UINT8) {
        kept.bytes[o].assign(values.begin(), values.end());
        add(output.name, "U8", kept.bytes[o], rows);
      } else {
        kept.floats[o].assign(values.begin(), values.end());
        add(output.name, "F32", kept.floats[o], rows);
      }
    }
    add("metrics", "F32", results.metrics, {static_cast<int64_t>(results.metrics.size())});
    const CheckedGradient& gradient = results.gradients.front();
    const auto add_matrix = [&](const char* name, NumberFormat format, const HugeBuffer& buffer, int64_t height, int64_t width) {
      if (buffer.empty()) return;
      const auto bytes = height * width * static_cast<int64_t>(oracle::format_info(format).bytes);
      tensors.push_back({name, dtype_name(format), {height, width}, bytes, buffer.data()});
    };
    add_matrix("dlogits", gradient.dlogits_format, gradient.dlogits, inputs.rows, inputs.cols);
    for (const LinearGradient& one : gradient.linear) {
      const oracle::StoredMatrix& view = one.view;
      const std::vector<int64_t> shape = {view.rows, view.cols};
      tensors.push_back({name_of(one.which), dtype_name(view.format),
                         one.which == LinearOutput::kDbias ? std::vector<int64_t>{view.rows} : shape, one.data.bytes(),
                         static_cast<const char*>(view.data)});
    }
    return tensors;
  }

  GradcheckReport judge(const std::vector<StoredTensor>& given, bool mutants = false) const {
    GradcheckConfig asked = config;
    asked.mutants = mutants;
    ThreadTeam one(1);
    return judge_all(asked, inputs, read_outputs(TensorFile("outputs", given), asked, inputs), one);
  }
  Sets failures(const std::vector<StoredTensor>& given, bool mutants = false) const {
    GradcheckConfig asked = config;
    asked.mutants = mutants;
    return tools::failures(asked, judge(given, mutants));
  }

  GradcheckConfig config;
  ThreadTeam team{1};
  CheckInputs inputs;
  KernelResults results;
  // The row outputs as they are handed in.
  struct Kept {
    std::array<std::vector<float>, kOutputCount> floats;
    std::vector<int64_t> integers;
    std::array<std::vector<uint8_t>, kOutputCount> bytes;
  };
  mutable Kept kept;
};

class JudgeOutputs : public testing::TestWithParam<std::pair<const char*, Sets>> {};

TEST_P(JudgeOutputs, OfTheKernelsPass) {
  const Outputs outputs(GetParam().first, GetParam().second);
  EXPECT_EQ(outputs.failures(outputs.tensors()), Sets());
  EXPECT_GE(outputs.tensors().size(), 3U);
}

// Each output alone is enough, and none of the others is missed.
TEST_P(JudgeOutputs, OneAtATimePass) {
  const Outputs outputs(GetParam().first, GetParam().second);
  for (const StoredTensor& tensor : outputs.tensors()) {
    EXPECT_EQ(outputs.failures({tensor}), Sets()) << tensor.name;
    const std::string name = tensor.name == "loss" && outputs.config.per_row_loss() ? "per_loss" : tensor.name;
    const std::vector<Gate> gates = outputs.judge({tensor}).verdict.gates;
    EXPECT_TRUE(std::ranges::any_of(gates, [&](const Gate& gate) { return gate.name.starts_with(name); })) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cases, JudgeOutputs,
    testing::Values(std::pair(kCrossEntropy, Sets{}),
                    std::pair(kCrossEntropy, std::vector<std::string>{"reduction=none", "upstream=per_row", "dtype=fp16",
                                                                      "label_smoothing=0.1", "z_loss=1e-3", "valid_vocab=2950"}),
                    std::pair(kLogprobs, Sets{}), std::pair(kPolicy, Sets{}), std::pair(kDistillation, Sets{}),
                    std::pair(kLinear, Sets{}), std::pair(kLinear, std::vector<std::string>{"dhead_dtype=head", "dtype=fp32"})));

// The names of the gates that catch a mutant in gradcheck, without the pass, and those of the loss and rows.
std::set<std::string> gates_of_mutant(const Outputs& outputs, const std::string& name) {
  GradcheckConfig config = outputs.config;
  config.mutants = true;
  ThreadTeam team(1);
  for (const MutantVerdict& mutant : judge_all(config, outputs.inputs, outputs.results, team).mutants) {
    if (mutant.name != name) continue;
    EXPECT_TRUE(mutant.planted) << name;
    std::set<std::string> gates;
    for (const std::string& gate : mutant.caught_by) {
      const std::string prefix = "value_and_grad/";
      gates.insert(gate.starts_with(prefix) ? gate.substr(prefix.size()) : gate);
    }
    return gates;
  }
  ADD_FAILURE() << "no mutant " << name;
  return {};
}

std::set<std::string> failed_gates(const Outputs& outputs, const std::vector<StoredTensor>& given) {
  const Sets failed = outputs.failures(given);
  return {failed.begin(), failed.end()};
}

using Alter = std::function<void(Outputs&)>;

void each_dlogit(Outputs& outputs, const std::function<double(int64_t row, int64_t column, double value)>& change) {
  const CheckedGradient& gradient = outputs.results.gradients.front();
  for (int64_t row = 0; row < outputs.inputs.rows; ++row) {
    if (outputs.inputs.is_ignored(row)) continue;
    char* data = gradient.dlogits.data() + outputs.inputs.row_offset(row, gradient.dlogits_format);
    for (int64_t j = 0; j < outputs.inputs.valid; ++j) {
      const double value = oracle::decode_at(gradient.dlogits_format, data, j);
      oracle::encode_at(gradient.dlogits_format, data, j, change(row, j, value));
    }
  }
}

TEST(JudgeAltered, CopiesFailAtTheGatesThatCatchGradchecksMutants) {
  const Outputs right(kCrossEntropy);
  const int64_t last_tile = (right.inputs.valid - 1) / kTile * kTile;
  const std::vector<double> logp = right.results.outputs[kLogp];
  const std::vector<std::pair<const char*, Alter>> copies = {
      {"gradient_zero", [](Outputs& o) { each_dlogit(o, [](int64_t, int64_t, double) { return 0.0; }); }},
      {"gradient_halved", [](Outputs& o) { each_dlogit(o, [](int64_t, int64_t, double g) { return 0.5 * g; }); }},
      {"gradient_negated", [](Outputs& o) { each_dlogit(o, [](int64_t, int64_t, double g) { return -g; }); }},
      {"off_target_zeroed",
       [](Outputs& o) {
         each_dlogit(o, [&](int64_t row, int64_t j, double g) { return j == o.inputs.labels[static_cast<size_t>(row)] ? g : 0; });
       }},
      {"last_tile_dropped",
       [&](Outputs& o) { each_dlogit(o, [&](int64_t, int64_t j, double g) { return j >= last_tile ? 0 : g; }); }},
      {"loss_halved", [](Outputs& o) { o.results.loss[0] *= 0.5F; }},
      {"loss_shifted", [](Outputs& o) { o.results.loss[0] *= 1.05F; }},
      {"logp_of_neighbour",
       [&](Outputs& o) {
         for (size_t row = 0; row < logp.size(); ++row) {
           if (!o.inputs.is_ignored(static_cast<int64_t>(row))) o.results.outputs[kLogp][row] = logp[(row + 1) % logp.size()];
         }
       }},
      {"argmax_off_by_one", [](Outputs& o) {
         for (int64_t row = 0; row < o.inputs.rows; ++row) {
           if (!o.inputs.is_ignored(row)) ++o.results.outputs[kArgmax][static_cast<size_t>(row)];
         }
       }}};
  for (const auto& [name, alter] : copies) {
    Outputs altered(kCrossEntropy);
    alter(altered);
    EXPECT_EQ(failed_gates(altered, altered.tensors()), gates_of_mutant(right, name)) << name;
  }
}

TEST(JudgeAltered, GradientsOfHiddenHeadAndBiasFailAtTheirOwnGates) {
  const Outputs right(kLinear);
  for (const std::string name : {"dhidden", "dhead", "dbias"}) {
    for (const std::string how : {"halved", "negated", "first_tile_dropped", "last_tile_dropped"}) {
      std::vector<StoredTensor> tensors = right.tensors();
      StoredTensor& tensor = *std::ranges::find(tensors, name, &StoredTensor::name);
      const NumberFormat format = tensor.dtype == "BF16" ? NumberFormat::kBfloat16 : NumberFormat::kFloat32;
      std::vector<char> copy(tensor.data, tensor.data + tensor.bytes);
      const int64_t rows = tensor.shape[0], cols = tensor.shape.size() > 1 ? tensor.shape[1] : 1;
      for (int64_t i = 0; i < rows * cols; ++i) {
        const double value = oracle::decode_at(format, copy.data(), i);
        const bool dropped = how == "first_tile_dropped"  ? i / cols < 16
                             : how == "last_tile_dropped" ? i / cols >= rows - 16
                                                          : false;
        oracle::encode_at(format, copy.data(), i, how == "halved" ? value / 2 : how == "negated" ? -value : dropped ? 0 : value);
      }
      tensor.data = copy.data();
      EXPECT_EQ(failed_gates(right, tensors), gates_of_mutant(right, name + "_" + how)) << name << how;
    }
  }
}

TEST(JudgeAltered, ANumberWhereARowIsIgnoredFails) {
  Outputs outputs(kCrossEntropy);
  const auto ignored = std::find(outputs.inputs.labels.begin(), outputs.inputs.labels.end(), outputs.inputs.ignore_index);
  ASSERT_NE(ignored, outputs.inputs.labels.end());
  const auto row = ignored - outputs.inputs.labels.begin();
  outputs.results.outputs[kLse][static_cast<size_t>(row)] = 1;
  oracle::encode_at(NumberFormat::kBfloat16, outputs.results.gradients[0].dlogits.data(), row * outputs.inputs.cols, 1);
  EXPECT_EQ(failed_gates(outputs, outputs.tensors()), (std::set<std::string>{"lse", "dlogits/nonzero_where_ignored"}));
}

// Of the same logits widened, so that the kernels write float32.
std::vector<float> float32_gradient(const Outputs& outputs) {
  const int64_t elements = outputs.inputs.rows * outputs.inputs.cols;
  std::vector<float> logits(static_cast<size_t>(elements));
  for (int64_t i = 0; i < elements; ++i) {
    logits[static_cast<size_t>(i)] =
        static_cast<float>(oracle::decode_at(NumberFormat::kBfloat16, outputs.inputs.logits.data(), i));
  }
  std::vector<float> dlogits(logits.size());
  std::vector<float> loss(1);
  tileloss_args args;
  tileloss_args_init(&args);
  args.logits =
      tileloss_make_matrix(logits.data(), TILELOSS_FLOAT32, outputs.inputs.rows, outputs.inputs.cols, outputs.inputs.cols);
  args.dlogits = args.logits;
  args.dlogits.data = dlogits.data();
  args.labels = tileloss_make_vector(outputs.inputs.labels.data(), TILELOSS_INT64, outputs.inputs.rows);
  args.loss = tileloss_make_vector(loss.data(), TILELOSS_FLOAT32, 1);
  call(outputs.config.function, TILELOSS_VALUE_AND_GRAD, args,
       make_plan(outputs.config.function, TILELOSS_VALUE_AND_GRAD, args, {}));
  return dlogits;
}

// A gradient of bfloat16 logits may come as float32: then it is held to float32's budget, and the same values as bfloat16 to
// bfloat16's.
TEST(JudgeMixtures, AGradientIsJudgedAsItIsStored) {
  const Outputs outputs(kCrossEntropy);
  const int64_t elements = outputs.inputs.rows * outputs.inputs.cols;
  std::vector<double> values(static_cast<size_t>(elements));
  oracle::decode_row(NumberFormat::kBfloat16, outputs.results.gradients[0].dlogits.data(), values);
  const std::vector<float> rounded(values.begin(), values.end());
  const std::vector<int64_t> shape = {outputs.inputs.batch_size, outputs.inputs.seq_len, outputs.inputs.cols};
  EXPECT_EQ(failed_gates(outputs, {stored("dlogits", "F32", shape, rounded)}),
            (std::set<std::string>{"dlogits/ulp_target", "dlogits/ulp_off_target", "dlogits/normwise"}));

  const std::vector<float> dlogits = float32_gradient(outputs);
  EXPECT_EQ(outputs.failures({stored("dlogits", "F32", shape, dlogits)}), Sets());
}

// What is handed over is what gradcheck draws, letter by letter.
TEST(JudgeInputs, AreTheOnesThatAreDrawn) {
  for (const char* text : {kCrossEntropy, kLogprobs, kPolicy, kLinear}) {
    const Outputs outputs(text);
    const CheckInputs& inputs = outputs.inputs;
    const TensorFile file("inputs", input_tensors(outputs.config, inputs));
    const auto same = [&](const char* name, const void* data, int64_t bytes) {
      const StoredTensor& tensor = file.tensor(name);
      ASSERT_EQ(tensor.bytes, bytes) << name;
      EXPECT_EQ(std::memcmp(tensor.data, data, static_cast<size_t>(bytes)), 0) << name;
    };
    same("labels", inputs.labels.data(), inputs.rows * 8);
    if (inputs.linear) {
      same("hidden", inputs.linear->hidden.data(), inputs.linear->hidden.bytes());
      same("head", inputs.linear->head.data(), inputs.linear->head.bytes());
      same("bias", inputs.linear->bias.data(), inputs.cols * 4);
    } else {
      same("logits", inputs.logits.data(), inputs.logits.bytes());
    }
    if (!inputs.policy.advantages.empty()) {
      same("old_logp", inputs.policy.old_logp.data(), inputs.rows * 4);
      same("sequence_offsets", inputs.policy.offsets.data(), std::ssize(inputs.policy.offsets) * 8);
      same("mask", inputs.policy.mask.data(), inputs.rows);
    }
    if (!inputs.token_weights.empty()) same("token_weights", inputs.token_weights.data(), inputs.rows * 4);
    if (!outputs.config.function.is_loss()) same("entropy_grad", inputs.entropy_grad.data(), inputs.rows * 4);
  }
}

// What a caller needs to know of the config besides the tensors.
TEST(JudgeInputs, ComeWithTheirCase) {
  for (const auto& [text, expected] : std::vector<std::pair<std::string, const char*>>{
           {std::string(kPolicy) + " kernel.in_place=true mutants=true outputs=[entropy]",
            R"({"function":"policy_loss","options":{"ratio_level":"sequence","beta":0.1},"batch_size":3,"seq_len":11,)"
            R"("outputs":["entropy"],"mutants":true,"in_place":true})"},
           {std::string(kLinear) + " head_layout=hv",
            R"({"function":"linear_cross_entropy","options":{},"batch_size":2,"seq_len":20,"outputs":["logp","lse"],)"
            R"("mutants":false,"in_place":false,"gradients":["dhidden","dhead","dbias"],"head_layout":"hv"})"}}) {
    const GradcheckConfig config = config_of(text);
    ThreadTeam team(1);
    Json described = described_case(config, make_inputs(config, team));
    for (const char* set_by_the_preset : {"epsilon_low", "epsilon_high", "aggregation"})
      described["options"].erase(set_by_the_preset);
    EXPECT_EQ(described, Json::parse(expected));
  }
}

// The inputs, as a file's, make the case of a config of their own, whose outputs the first config judges.
TEST(JudgeInputs, GoRoundTheKernelsAndBack) {
  const Outputs drawn(kCrossEntropy);
  const Outputs from_file(config_of("loss=cross_entropy source.kind=safetensors source.path=/in outputs=[logp, entropy]", {},
                                    {TensorFile("/in", input_tensors(drawn.config, drawn.inputs))}));
  EXPECT_EQ(drawn.failures(from_file.tensors()), Sets());
}

TEST(JudgeErrors, NameTheTensorWhatWasExpectedAndWhatIsThere) {
  const Outputs outputs(kCrossEntropy), linear(kLinear), logprobs(kLogprobs);
  const std::vector<float> zeros(40000);
  const auto floats = [&](const char* name, std::vector<int64_t> shape, const char* dtype = "F32") {
    return stored(name, dtype, std::move(shape), zeros);
  };
  struct Error {
    const Outputs& of;
    StoredTensor tensor;
    std::string message;
  };
  for (const Error& error :
       {Error{outputs, floats("logp", {17}), "logp: expected [18] or [2, 9], got [17]"},
        Error{outputs, floats("logp", {18}, "BF16"), "logp: expected F32, got BF16"},
        Error{outputs, floats("loss", {18}), "loss: expected [] or [1], got [18]"},
        Error{outputs, floats("argmax", {18}), "argmax: expected I64 or I32, got F32"},
        Error{outputs, floats("correct", {18}), "correct: expected U8 or BOOL, got F32"},
        Error{outputs, floats("dlogits", {2, 3001}), "dlogits: expected [18, 3001] or [2, 9, 3001], got [2, 3001]"},
        Error{outputs, floats("dlogits", {18, 1}, "F64"), "dlogits: expected BF16, F16 or F32, got F64"},
        Error{outputs, floats("dlogit", {18}), "dlogit: is no output of cross_entropy, which are: loss, logp, lse, "},
        Error{outputs, floats("dhead", {18}), "dhead: is no output of cross_entropy"},
        Error{outputs, floats("metrics", {13}), "metrics: is no output of cross_entropy"},
        Error{logprobs, floats("loss", {1}), "loss: is no output of logprobs"},
        Error{linear, floats("dlogits", {40, 500}), "dlogits: is no output of linear_cross_entropy"},
        Error{linear, floats("dhidden", {40, 47}), "dhidden: expected [40, 48] or [2, 20, 48], got [40, 47]"},
        Error{linear, floats("dhead", {48, 500}), "dhead: expected [500, 48], got [48, 500]"},
        Error{linear, floats("dbias", {499}), "dbias: expected [500], got [499]"}}) {
    EXPECT_TRUE(is_refused(refusal_of({}, [&] { error.of.judge({error.tensor}); }), "outputs: " + error.message));
  }
  EXPECT_TRUE(
      is_refused(refusal_of({}, [&] { outputs.judge({}); }), "expected at least one output of cross_entropy: loss, logp"));
  EXPECT_TRUE(is_refused(refusal_of({}, [] { Outputs(kLinear, {"accumulate=true"}); }),
                         "accumulate: expected false where outputs are judged, got true"));
}

// Whatever the config says of the library's own kernels: this machine may not have them.
TEST(Judge, TheKernelsOfTheConfigHaveNoPart) {
  const Outputs outputs(kLinear);
  const Outputs asked(kLinear, {"head_layout=hv", "kernel.vocab_block=128", "mutants=true", "strict=true"});
  EXPECT_EQ(asked.failures(outputs.tensors()), Sets());
  EXPECT_FALSE(asked.config.mutants || asked.config.strict || asked.config.linear.transposed_head);
}

// As gradcheck's own, whose kernels stand for something else here.
TEST(Judge, PlantsMutantsInTheOutputsAndCatchesThem) {
  for (const char* text : {kCrossEntropy, kLogprobs, kPolicy, kLinear}) {
    const Outputs outputs(text);
    EXPECT_EQ(outputs.failures(outputs.tensors(), true), Sets());
    EXPECT_GE(std::ranges::count_if(outputs.judge(outputs.tensors(), true).mutants, &MutantVerdict::planted), 5) << text;
  }
}

// The gradient decides what is planted and by which budget it is judged, whatever the logits are.
TEST(Judge, PlantsMutantsInAGradientOfAnotherType) {
  const Outputs outputs(kCrossEntropy);
  const std::vector<float> dlogits = float32_gradient(outputs);
  EXPECT_EQ(outputs.failures({stored("dlogits", "F32", {outputs.inputs.rows, outputs.inputs.cols}, dlogits)}, true), Sets());
}

// A gate that fails already can catch nothing.
TEST(Judge, PlantsNoMutantsWhereGatesFailWithoutAny) {
  const Outputs outputs(kCrossEntropy);
  const std::vector<float> zeros(static_cast<size_t>(outputs.inputs.rows * outputs.inputs.cols));
  const StoredTensor dlogits = stored("dlogits", "F32", {outputs.inputs.rows, outputs.inputs.cols}, zeros);
  EXPECT_FALSE(outputs.failures({dlogits}, true).empty());
  EXPECT_TRUE(outputs.judge({dlogits}, true).mutants.empty());
}

// tests/data/README.md says how PyTorch computed them.
TEST(Judge, OutputsOfPyTorchPass) {
  const GradcheckConfig config = config_of("gradcheck_linear_safetensors.yaml");
  ThreadTeam team(1);
  const CheckInputs inputs = make_inputs(config, team);
  const TensorFile file = read_tensors(TILELOSS_SOURCE_DIR "/tests/data/qwen2-tiny-hidden-outputs.safetensors");
  const Verdict verdict = judge(config, inputs, read_outputs(file, config, inputs), team);
  EXPECT_TRUE(verdict.passes());
  for (const char* name : {"loss", "logp", "lse", "dhidden/cap", "dhead/cap", "dbias/cap"}) {
    EXPECT_NE(std::ranges::find(verdict.gates, name, &Gate::name), verdict.gates.end()) << name;
  }
}

}  // namespace
}  // namespace tileloss::tools
