#include "support/synthetic.h"

#include <array>
#include <bit>
#include <utility>

namespace tileloss::tools {
namespace {

using oracle::NumberFormat;

constexpr std::uint64_t kGoldenRatio = 0x9e3779b97f4a7c15ULL;

// SplitMix64's output function.
std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

std::uint64_t sum_of_quarters(std::uint64_t bits) {
  constexpr std::uint64_t kMask = 0x0000ffff0000ffffULL;
  const std::uint64_t pairs = (bits & kMask) + ((bits >> 16) & kMask);
  return (pairs & 0xffffffffULL) + (pairs >> 32);
}

// Eight uniforms on 0 ... 65535: mean 8 * 32767.5, variance 8 * (2^32 - 1) / 12.
constexpr double kSumMean = 8 * 32767.5;
constexpr double kInverseSumDeviation = 1.8688123650118534e-05;

double normal_from(std::uint64_t first, std::uint64_t second) {
  const auto sum = static_cast<double>(static_cast<std::int64_t>(sum_of_quarters(first) + sum_of_quarters(second)));
  return (sum - kSumMean) * kInverseSumDeviation;
}

double uniform_from(std::uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1p-53; }

// bfloat16 of a finite value by way of float32's bits: four times as fast as oracle::encode. The two roundings are of random
// numbers: only their distribution matters, and 2^-16 of them are affected by half a step.
std::uint16_t quick_bfloat16(double value) {
  const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(value));
  return static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

std::int64_t spike_column(const LogitsSpec& spec, std::int64_t cols) {
  switch (spec.spike) {
    case LogitsSpec::Spike::kFirst: return 0;
    case LogitsSpec::Spike::kLast: return cols - 1;
    case LogitsSpec::Spike::kTileEdge: return cols >= spec.tile ? cols / spec.tile * spec.tile - 1 : 0;
    case LogitsSpec::Spike::kNone: break;
  }
  return -1;
}

constexpr std::array<std::pair<std::string_view, LogitsSpec>, 10> kDistributions{{
    {"normal", LogitsSpec{}},
    {"uniform", LogitsSpec{.uniform = true}},
    {"narrow", LogitsSpec{.std = 0.01}},
    {"wide", LogitsSpec{.std = 30.0}},
    {"offset_plus", LogitsSpec{.std = 30.0, .offset = 1e4}},
    {"offset_minus", LogitsSpec{.std = 30.0, .offset = -1e4}},
    {"spike_first", LogitsSpec{.spike = LogitsSpec::Spike::kFirst}},
    {"spike_last", LogitsSpec{.spike = LogitsSpec::Spike::kLast}},
    {"spike_tile_edge", LogitsSpec{.spike = LogitsSpec::Spike::kTileEdge}},
    {"confident", LogitsSpec{.label_boost = 32.0}},
}};

constexpr auto kNames = [] {
  std::array<std::string_view, kDistributions.size()> names;
  for (std::size_t i = 0; i < names.size(); ++i) names[i] = kDistributions[i].first;
  return names;
}();

}  // namespace

Random::Random(std::uint64_t seed, Stream stream, std::int64_t row)
    : key_(mix(mix(mix(seed + kGoldenRatio) + static_cast<std::uint64_t>(stream)) + static_cast<std::uint64_t>(row))) {}

std::uint64_t Random::bits(std::uint64_t counter) const { return mix(key_ + (counter + 1) * kGoldenRatio); }

double Random::uniform(std::uint64_t counter) const { return uniform_from(bits(counter)); }

double Random::normal(std::uint64_t counter) const { return normal_from(bits(2 * counter), bits(2 * counter + 1)); }

std::int64_t Random::next_below(std::int64_t bound) {
  return static_cast<std::int64_t>(next_bits() % static_cast<std::uint64_t>(bound));
}

std::optional<LogitsSpec> find_distribution(std::string_view name) {
  for (const auto& [known, spec] : kDistributions) {
    if (known == name) return spec;
  }
  return std::nullopt;
}

std::span<const std::string_view> distribution_names() { return kNames; }

void fill_logits_row(const LogitsSpec& spec, std::uint64_t seed, std::int64_t row, std::int64_t label, NumberFormat format,
                     void* out, std::int64_t cols) {
  const Random random(seed, Stream::kLogits, row);
  const auto draw = [&](std::int64_t column) {
    const auto counter = static_cast<std::uint64_t>(column);
    const double unit = spec.uniform ? 2.0 * random.uniform(counter) - 1.0 : random.normal(counter);
    return spec.offset + spec.std * unit;
  };
  if (format == NumberFormat::kBfloat16) {
    auto* values = static_cast<std::uint16_t*>(out);
    for (std::int64_t j = 0; j < cols; ++j) values[j] = quick_bfloat16(draw(j));
  } else {
    for (std::int64_t j = 0; j < cols; ++j) oracle::encode_at(format, out, j, draw(j));
  }
  const auto raise = [&](std::int64_t column, double height) {
    if (column < 0 || column >= cols || height == 0.0) return;
    oracle::encode_at(format, out, column, oracle::decode_at(format, out, column) + height);
  };
  raise(spike_column(spec, cols), spec.spike_height);
  raise(label, spec.label_boost);
}

std::int64_t make_label(const LabelsSpec& spec, std::uint64_t seed, std::int64_t row) {
  Random random(seed, Stream::kLabels, row);
  if (random.next_uniform() < spec.ignore_prob) return spec.ignore_index;
  return random.next_below(spec.vocab);
}

std::vector<std::int64_t> make_labels(const LabelsSpec& spec, std::uint64_t seed, std::int64_t rows) {
  std::vector<std::int64_t> labels(static_cast<std::size_t>(rows));
  for (std::int64_t row = 0; row < rows; ++row) labels[static_cast<std::size_t>(row)] = make_label(spec, seed, row);
  return labels;
}

}  // namespace tileloss::tools
