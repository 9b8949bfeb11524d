// distillation's teacher: logits, drawn or from a file, or an LM head, drawn.
#include <array>
#include <limits>

#include "judge/inputs/linear.h"
#include "judge/inputs/targets.h"
#include "support/format.h"

namespace tileloss::tools {
namespace {

using Kind = GradcheckConfig::Teacher::Kind;

// Keeps the draws apart from the student's.
constexpr uint64_t kTeacherSeed = 0x7465616368ULL;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
// p > 1 - 1e-6 above normal logits of up to 262144 columns, as the distribution `confident`.
constexpr double kSure = 32;
constexpr int64_t kMaxWidth = int64_t{1} << 31;

void set_zeros(std::vector<double>& logits, size_t label) {
  for (size_t j = 1; j < logits.size(); j += 3) {
    if (j != label) logits[j] = -kInfinity;
  }
}

constexpr std::array<SpecialRow, 8> kSpecialRows{{
    {"same", [](TargetRow& row) { row.target = row.logits; }},
    {"confident",
     [](TargetRow& row) {
       row.logits[row.label] += kSure;
       row.target[row.label] += kSure;
     }},
    {"opposite",
     [](TargetRow& row) {
       row.logits[row.label] += kSure;
       row.target[(row.label + row.target.size() / 2) % row.target.size()] += kSure;
     }},
    {"teacher_zeros", [](TargetRow& row) { set_zeros(row.target, row.label); }},
    {"student_zeros", [](TargetRow& row) { set_zeros(row.logits, row.label); }},
    {"both_zeros",
     [](TargetRow& row) {
       set_zeros(row.logits, row.label);
       set_zeros(row.target, row.label);
     }},
    {"teacher_nan", [](TargetRow& row) { row.target[row.target.size() / 2] = std::numeric_limits<double>::quiet_NaN(); }},
    {"student_inf", [](TargetRow& row) { row.logits[row.logits.size() / 2] = kInfinity; }},
}};

// ------------------------------------------------------------------------------------------------------------------- keys

void read_stored(ConfigReader& source, GradcheckConfig& config) {
  GradcheckConfig::Teacher& out = config.teacher;
  out.name = source.text("teacher", "");
  if (out.name.empty()) {
    if (source.has("teacher_path")) source.fail("teacher_path", "expected source.teacher beside it, the tensor's name, got none");
    return;
  }
  out.kind = Kind::kStored;
  out.path = source.path("teacher_path", config.source.path);
}

void read_drawn(ConfigReader& source, GradcheckConfig& config) {
  GradcheckConfig::Teacher& out = config.teacher;
  std::vector<std::string> names = {"near", "same"};
  names.insert(names.end(), distribution_names().begin(), distribution_names().end());
  const std::string name = source.choice("teacher", "near", names);
  if (name == "same") out.kind = Kind::kSame;
  if (const auto drawn = find_distribution(name)) {
    out.kind = Kind::kDrawn;
    out.logits = *drawn;
  }
  read_special_rows(source, config, kSpecialRows, out.special_rows);
}

void read_head(ConfigReader& source, GradcheckConfig& config) {
  GradcheckConfig::Teacher& out = config.teacher;
  if (config.source.is_file) {
    source.fail("kind",
                formatted("expected synthetic for {}, whose teacher's head is drawn, got safetensors", config.function.name()));
  }
  out.kind = Kind::kDrawn;
  out.logits.std = source.number("teacher_std", config.source.logits.std, {0, 1e30, false, std::nullopt});
}

void read_source(ConfigReader& source, GradcheckConfig& config) {
  if (config.is_linear()) return read_head(source, config);
  config.source.is_file ? read_stored(source, config) : read_drawn(source, config);
  if (config.teacher.kind == Kind::kNear) {
    config.teacher.noise = source.number("teacher_noise", config.teacher.noise, {0, 1e30, false, std::nullopt});
  } else if (source.has("teacher_noise")) {
    source.fail("teacher_noise", "only where the teacher is near the student");
  }
}

void read_keys(ConfigReader& reader, GradcheckConfig& config) {
  GradcheckConfig::Linear& linear = config.linear;
  if (config.is_linear()) linear.teacher_hidden_size = reader.integer("teacher_hidden_size", linear.hidden_size, 1, kMaxWidth);
}

// ----------------------------------------------------------------------------------------------------------------- tensors

void lay_out(const GradcheckConfig& config, const InputRows*, CheckInputs& inputs) {
  if (config.is_linear()) {
    inputs.target.linear = make_linear(config, config.linear.teacher_hidden_size, inputs);
  } else {
    inputs.target.argument = &tileloss_args::teacher_logits;
    inputs.target.format = inputs.format;
  }
}

void load(const GradcheckConfig& config, CheckInputs& inputs) {
  const TensorFile& file = config.file_at(config.teacher.path);
  const StoredTensor& tensor = file.tensor(config.teacher.name);
  const char* dtype = oracle::format_info(inputs.format).name;
  if (number_format(file, tensor) != inputs.format) {
    file.refuse(tensor, formatted("expected the student's dtype, {}, got {}", dtype, tensor.dtype));
  }
  const bool is_matrix = tensor.shape.size() >= 2 && tensor.shape.back() == inputs.cols;
  if (!is_matrix || tensor.elements() / inputs.cols < inputs.rows) {
    file.refuse(tensor, formatted("expected {} columns, as the student has, and at least {} rows, got {}", inputs.cols,
                                  inputs.rows, shape_text(tensor.shape)));
  }
  read_logits(file, tensor, inputs, inputs.target.matrix);
}

void draw(const GradcheckConfig& config, ThreadTeam& team, CheckInputs& inputs) {
  const GradcheckConfig::Teacher& teacher = config.teacher;
  const uint64_t seed = config.seed ^ kTeacherSeed;
  if (inputs.target.linear) return draw_linear(teacher.logits.std, seed, team, *inputs.target.linear);
  if (teacher.kind == Kind::kStored) return load(config, inputs);
  draw_target_rows(kSpecialRows, teacher.special_rows, team, inputs, [&](int64_t i, TargetRow& row) {
    row.target = row.logits;
    const Random random(seed, Stream::kLogits, i);
    for (size_t j = 0; teacher.kind == Kind::kNear && j < row.target.size(); ++j) {
      row.target[j] += teacher.noise * random.normal(j);
    }
    char* const stored = inputs.target_row(i);
    oracle::encode_row(inputs.format, row.target, stored);
    if (teacher.kind == Kind::kDrawn) {
      fill_logits_row(teacher.logits, seed, i, static_cast<int64_t>(row.label), inputs.format, stored, inputs.cols);
    }
    oracle::decode_row(inputs.format, stored, row.target);
  });
}

}  // namespace

const OwnInputs kTeacherInputs{.read_source = read_source, .read_keys = read_keys, .lay_out = lay_out, .draw = draw};

}  // namespace tileloss::tools
