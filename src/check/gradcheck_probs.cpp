#include "check/gradcheck_probs.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string_view>

#include "check/gradcheck_oracle.h"
#include "support/oracle_options.h"
#include "support/signals.h"

namespace tileloss::tools {
namespace {

// Keeps the draws apart from the weights.
constexpr uint64_t kProbsSeed = 0x70726f6273ULL;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Row {
  std::vector<double> logits, probs;
  size_t label = 0;
  size_t middle() const { return probs.size() / 2; }
};

void set_impossible(Row& row, bool with_probs) {
  for (size_t j = 1; j < row.logits.size(); j += 3) {
    row.logits[j] = -kInfinity;
    row.probs[j] = with_probs ? 0.25 : 0;
  }
}

struct SpecialRow {
  std::string_view name;
  void (*make)(Row& row);
};

constexpr std::array<SpecialRow, 9> kSpecialRows{{
    {"no_class", [](Row& row) { std::fill(row.probs.begin(), row.probs.end(), 0.0); }},
    {"one_class",
     [](Row& row) {
       std::fill(row.probs.begin(), row.probs.end(), 0.0);
       row.probs[row.label] = 1;
     }},
    {"doubled",
     [](Row& row) {
       for (double& q : row.probs) q *= 2;
     }},
    {"negative", [](Row& row) { row.probs[row.middle()] = -0.25; }},
    {"excluded", [](Row& row) { set_impossible(row, false); }},
    {"impossible", [](Row& row) { set_impossible(row, true); }},
    {"probs_nan", [](Row& row) { row.probs[row.middle()] = std::numeric_limits<double>::quiet_NaN(); }},
    {"probs_inf", [](Row& row) { row.probs[row.middle()] = kInfinity; }},
    {"logits_inf", [](Row& row) { row.logits[row.middle()] = kInfinity; }},
}};

const SpecialRow* special_row(const GradcheckConfig& config, int64_t row) {
  const std::vector<std::string>& names = config.probs.special_rows;
  const size_t turn = static_cast<size_t>(row) % (names.size() + 1);
  if (turn == 0) return nullptr;
  const auto found = std::find_if(kSpecialRows.begin(), kSpecialRows.end(),
                                  [&](const SpecialRow& special) { return special.name == names[turn - 1]; });
  return found == kSpecialRows.end() ? nullptr : &*found;
}

// Weights e^(2 x), some of them 0, divided by their sum.
void draw_row(const GradcheckConfig& config, int64_t row, std::vector<double>& probs) {
  Random random(config.seed ^ kProbsSeed, Stream::kWeights, row);
  double sum = 0;
  for (double& q : probs) {
    q = random.next_uniform() < config.probs.zeros ? 0 : std::exp(2 * random.next_normal());
    sum += q;
  }
  for (double& q : probs) q = sum > 0 ? q / sum : 0;
}

}  // namespace

SoftLabelsOptions make_soft_labels_options(const GradcheckConfig& config, const CheckInputs& inputs) {
  const auto& from = *static_cast<const tileloss_soft_cross_entropy_options*>(config.function.options());
  SoftLabelsOptions to;
  to.label_smoothing = from.label_smoothing;
  to.class_weights.assign(inputs.class_weights.begin(), inputs.class_weights.end());
  to.rows = make_oracle_options(from);
  return to;
}

std::vector<std::string> special_probs_names() {
  std::vector<std::string> names;
  for (const SpecialRow& special : kSpecialRows) names.emplace_back(special.name);
  return names;
}

void draw_probs(const GradcheckConfig& config, ThreadTeam& team, CheckInputs& inputs) {
  team.for_each(inputs.rows, [&](int64_t i, int) {
    check_stop();
    if (inputs.is_ignored(i)) return;
    Row row;
    row.label = static_cast<size_t>(inputs.labels[static_cast<size_t>(i)]);
    row.probs.resize(static_cast<size_t>(inputs.valid));
    draw_row(config, i, row.probs);
    if (const SpecialRow* special = special_row(config, i)) {
      char* const logits = inputs.logits.data() + inputs.row_offset(i);
      row.logits.resize(row.probs.size());
      reference::decode_row(inputs.format, logits, row.logits);
      special->make(row);
      reference::encode_row(inputs.format, row.logits, logits);
    }
    reference::encode_row(inputs.probs_format, row.probs, inputs.probs.data() + inputs.row_offset(i, inputs.probs_format));
  });
}

}  // namespace tileloss::tools
