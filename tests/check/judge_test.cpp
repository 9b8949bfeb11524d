// tileloss judge: outputs in a file, by gradcheck's gates. The library's own kernels stand for something else.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "check/gradcheck_config.h"
#include "check/gradcheck_report.h"
#include "check/gradcheck_run.h"
#include "check/inputs/case_files.h"
#include "support/exit_codes.h"
#include "support/result_writer.h"
#include "tests/shared/program.h"

namespace tileloss::tools {
namespace {

using reference::NumberFormat;
using test::ProgramResult;
using test::run_program;
using test::TemporaryFolder;

constexpr const char* kCrossEntropy =
    "loss: cross_entropy\nbatch_size: 2\nseq_len: 9\nvocab_size: 3001\ndtype: bf16\nseed: 3\nignore_prob: 0.2\n"
    "source: {kind: synthetic, distribution: normal, std: 2}\n"
    "outputs: [logp, lse, entropy, argmax, correct, log_sum_sq_probs, mean_logit]\n";
constexpr const char* kLinear =
    "level: linear\nloss: cross_entropy\nbatch_size: 2\nseq_len: 20\nvocab_size: 500\nhidden_size: 48\ndtype: bf16\nbias: "
    "random\n"
    "ignore_prob: 0.2\ntoken_weights: random\nsource: {kind: synthetic, std: 2}\ngradients: [dhidden, dhead, dbias]\n";
constexpr const char* kLogprobs =
    "loss: logprobs\nbatch_size: 2\nseq_len: 9\nvocab_size: 300\ndtype: fp32\nupstream: per_row\noutputs: [logp, lse, entropy]\n";
constexpr const char* kPolicy =
    "loss: policy_loss\npreset: gspo\nbatch_size: 3\nseq_len: 11\nvocab_size: 300\ndtype: bf16\nmask_prob: 0.2\n"
    "sequences: offsets\nbeta: 0.1\nold_logp_noise_scale: 0.1\nref_logp_noise_scale: 0.1\nsampler_logp_noise_scale: 0.1\n"
    "source: {kind: synthetic, std: 2}\n";

constexpr const char* kDistillation =
    "loss: distillation\ndivergence: reverse_kl\nlabel_weight: 0.3\ndivergence_weight: 0.7\nbatch_size: 2\nseq_len: "
    "9\nvocab_size: 300\ndtype: bf16\nmask_prob: "
    "0.2\n"
    "temperature: 2\nsource: {kind: synthetic, std: 2, teacher: near, special_rows: [same, both_zeros]}\n"
    "outputs: [logp, lse, entropy, correct, divergence, teacher_entropy, agreement]\n";

constexpr int64_t kTile = 64;

// A case and what the library's kernels make of it, as a file that somebody hands in.
struct Outputs {
  explicit Outputs(const std::string& text, const std::vector<std::string>& sets = {})
      : path(folder.write("c.yaml", text)), overrides(sets), config(read_gradcheck_config(path, sets)), team(1) {
    forget_kernels(config);
    config.kernel.vocab_block = kTile;
    inputs = make_inputs(config, team);
    results = run_kernels(config, inputs);
  }

