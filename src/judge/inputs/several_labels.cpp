// Several labels a row, as a gradcheck config says: drawn, or those of a file.
#include "judge/inputs/targets.h"

namespace tileloss::tools {
namespace {

// Keeps the draws apart from the weights.
constexpr uint64_t kSlotSeed = 0x736c6f7473ULL;
constexpr double kTwice = 0.125;  // the share of slots that have the label of the one before them

void read_keys(ConfigReader& reader, GradcheckConfig& config) {
  constexpr int64_t kMost = 1024;
  config.labels_per_row = reader.integer("labels_per_row", 1, 1, kMost);
}

// The label that each row has goes to some slot of it; the others hold any class, the label before them once more, or nothing.
void draw(const GradcheckConfig& config, ThreadTeam&, CheckInputs& inputs) {
  if (inputs.labels_per_row == 1 || config.source.is_file) return;
  const int64_t count = inputs.labels_per_row;
  for (int64_t row = 0; row < inputs.rows; ++row) {
    Random random(config.seed ^ kSlotSeed, Stream::kWeights, row);
    const int64_t own = random.next_below(count), label = inputs.labels[static_cast<size_t>(row)];
    for (int64_t k = 0; k < count; ++k) {
      const bool is_empty = random.next_uniform()<config.ignore_prob, is_twice = k> 0 && random.next_uniform() < kTwice;
      const int64_t any = random.next_below(inputs.valid), other = is_twice ? inputs.slots.back() : any;
      const bool is_ignored = label == inputs.ignore_index || (is_empty && k != own);
      inputs.slots.push_back(is_ignored ? inputs.ignore_index : k == own ? label : other);
    }
  }
}

}  // namespace

const OwnInputs kSeveralLabels{.read_keys = read_keys, .draw = draw};

}  // namespace tileloss::tools
