#include "check/gradcheck_sparse.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <string_view>

#include "check/gradcheck_oracle.h"
#include "support/oracle_options.h"
#include "support/signals.h"

namespace tileloss::tools {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
// Keeps the draws apart from the weights.
constexpr uint64_t kColumnsSeed = 0x636f6c756d6e73ULL;

struct Row {
  std::vector<double> logits, log_q;
  std::vector<int64_t> ids;
};

struct SpecialRow {
  std::string_view name;
  void (*make)(Row& row);
};

constexpr std::array<SpecialRow, 7> kSpecialRows{{
    {"no_columns", [](Row& row) { std::fill(row.ids.begin(), row.ids.end(), -1); }},
    {"gaps",
     [](Row& row) {
       for (size_t k = 0; k < row.ids.size(); k += 2) row.ids[k] = -1 - static_cast<int64_t>(k);
     }},
    {"doubled",  // a sum of 2, none above 1: nothing is left for the others
     [](Row& row) {
       double sum = 0;
       for (size_t k = 0; k < row.ids.size(); ++k) sum += row.ids[k] >= 0 ? std::exp(row.log_q[k]) : 0;
       for (double& value : row.log_q) value = std::fmin(value - std::log(sum / 2), 0);
     }},
    {"teacher_zero", [](Row& row) { row.log_q.back() = -kInfinity; }},
    {"student_zero",
     [](Row& row) {
       if (row.ids.back() >= 0) row.logits[static_cast<size_t>(row.ids.back())] = -kInfinity;
     }},
    {"teacher_nan", [](Row& row) { row.log_q.front() = std::numeric_limits<double>::quiet_NaN(); }},
    {"student_inf", [](Row& row) { row.logits[row.logits.size() / 2] = kInfinity; }},
}};

const SpecialRow* special_row(const GradcheckConfig& config, int64_t row) {
  const std::vector<std::string>& names = config.teacher.special_rows;
  const size_t turn = static_cast<size_t>(row) % (names.size() + 1);
  if (turn == 0) return nullptr;
  const auto found = std::find_if(kSpecialRows.begin(), kSpecialRows.end(),
                                  [&](const SpecialRow& special) { return special.name == names[turn - 1]; });
  return found == kSpecialRows.end() ? nullptr : &*found;
}

// Distinct columns in any order, the label often among them; normal scores, and a share of the mass for the others.
void draw_row(const GradcheckConfig& config, int64_t i, int64_t label, Row& row) {
  Random random(config.seed ^ kColumnsSeed, Stream::kWeights, i);
  std::vector<int64_t> columns(row.logits.size());
  std::iota(columns.begin(), columns.end(), int64_t{0});
  const auto count = std::min(row.ids.size(), columns.size());
  if (random.next_uniform() < 0.7) std::swap(columns[0], columns[static_cast<size_t>(label)]);
  for (size_t k = 1; k < count; ++k) {
    const int64_t left = std::ssize(columns) - static_cast<int64_t>(k);
    std::swap(columns[k], columns[k + static_cast<size_t>(random.next_below(left))]);
  }
  double sum = std::exp(random.next_normal());
  for (size_t k = 0; k < row.ids.size(); ++k) {
    row.ids[k] = k < count ? columns[k] : -1;
    row.log_q[k] = config.teacher.logits.std * random.next_normal();
    if (k < count) sum += std::exp(row.log_q[k]);
  }
  for (double& value : row.log_q) value -= std::log(sum);
}

}  // namespace

SparseOptions make_sparse_options(const Function& function) {
  const auto& from = *static_cast<const tileloss_sparse_distillation_options*>(function.options());
  return {make_oracle_options(from), static_cast<reference::Tail>(from.tail)};
}

std::vector<std::string> special_columns_names() {
  std::vector<std::string> names;
  for (const SpecialRow& special : kSpecialRows) names.emplace_back(special.name);
  return names;
}

void draw_columns(const GradcheckConfig& config, ThreadTeam& team, CheckInputs& inputs) {
  const auto count = static_cast<size_t>(inputs.teacher_columns);
  inputs.teacher_ids.assign(static_cast<size_t>(inputs.rows) * count, int64_t{1} << 40);
  inputs.teacher_logprobs.assign(static_cast<size_t>(inputs.rows) * count, kNan);
  team.for_each(inputs.rows, [&](int64_t i, int) {
    check_stop();
    if (inputs.is_ignored(i)) return;
    Row row;
    row.logits.resize(static_cast<size_t>(inputs.valid));
    row.ids.resize(count);
    row.log_q.resize(count);
    draw_row(config, i, inputs.labels[static_cast<size_t>(i)], row);
    if (const SpecialRow* special = special_row(config, i)) {
      char* const logits = inputs.logits.data() + inputs.row_offset(i);
      reference::decode_row(inputs.format, logits, row.logits);
      special->make(row);
      reference::encode_row(inputs.format, row.logits, logits);
    }
    const size_t first = static_cast<size_t>(i) * count;
    for (size_t k = 0; k < count; ++k) {
      inputs.teacher_ids[first + k] = row.ids[k];
      inputs.teacher_logprobs[first + k] = static_cast<float>(row.log_q[k]);
    }
  });
}

}  // namespace tileloss::tools