  // Their elements live as long as this.
  std::vector<Tensor> tensors() const {
    std::vector<Tensor> tensors;
    const auto add = [&](const char* name, const char* dtype, const auto& values, std::vector<int64_t> shape) {
      using Element = typename std::decay_t<decltype(values)>::value_type;
      const auto bytes = static_cast<int64_t>(values.size() * sizeof(Element));
      if (!values.empty()) tensors.push_back({name, dtype, std::move(shape), values.data(), bytes});
    };
    const std::vector<int64_t> rows = {inputs.rows};
    add("loss", "F32", results.loss, config.per_row_loss() ? rows : std::vector<int64_t>{});
    for (size_t o = 0; o < kOutputCount; ++o) {
      const RowOutput& output = checked_outputs()[o];
      const std::vector<double>& values = results.outputs[o];
      if (output.dtype == TILELOSS_INT64) {
        stored.integers.assign(values.begin(), values.end());
        add(output.name, "I64", stored.integers, rows);
      } else if (output.dtype == TILELOSS_UINT8) {
        stored.bytes[o].assign(values.begin(), values.end());
        add(output.name, "U8", stored.bytes[o], rows);
      } else {
        stored.floats[o].assign(values.begin(), values.end());
        add(output.name, "F32", stored.floats[o], rows);
      }
    }
    add("metrics", "F32", results.metrics, {static_cast<int64_t>(results.metrics.size())});
    const CheckedGradient& gradient = results.gradients.front();
    const auto add_matrix = [&](const char* name, NumberFormat format, const HugeBuffer& buffer, int64_t height, int64_t width) {
      if (buffer.empty()) return;
      const auto bytes = height * width * static_cast<int64_t>(reference::format_info(format).bytes);
      tensors.push_back({name, dtype_name(format), {height, width}, buffer.data(), bytes});
    };
    add_matrix("dlogits", gradient.dlogits_format, gradient.dlogits, inputs.rows, inputs.cols);
    for (const LinearGradient& one : gradient.linear) {
      const reference::StoredMatrix& view = one.view;
      const std::vector<int64_t> shape = {view.rows, view.cols};
      tensors.push_back({name_of(one.which), dtype_name(view.format),
                         one.which == LinearOutput::kDbias ? std::vector<int64_t>{view.rows} : shape, view.data,
                         one.data.bytes()});
    }
    return tensors;
  }

  // The program's judgement of these tensors.
  ProgramResult judge(const std::vector<Tensor>& given, const std::vector<std::string>& more = {},
                      const std::vector<std::string>& flags = {}) const {
    write_safetensors(folder.path() / "f.safetensors", given);
    std::vector<std::string> arguments = {"judge", "--config", path.string(), "--outputs",
                                          (folder.path() / "f.safetensors").string()};
    for (const std::vector<std::string>& sets : {overrides, more}) {
      for (const std::string& set : sets) arguments.insert(arguments.end(), {"--set", set});
    }
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    return run_program(arguments);
  }

