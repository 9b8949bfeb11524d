#include "judge/inputs/allowed.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "support/format.h"

namespace tileloss::tools {
namespace {

using Kind = GradcheckConfig::Allowed::Kind;

// Keeps the draws apart from the weights.
constexpr uint64_t kAllowedSeed = 0x616c6c6f776564ULL;
constexpr int64_t kWordBits = 32;
// In the order of Kind.
constexpr std::array<std::string_view, 6> kKinds{"none", "all", "sparse", "half", "runs", "shared"};
constexpr std::string_view kLabelOutside = "label_outside";

using Set = std::vector<uint8_t>;

struct SpecialSet {
  std::string_view name;
  void (*make)(Set& set, size_t label);
};

constexpr std::array<SpecialSet, 4> kSpecialSets{{
    {"all", [](Set& set, size_t) { std::fill(set.begin(), set.end(), 1); }},
    {"one",
     [](Set& set, size_t label) {
       std::fill(set.begin(), set.end(), 0);
       set[label] = 1;
     }},
    {kLabelOutside, [](Set& set, size_t label) { set[label] = 0; }},
    {"empty", [](Set& set, size_t) { std::fill(set.begin(), set.end(), 0); }},
}};

// "" for an ordinary row.
std::string_view special_name(const GradcheckConfig& config, int64_t row) {
  const std::vector<std::string>& names = config.allowed.special_rows;
  const size_t turn = static_cast<size_t>(row) % (names.size() + 1);
  return turn == 0 ? std::string_view() : names[turn - 1];
}

void draw_runs(Random& random, Set& set) {
  bool is_in = random.next_uniform() < 0.5;
  for (size_t begin = 0; begin < set.size(); is_in = !is_in) {
    const int64_t longest = int64_t{1} << random.next_below(10);
    const size_t end = std::min(begin + 1 + static_cast<size_t>(random.next_below(longest)), set.size());
    std::fill(set.begin() + static_cast<std::ptrdiff_t>(begin), set.begin() + static_cast<std::ptrdiff_t>(end), is_in ? 1 : 0);
    begin = end;
  }
}

Set draw_set(Kind kind, Random& random, int64_t columns) {
  Set set(static_cast<size_t>(columns), kind == Kind::kAll ? 1 : 0);
  if (kind == Kind::kRuns) {
    draw_runs(random, set);
  } else if (kind == Kind::kSparse) {
    for (int64_t k = 0; k < columns / 50; ++k) set[static_cast<size_t>(random.next_below(columns))] = 1;
  } else if (kind != Kind::kAll) {
    for (uint8_t& bit : set) bit = random.next_uniform() < 0.5 ? 1 : 0;
  }
  return set;
}

void store(const Set& set, std::span<int32_t> words) {
  for (size_t j = 0; j < set.size(); ++j) {
    auto bits = static_cast<uint32_t>(words[j / kWordBits]);
    const uint32_t bit = uint32_t{1} << (j % kWordBits);
    bits = set[j] != 0 ? bits | bit : bits & ~bit;
    words[j / kWordBits] = static_cast<int32_t>(bits);
  }
}

size_t label_of(const CheckInputs& inputs, int64_t row) { return static_cast<size_t>(inputs.labels[static_cast<size_t>(row)]); }

// Of rows of columns: NaN and infinity by turns.
void poison(oracle::NumberFormat format, const Set& set, char* row) {
  for (size_t j = 0; j < set.size(); ++j) {
    if (set[j] != 0) continue;
    const double value = j % 2 == 0 ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
    oracle::encode_at(format, row, static_cast<int64_t>(j), value);
  }
}

}  // namespace

void read_allowed(ConfigReader& reader, GradcheckConfig& config) {
  GradcheckConfig::Allowed& out = config.allowed;
  if (!out.name.empty() && reader.has("allowed")) reader.fail("allowed", "the sets come from the file");
  const std::string kind = reader.choice("allowed", "none", {kKinds.begin(), kKinds.end()});
  out.kind = static_cast<Kind>(std::find(kKinds.begin(), kKinds.end(), kind) - kKinds.begin());
  std::vector<std::string> names;
  for (const SpecialSet& special : kSpecialSets) names.emplace_back(special.name);
  out.special_rows = reader.list("allowed_rows", {}, names);
  if (!out.special_rows.empty() && (out.kind == Kind::kNone || out.kind == Kind::kShared))
    reader.fail("allowed_rows", "expected allowed beside it, with a set for each row, got " + kind);
}

void lay_out_allowed(const GradcheckConfig& config, const InputRows* rows, CheckInputs& inputs) {
  const GradcheckConfig::Allowed& allowed = config.allowed;
  if (allowed.kind == Kind::kNone && allowed.name.empty()) return;
  AllowedSets& sets = inputs.allowed;
  sets.row_words = (inputs.cols + kWordBits - 1) / kWordBits;
  sets.is_shared = allowed.kind == Kind::kShared;
  if (!allowed.name.empty()) {
    const StoredTensor& tensor = rows->file.tensor(allowed.name);
    if (tensor.dtype != "I32") rows->file.refuse(tensor, formatted("expected I32, got {}", tensor.dtype));
    const int64_t stored = tensor.shape.empty() || tensor.shape.back() != sets.row_words ? 0 : tensor.elements() / sets.row_words;
    sets.is_shared = stored == 1;
    if (stored != 1 && stored < inputs.rows) {
      rows->file.refuse(tensor, formatted("expected {} words a row, 32 columns in each, and one row or at least {}, got {}",
                                          sets.row_words, inputs.rows, shape_text(tensor.shape)));
    }
  }
  sets.words.resize(static_cast<size_t>((sets.is_shared ? 1 : inputs.rows) * sets.row_words));
  if (!allowed.name.empty())
    rows->file.read(rows->file.tensor(allowed.name), 0, std::ssize(sets.words) * static_cast<int64_t>(sizeof(int32_t)),
                    sets.words.data());
}

void draw_allowed(const GradcheckConfig& config, CheckInputs& inputs) {
  const Kind kind = config.allowed.kind;
  if (kind == Kind::kNone) return;
  AllowedSets& sets = inputs.allowed;
  const auto row_words = static_cast<size_t>(sets.row_words);
  Random rest(config.seed ^ kAllowedSeed, Stream::kUpstream, 0);
  for (int32_t& word : sets.words) word = static_cast<int32_t>(rest.next_bits());
  Random shared(config.seed ^ kAllowedSeed, Stream::kWeights, 0);
  Set set = draw_set(kind, shared, inputs.valid);
  for (const int64_t row : inputs.used_rows()) {
    if (!sets.is_shared) {
      Random random(config.seed ^ kAllowedSeed, Stream::kWeights, row);
      set = draw_set(kind, random, inputs.valid);
    }
    set[label_of(inputs, row)] = 1;
    for (const SpecialSet& special : kSpecialSets) {
      if (special.name == special_name(config, row)) special.make(set, label_of(inputs, row));
    }
    store(set, std::span(sets.words).subspan(sets.is_shared ? 0 : static_cast<size_t>(row) * row_words, row_words));
  }
}

void clear_outside(const GradcheckConfig& config, ThreadTeam& team, CheckInputs& inputs) {
  if (inputs.allowed.words.empty() || config.source.is_file) return;
  TargetTensors& target = inputs.target;
  const bool has_probs = target.argument == &tileloss_args::target_probs;
  team.for_each(inputs.rows, [&](int64_t row, int) {
    if (inputs.is_ignored(row)) return;
    const Set set = inputs.allowed.of_row(row, inputs.valid);
    const bool is_poisoned = row % 4 == 3;
    if (is_poisoned && !inputs.linear) poison(inputs.format, set, inputs.row(row));
    if (is_poisoned && target.argument != nullptr && !has_probs) poison(target.format, set, inputs.target_row(row));
    if (!has_probs || special_name(config, row) == kLabelOutside) return;
    for (size_t j = 0; j < set.size(); ++j) {
      if (set[j] == 0) oracle::encode_at(target.format, inputs.target_row(row), static_cast<int64_t>(j), 0);
    }
  });
}

}  // namespace tileloss::tools
