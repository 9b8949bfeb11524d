#include "check/gradcheck_teacher.h"

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <string_view>

#include "check/gradcheck_oracle.h"
#include "check/gradcheck_policy.h"
#include "support/exit_codes.h"
#include "support/format.h"
#include "support/signals.h"

namespace tileloss::tools {
namespace {

using Kind = GradcheckConfig::Teacher::Kind;

// Keeps the draws apart from the student's.
constexpr uint64_t kTeacherSeed = 0x7465616368ULL;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
// p > 1 - 1e-6 above normal logits of up to 262144 columns, as the distribution `confident`.
constexpr double kSure = 32;

// ----------------------------------------------------------------------------------------------------------- special rows

struct LogitsPair {
  std::vector<double> student, teacher;
  size_t label = 0;
};

void set_zeros(std::vector<double>& logits, size_t label) {
  for (size_t j = 1; j < logits.size(); j += 3) {
    if (j != label) logits[j] = -kInfinity;
  }
}

struct SpecialRow {
  std::string_view name;
  void (*make)(LogitsPair& pair);
};

constexpr std::array<SpecialRow, 8> kSpecialRows{{
    {"same", [](LogitsPair& pair) { pair.teacher = pair.student; }},
    {"confident",
     [](LogitsPair& pair) {
       pair.student[pair.label] += kSure;
       pair.teacher[pair.label] += kSure;
     }},
    {"opposite",
     [](LogitsPair& pair) {
       pair.student[pair.label] += kSure;
       pair.teacher[(pair.label + pair.teacher.size() / 2) % pair.teacher.size()] += kSure;
     }},
    {"teacher_zeros", [](LogitsPair& pair) { set_zeros(pair.teacher, pair.label); }},
    {"student_zeros", [](LogitsPair& pair) { set_zeros(pair.student, pair.label); }},
    {"both_zeros",
     [](LogitsPair& pair) {
       set_zeros(pair.student, pair.label);
       set_zeros(pair.teacher, pair.label);
     }},
    {"teacher_nan", [](LogitsPair& pair) { pair.teacher[pair.teacher.size() / 2] = std::numeric_limits<double>::quiet_NaN(); }},
    {"student_inf", [](LogitsPair& pair) { pair.student[pair.student.size() / 2] = kInfinity; }},
}};

const SpecialRow* special_row(const GradcheckConfig& config, int64_t row) {
  const std::vector<std::string>& names = config.teacher.special_rows;
  const size_t turn = static_cast<size_t>(row) % (names.size() + 1);
  if (turn == 0) return nullptr;
  for (const SpecialRow& special : kSpecialRows) {
    if (special.name == names[turn - 1]) return &special;
  }
  return nullptr;
}

void make_special(const SpecialRow& special, int64_t label, const CheckInputs& inputs, char* student, char* teacher) {
  LogitsPair pair;
  pair.student.resize(static_cast<size_t>(inputs.valid));
  pair.teacher.resize(static_cast<size_t>(inputs.valid));
  pair.label = static_cast<size_t>(label);
  reference::decode_row(inputs.format, student, pair.student);
  reference::decode_row(inputs.format, teacher, pair.teacher);
  special.make(pair);
  reference::encode_row(inputs.format, pair.student, student);
  reference::encode_row(inputs.format, pair.teacher, teacher);
}

// ------------------------------------------------------------------------------------------------------------------- draws

void draw_row(const GradcheckConfig& config, const CheckInputs& inputs, int64_t row) {
  const GradcheckConfig::Teacher& teacher = config.teacher;
  char* const out = inputs.teacher.data() + inputs.row_offset(row);
  if (teacher.kind == Kind::kDrawn) {
    fill_logits_row(teacher.logits, config.seed ^ kTeacherSeed, row, inputs.labels[static_cast<size_t>(row)], inputs.format, out,
                    inputs.cols);
    return;
  }
  std::memcpy(out, inputs.row(row), static_cast<size_t>(inputs.row_bytes()));
  if (teacher.kind == Kind::kSame) return;
  const Random random(config.seed ^ kTeacherSeed, Stream::kLogits, row);
  for (int64_t j = 0; j < inputs.valid; ++j) {
    const double noise = teacher.noise * random.normal(static_cast<uint64_t>(j));
    reference::encode_at(inputs.format, out, j, reference::decode_at(inputs.format, out, j) + noise);
  }
}

}  // namespace

std::vector<std::string> special_row_names() {
  std::vector<std::string> names;
  for (const SpecialRow& special : kSpecialRows) names.emplace_back(special.name);
  return names;
}

void draw_teacher(const GradcheckConfig& config, ThreadTeam& team, CheckInputs& inputs) {
  team.for_each(inputs.rows, [&](int64_t row, int) {
    check_stop();
    if (inputs.is_ignored(row)) return;
    draw_row(config, inputs, row);
    if (const SpecialRow* special = special_row(config, row)) {
      const int64_t offset = inputs.row_offset(row);
      make_special(*special, inputs.labels[static_cast<size_t>(row)], inputs, inputs.logits.data() + offset,
                   inputs.teacher.data() + offset);
    }
  });
}

HugeBuffer read_logits(const SafetensorsFile& file, const StoredTensor& tensor, const CheckInputs& inputs) {
  HugeBuffer buffer(inputs.matrix_bytes(), "logits");
  const int64_t rows_at_once = inputs.group_rows > 0 ? inputs.group_rows : inputs.rows;
  for (int64_t row = 0; row < inputs.rows; row += rows_at_once) {
    file.read(tensor, row * inputs.row_bytes(), rows_at_once * inputs.row_bytes(), buffer.data() + inputs.row_offset(row));
  }
  return buffer;
}

void load_teacher(const GradcheckConfig& config, ThreadTeam& team, CheckInputs& inputs) {
  if (config.teacher.kind != Kind::kStored) {
    inputs.teacher = HugeBuffer(inputs.matrix_bytes(), "teacher_logits");
    draw_teacher(config, team, inputs);
    return;
  }
  const SafetensorsFile file(config.teacher.path);
  const StoredTensor& tensor = file.tensor(config.teacher.name);
  const char* dtype = reference::format_info(inputs.format).name;
  if (number_format(file, tensor) != inputs.format) {
    file.refuse(tensor, formatted("expected the student's dtype, {}, got {}", dtype, tensor.dtype));
  }
  const bool is_matrix = tensor.shape.size() >= 2 && tensor.shape.back() == inputs.cols;
  if (!is_matrix || tensor.elements() / inputs.cols < inputs.rows) {
    file.refuse(tensor, formatted("expected {} columns, as the student has, and at least {} rows, got {}", inputs.cols,
                                  inputs.rows, shape_text(tensor.shape)));
  }
  inputs.teacher = read_logits(file, tensor, inputs);
}

void load_mask(const GradcheckConfig& config, const SafetensorsFile& file, const StoredTensor& logits, CheckInputs& inputs) {
  const std::string& name = config.source.mask_name;
  inputs.policy.mask = name.empty() ? draw_mask(config.seed, inputs.rows, config.policy.mask_prob)
                                    : read_mask(file, file.row_tensor(name, logits), inputs.rows);
}

}  // namespace tileloss::tools
