// sparse_distillation's columns of a teacher, drawn.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "judge/inputs/targets.h"
#include "support/exit_codes.h"
#include "support/format.h"

namespace tileloss::tools {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Keeps the draws apart from the weights.
constexpr uint64_t kColumnsSeed = 0x636f6c756d6e73ULL;
constexpr int64_t kMaxColumns = int64_t{1} << 31;
constexpr int64_t kMaxElements = int64_t{1} << 50;

constexpr std::array<SpecialRow, 7> kSpecialRows{{
    {"no_columns", [](TargetRow& row) { std::fill(row.ids.begin(), row.ids.end(), -1); }},
    {"gaps",
     [](TargetRow& row) {
       for (size_t k = 0; k < row.ids.size(); k += 2) row.ids[k] = -1 - static_cast<int64_t>(k);
     }},
    {"doubled",  // a sum of 2, none above 1: nothing is left for the others
     [](TargetRow& row) {
       double sum = 0;
       for (size_t k = 0; k < row.ids.size(); ++k) sum += row.ids[k] >= 0 ? std::exp(row.target[k]) : 0;
       for (double& value : row.target) value = std::fmin(value - std::log(sum / 2), 0);
     }},
    {"teacher_zero", [](TargetRow& row) { row.target.back() = -kInfinity; }},
    {"student_zero",
     [](TargetRow& row) {
       if (row.ids.back() >= 0) row.logits[static_cast<size_t>(row.ids.back())] = -kInfinity;
     }},
    {"teacher_nan", [](TargetRow& row) { row.target.front() = std::numeric_limits<double>::quiet_NaN(); }},
    {"student_inf", [](TargetRow& row) { row.logits[row.logits.size() / 2] = kInfinity; }},
}};

void read_source(ConfigReader& source, GradcheckConfig& config) {
  config.teacher.columns = source.integer("teacher_columns", 8, 1, kMaxColumns);
  config.teacher.logits.std = source.number("teacher_std", 2, {0, 1e30, false, std::nullopt});
  read_special_rows(source, config, kSpecialRows, config.teacher.special_rows);
}

void lay_out(const GradcheckConfig& config, const InputRows*, CheckInputs& inputs) {
  const int64_t columns = config.teacher.columns;
  if (columns > kMaxElements / std::max<int64_t>(inputs.rows, 1)) {
    throw ToolError(kExitUsage,
                    formatted("source.teacher_columns: {} rows of {} are more than 2^50 elements", inputs.rows, columns));
  }
  inputs.target.columns = columns;
}

// In rows that are not in use ids that are no columns, and NaN.
void draw(const GradcheckConfig& config, ThreadTeam& team, CheckInputs& inputs) {
  const auto columns = static_cast<size_t>(inputs.target.columns), count = static_cast<size_t>(inputs.rows) * columns;
  inputs.target.ids.assign(count, int64_t{1} << 40);
  inputs.target.log_q.assign(count, std::numeric_limits<float>::quiet_NaN());
  draw_target_rows(kSpecialRows, config.teacher.special_rows, team, inputs, [&](int64_t i, TargetRow& row) {
    row.ids.resize(columns);
    row.target.resize(columns);
    Random random(config.seed ^ kColumnsSeed, Stream::kWeights, i);
    draw_columns(random, inputs.valid, config.teacher.logits.std, row);
  });
}

}  // namespace

void draw_columns(Random& random, int64_t columns, double std, TargetRow& row) {
  std::vector<int64_t> all(static_cast<size_t>(columns));
  std::iota(all.begin(), all.end(), int64_t{0});
  const auto count = std::min(row.ids.size(), all.size());
  if (row.label < all.size() && random.next_uniform() < 0.7) std::swap(all[0], all[row.label]);
  for (size_t k = 1; k < count; ++k) {
    const int64_t left = columns - static_cast<int64_t>(k);
    std::swap(all[k], all[k + static_cast<size_t>(random.next_below(left))]);
  }
  double sum = std::exp(random.next_normal());
  for (size_t k = 0; k < row.ids.size(); ++k) {
    row.ids[k] = k < count ? all[k] : -1;
    row.target[k] = std * random.next_normal();
    if (k < count) sum += std::exp(row.target[k]);
  }
  for (double& value : row.target) value -= std::log(sum);
}

const OwnInputs kColumnInputs{.read_source = read_source, .lay_out = lay_out, .draw = draw};

}  // namespace tileloss::tools
