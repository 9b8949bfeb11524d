// soft_cross_entropy's class probabilities, drawn.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "judge/inputs/targets.h"

namespace tileloss::tools {
namespace {

// Keeps the draws apart from the weights.
constexpr uint64_t kProbsSeed = 0x70726f6273ULL;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

double& middle(std::vector<double>& values) { return values[values.size() / 2]; }

void set_impossible(TargetRow& row, bool with_probs) {
  for (size_t j = 1; j < row.logits.size(); j += 3) {
    row.logits[j] = -kInfinity;
    row.target[j] = with_probs ? 0.25 : 0;
  }
}

constexpr std::array<SpecialRow, 9> kSpecialRows{{
    {"no_class", [](TargetRow& row) { std::fill(row.target.begin(), row.target.end(), 0.0); }},
    {"one_class",
     [](TargetRow& row) {
       std::fill(row.target.begin(), row.target.end(), 0.0);
       row.target[row.label] = 1;
     }},
    {"doubled",
     [](TargetRow& row) {
       for (double& q : row.target) q *= 2;
     }},
    {"negative", [](TargetRow& row) { middle(row.target) = -0.25; }},
    {"excluded", [](TargetRow& row) { set_impossible(row, false); }},
    {"impossible", [](TargetRow& row) { set_impossible(row, true); }},
    {"probs_nan", [](TargetRow& row) { middle(row.target) = std::numeric_limits<double>::quiet_NaN(); }},
    {"probs_inf", [](TargetRow& row) { middle(row.target) = kInfinity; }},
    {"logits_inf", [](TargetRow& row) { middle(row.logits) = kInfinity; }},
}};

void read_source(ConfigReader& source, GradcheckConfig& config) {
  config.probs.format = parse_dtype(source.choice("probs_dtype", "fp32", dtype_names()));
  config.probs.zeros = source.number("probs_zeros", config.probs.zeros, {0, 1, false, std::nullopt});
  read_special_rows(source, config, kSpecialRows, config.probs.special_rows);
}

void lay_out(const GradcheckConfig& config, const InputRows*, CheckInputs& inputs) {
  inputs.target.argument = &tileloss_args::target_probs;
  inputs.target.format = config.probs.format;
}

void draw(const GradcheckConfig& config, ThreadTeam& team, CheckInputs& inputs) {
  draw_target_rows(kSpecialRows, config.probs.special_rows, team, inputs, [&](int64_t i, TargetRow& row) {
    Random random(config.seed ^ kProbsSeed, Stream::kWeights, i);
    row.target.resize(row.logits.size());
    draw_probabilities(random, config.probs.zeros, row.target);
  });
}

}  // namespace

void draw_probabilities(Random& random, double zeros, std::vector<double>& probs) {
  double sum = 0;
  for (double& q : probs) sum += q = random.next_uniform() < zeros ? 0 : std::exp(2 * random.next_normal());
  for (double& q : probs) q = sum > 0 ? q / sum : 0;
}

const OwnInputs kProbabilityInputs{.read_source = read_source, .lay_out = lay_out, .draw = draw};

}  // namespace tileloss::tools