  TemporaryFolder folder;
  std::filesystem::path path;
  std::vector<std::string> overrides;
  GradcheckConfig config;
  ThreadTeam team;
  CheckInputs inputs;
  KernelResults results;
  // The row outputs as a file has them.
  struct Stored {
    std::array<std::vector<float>, kOutputCount> floats;
    std::vector<int64_t> integers;
    std::array<std::vector<uint8_t>, kOutputCount> bytes;
  };
  mutable Stored stored;
};

// What the last line of the output has behind FAIL.
std::set<std::string> failed_gates(const ProgramResult& result) {
  const std::string line = result.last_line();
  if (!line.starts_with("FAIL: ")) return {};
  std::set<std::string> gates;
  for (const std::string& name : split(line.substr(6), ',')) gates.insert(name.substr(name.find_first_not_of(' ')));
  return gates;
}

class JudgeOutputs : public testing::TestWithParam<std::pair<const char*, std::vector<std::string>>> {};

TEST_P(JudgeOutputs, OfTheKernelsPass) {
  const Outputs outputs(GetParam().first, GetParam().second);
  const ProgramResult result = outputs.judge(outputs.tensors());
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_EQ(result.last_line(), "PASS");
  EXPECT_GE(outputs.tensors().size(), 3U);
}

// Each output alone is enough, and none of the others is missed.
TEST_P(JudgeOutputs, OneAtATimePass) {
  const Outputs outputs(GetParam().first, GetParam().second);
  for (const Tensor& tensor : outputs.tensors()) {
    const ProgramResult result = outputs.judge({tensor});
    EXPECT_EQ(result.exit_code, 0) << tensor.name << "\n" << result.out << result.err;
    EXPECT_NE(result.out.find("\n" + (tensor.name == "loss" && outputs.config.per_row_loss() ? "per_loss" : tensor.name)),
              std::string::npos)
        << result.out;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cases, JudgeOutputs,
    testing::Values(std::pair(kCrossEntropy, std::vector<std::string>{}),
                    std::pair(kCrossEntropy, std::vector<std::string>{"reduction=none", "upstream=per_row", "dtype=fp16",
                                                                      "label_smoothing=0.1", "z_loss=1e-3", "valid_vocab=2950"}),
                    std::pair(kLogprobs, std::vector<std::string>{}), std::pair(kPolicy, std::vector<std::string>{}),
                    std::pair(kDistillation, std::vector<std::string>{}), std::pair(kLinear, std::vector<std::string>{}),
                    std::pair(kLinear, std::vector<std::string>{"dhead_dtype=head", "dtype=fp32"})));

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

using Alter = std::function<void(Outputs&)>;

void each_dlogit(Outputs& outputs, const std::function<double(int64_t row, int64_t column, double value)>& change) {
  const CheckedGradient& gradient = outputs.results.gradients.front();
  for (int64_t row = 0; row < outputs.inputs.rows; ++row) {
    if (outputs.inputs.is_ignored(row)) continue;
    char* data = gradient.dlogits.data() + outputs.inputs.row_offset(row, gradient.dlogits_format);
    for (int64_t j = 0; j < outputs.inputs.valid; ++j) {
      const double value = reference::decode_at(gradient.dlogits_format, data, j);
      reference::encode_at(gradient.dlogits_format, data, j, change(row, j, value));
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
    const ProgramResult result = altered.judge(altered.tensors());
    EXPECT_EQ(result.exit_code, 1) << name;
    EXPECT_EQ(failed_gates(result), gates_of_mutant(right, name)) << name << "\n" << result.out;
  }
}

TEST(JudgeAltered, GradientsOfHiddenHeadAndBiasFailAtTheirOwnGates) {
  const Outputs right(kLinear);
  for (const std::string name : {"dhidden", "dhead", "dbias"}) {
    for (const std::string how : {"halved", "negated", "first_tile_dropped", "last_tile_dropped"}) {
      std::vector<Tensor> tensors = right.tensors();
      Tensor& tensor = *std::find_if(tensors.begin(), tensors.end(), [&](const Tensor& t) { return t.name == name; });
      const NumberFormat format = tensor.dtype == "BF16" ? NumberFormat::kBfloat16 : NumberFormat::kFloat32;
      std::vector<char> copy(static_cast<const char*>(tensor.data), static_cast<const char*>(tensor.data) + tensor.bytes);
      const int64_t rows = tensor.shape[0], cols = tensor.shape.size() > 1 ? tensor.shape[1] : 1;
      for (int64_t i = 0; i < rows * cols; ++i) {
        const double value = reference::decode_at(format, copy.data(), i);
        const bool dropped = how == "first_tile_dropped"  ? i / cols < 16
                             : how == "last_tile_dropped" ? i / cols >= rows - 16
                                                          : false;
        reference::encode_at(format, copy.data(), i,
                             how == "halved"    ? value / 2
                             : how == "negated" ? -value
                             : dropped          ? 0
                                                : value);
      }
      tensor.data = copy.data();
      const ProgramResult result = right.judge(tensors);
      EXPECT_EQ(result.exit_code, 1) << name << how;
      EXPECT_EQ(failed_gates(result), gates_of_mutant(right, name + "_" + how)) << name << how << "\n" << result.out;
    }
  }
}

TEST(JudgeAltered, ANumberWhereARowIsIgnoredFails) {
  Outputs outputs(kCrossEntropy);
  const auto ignored = std::find(outputs.inputs.labels.begin(), outputs.inputs.labels.end(), outputs.inputs.ignore_index);
  ASSERT_NE(ignored, outputs.inputs.labels.end());
  const auto row = ignored - outputs.inputs.labels.begin();
  outputs.results.outputs[kLse][static_cast<size_t>(row)] = 1;
  reference::encode_at(NumberFormat::kBfloat16, outputs.results.gradients[0].dlogits.data(), row * outputs.inputs.cols, 1);
  const ProgramResult result = outputs.judge(outputs.tensors());
  EXPECT_EQ(failed_gates(result), (std::set<std::string>{"lse", "dlogits/nonzero_where_ignored"})) << result.out;
}

// Of the same logits widened, so that the kernels write float32.
std::vector<float> float32_gradient(const Outputs& outputs) {
  const int64_t elements = outputs.inputs.rows * outputs.inputs.cols;
  std::vector<float> logits(static_cast<size_t>(elements));
  for (int64_t i = 0; i < elements; ++i) {
    logits[static_cast<size_t>(i)] =
        static_cast<float>(reference::decode_at(NumberFormat::kBfloat16, outputs.inputs.logits.data(), i));
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
  reference::decode_row(NumberFormat::kBfloat16, outputs.results.gradients[0].dlogits.data(), values);
  const std::vector<float> rounded(values.begin(), values.end());
  const std::vector<int64_t> shape = {outputs.inputs.batch_size, outputs.inputs.seq_len, outputs.inputs.cols};
  const ProgramResult as_float32 = outputs.judge({{"dlogits", "F32", shape, rounded.data(), elements * 4}});
  EXPECT_EQ(failed_gates(as_float32), (std::set<std::string>{"dlogits/ulp_target", "dlogits/ulp_off_target", "dlogits/normwise"}))
      << as_float32.out;

  const std::vector<float> dlogits = float32_gradient(outputs);
  const ProgramResult exact = outputs.judge({{"dlogits", "F32", shape, dlogits.data(), elements * 4}});
  EXPECT_EQ(exact.exit_code, 0) << exact.out << exact.err;
}

// What is handed over is what gradcheck draws, letter by letter, and a check of the file finds the same numbers.
TEST(JudgeInputs, AreTheOnesThatAreDrawn) {
  for (const char* text : {kCrossEntropy, kLogprobs, kPolicy, kLinear}) {
    const Outputs outputs(text);
    const auto path = outputs.folder.path() / "in.safetensors";
    const ProgramResult result = run_program({"judge", "--config", outputs.path.string(), "--write-inputs", path.string()});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    const SafetensorsFile file(path);
    const auto same = [&](const char* name, const void* data, int64_t bytes) {
      const std::vector<char> stored = file.read(file.tensor(name));
      ASSERT_EQ(static_cast<int64_t>(stored.size()), bytes) << name;
      EXPECT_EQ(std::memcmp(stored.data(), data, stored.size()), 0) << name;
    };
    const CheckInputs& inputs = outputs.inputs;
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
           {std::string(kPolicy) + "kernel: {in_place: true}\nmutants: true\noutputs: [entropy]\n",
            R"({"function":"policy_loss","options":{"ratio_level":"sequence","beta":0.1},"batch_size":3,"seq_len":11,)"
            R"("outputs":["entropy"],"mutants":true,"in_place":true})"},
           {std::string(kLinear) + "head_layout: hv\n",
            R"({"function":"linear_cross_entropy","options":{},"batch_size":2,"seq_len":20,"outputs":["logp","lse"],)"
            R"("mutants":false,"in_place":false,"gradients":["dhidden","dhead","dbias"],"head_layout":"hv"})"}}) {
    const TemporaryFolder folder;
    const auto path = folder.path() / "in.safetensors";
    const ProgramResult result =
        run_program({"judge", "--config", folder.write("c.yaml", text).string(), "--write-inputs", path.string()});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    std::ifstream file(path, std::ios::binary);
    uint64_t length = 0;
    file.read(reinterpret_cast<char*>(&length), sizeof length);
    std::string header(length, '\0');
    file.read(header.data(), static_cast<std::streamsize>(length));
    const Json metadata = Json::parse(header).at("__metadata__");
    Json described = Json::parse(metadata.at("case").get<std::string>());
    for (const char* set_by_the_preset : {"epsilon_low", "epsilon_high", "aggregation"})
      described["options"].erase(set_by_the_preset);
    EXPECT_EQ(described, Json::parse(expected));
  }
}

// Inputs to a file, a check of that file as its own case, its outputs to a file, and the judgement of those by the first config.
TEST(JudgeInputs, GoRoundTheKernelsAndBack) {
  const Outputs drawn(kCrossEntropy);
  const auto in = drawn.folder.path() / "in.safetensors";
  ASSERT_EQ(run_program({"judge", "--config", drawn.path.string(), "--write-inputs", in.string()}).exit_code, 0);
  const Outputs from_file("loss: cross_entropy\nsource: {kind: safetensors, path: " + in.string() +
                          "}\noutputs: [logp, entropy]\n");
  const ProgramResult result = drawn.judge(from_file.tensors());
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
}

TEST(JudgeErrors, NameTheTensorWhatWasExpectedAndWhatIsThere) {
  const Outputs outputs(kCrossEntropy), linear(kLinear), logprobs(kLogprobs);
  const std::vector<float> zeros(40000);
  const auto floats = [&](const char* name, std::vector<int64_t> shape, const char* dtype = "F32") {
    int64_t elements = 1;
    for (const int64_t size : shape) elements *= size;
    const int64_t bytes = std::string(dtype) == "F32" ? 4 : std::string(dtype) == "F64" || std::string(dtype) == "I64" ? 8 : 2;
    return Tensor{name, dtype, std::move(shape), zeros.data(), elements * bytes};
  };
  struct Error {
    const Outputs& of;
    Tensor tensor;
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
    const ProgramResult result = error.of.judge({error.tensor});
    EXPECT_EQ(result.exit_code, 2) << error.message << result.out;
    EXPECT_NE(result.err.find("f.safetensors: " + error.message), std::string::npos) << error.message << "\n" << result.err;
  }
  const ProgramResult none = outputs.judge({});
  EXPECT_EQ(none.exit_code, 2);
  EXPECT_NE(none.err.find("expected at least one output of cross_entropy: loss, logp"), std::string::npos) << none.err;
}

TEST(JudgeErrors, OfTheCommandLineTheConfigAndTheFile) {
  const Outputs outputs(kLinear);
  const std::string config = outputs.path.string();
  const ProgramResult neither = run_program({"judge", "--config", config});
  EXPECT_EQ(neither.exit_code, 2);
  EXPECT_NE(neither.err.find("--outputs"), std::string::npos) << neither.err;
  EXPECT_EQ(run_program({"judge", "--config", config, "--outputs", "a", "--write-inputs", "b"}).exit_code, 2);
  EXPECT_EQ(run_program({"judge", "--config", config, "--outputs", "/nonexistent"}).exit_code, 3);
  EXPECT_EQ(run_program({"judge", "--config", config, "--write-inputs", "/nonexistent/in.safetensors"}).exit_code, 3);
  const ProgramResult sum = outputs.judge(outputs.tensors(), {"accumulate=true"});
  EXPECT_EQ(sum.exit_code, 2);
  EXPECT_NE(sum.err.find("accumulate: expected false where outputs are judged, got true"), std::string::npos) << sum.err;
}

// Whatever the config says of the library's own kernels: this machine may not have them.
TEST(Judge, TheKernelsOfTheConfigHaveNoPart) {
  const Outputs outputs(kLinear);
  const ProgramResult result =
      outputs.judge(outputs.tensors(), {"head_layout=hv", "kernel.vocab_block=100", "mutants=true", "strict=true"});
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_EQ(result.out.find("mutants"), std::string::npos) << result.out;
}

// As gradcheck's own, whose kernels stand for something else here.
TEST(Judge, PlantsMutantsInTheOutputsAndCatchesThem) {
  for (const char* text : {kCrossEntropy, kLogprobs, kPolicy, kLinear}) {
    const Outputs outputs(text);
    const auto lines = outputs.folder.path() / "r.jsonl";
    const ProgramResult result = outputs.judge(outputs.tensors(), {"output=" + lines.string()}, {"--mutants"});
    EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
    EXPECT_NE(result.out.find("mutants"), std::string::npos) << result.out;
    EXPECT_EQ(result.out.find("NOT CAUGHT"), std::string::npos) << result.out;
    int64_t planted = 0;
    const Json line = read_results(lines).lines.at(0);
    for (const Json& mutant : line["mutants"]) {
      if (!mutant["planted"].get<bool>()) continue;
      ++planted;
      EXPECT_FALSE(mutant["caught_by"].empty()) << mutant.dump();
    }
    EXPECT_GE(planted, 5) << text;
  }
}

// The gradient decides what is planted and by which budget it is judged, whatever the logits are.
TEST(Judge, PlantsMutantsInAGradientOfAnotherType) {
  const Outputs outputs(kCrossEntropy);
  const std::vector<float> dlogits = float32_gradient(outputs);
  const ProgramResult result =
      outputs.judge({{"dlogits", "F32", {outputs.inputs.rows, outputs.inputs.cols}, dlogits.data(), std::ssize(dlogits) * 4}}, {},
                    {"--mutants"});
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
}

// A gate that fails already can catch nothing.
TEST(Judge, PlantsNoMutantsWhereGatesFailWithoutAny) {
  const Outputs outputs(kCrossEntropy);
  const std::vector<float> zeros(static_cast<size_t>(outputs.inputs.rows * outputs.inputs.cols));
  const ProgramResult result = outputs.judge(
      {{"dlogits", "F32", {outputs.inputs.rows, outputs.inputs.cols}, zeros.data(), std::ssize(zeros) * 4}}, {}, {"--mutants"});
  EXPECT_EQ(result.exit_code, 1) << result.out << result.err;
  EXPECT_NE(result.out.find("mutants: not judged"), std::string::npos) << result.out;
  EXPECT_EQ(result.out.find("mutant "), std::string::npos) << result.out;
}

TEST(Judge, MutantsNeedAGradient) {
  const Outputs outputs(kCrossEntropy);
  std::vector<Tensor> tensors = outputs.tensors();
  std::erase_if(tensors, [](const Tensor& tensor) { return tensor.name == "dlogits"; });
  const ProgramResult result = outputs.judge(tensors, {}, {"--mutants"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.err.find("--mutants: expected a gradient in "), std::string::npos) << result.err;
  EXPECT_EQ(run_program({"judge", "--config", outputs.path.string(), "--write-inputs", "x", "--mutants"}).exit_code, 2);
}

TEST(Judge, SaysWhoMadeTheOutputs) {
  const Outputs outputs(kCrossEntropy);
  const auto lines = outputs.folder.path() / "r.jsonl";
  const ProgramResult result =
      outputs.judge(outputs.tensors(), {"output=" + lines.string()}, {"--producer", "another library 2.1"});
  EXPECT_NE(result.out.find("f.safetensors, made by another library 2.1\n"), std::string::npos) << result.out;
  EXPECT_EQ(read_results(lines).lines.at(0)["producer"], "another library 2.1");
}

TEST(Judge, WritesAResultLine) {
  const Outputs outputs(kCrossEntropy);
  const auto lines = outputs.folder.path() / "r.jsonl";
  ASSERT_EQ(outputs.judge(outputs.tensors(), {"output=" + lines.string()}).exit_code, 0);
  const Json line = read_results(lines).lines.at(0);
  EXPECT_EQ(line["tool"], "judge");
  EXPECT_EQ(line["outputs"], (outputs.folder.path() / "f.safetensors").string());
  EXPECT_EQ(line["pass"], true);
  EXPECT_TRUE(line.contains("dlogits_max_abs"));
  for (const Json& gate : line["gates"]) EXPECT_TRUE(gate["pass"].get<bool>()) << gate.dump();
}

// tests/data/README.md says how PyTorch computed them.
TEST(Judge, OutputsOfPyTorchPass) {
  const ProgramResult result =
      run_program({"judge", "--config", TILELOSS_SOURCE_DIR "/configs/gradcheck_linear_safetensors.yaml", "--outputs",
                   TILELOSS_SOURCE_DIR "/tests/data/qwen2-tiny-hidden-outputs.safetensors"});
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  for (const char* gate : {"\nloss ", "\nlogp ", "\nlse ", "\ndhidden/cap ", "\ndhead/cap ", "\ndbias/cap "}) {
    EXPECT_NE(result.out.find(gate), std::string::npos) << gate << result.out;
  }
}

}  // namespace
}  // namespace tileloss::tools
