// The project's one random generator, and the logits and labels made from it.
//
// Counter based: the k-th number of a (seed, stream, row) is a hash of these four, so that any row can be made again, in any
// order, on any thread. The hash is SplitMix64 (Steele, Lea, Flood 2014): the row's key is mixed from seed, stream and row, the
// counter steps it by the golden ratio. A normal number is the sum of eight 16-bit uniforms (Irwin-Hall), scaled to variance 1:
// exact in integers, hence the same on every machine; within 4.9 sigma, excess kurtosis -0.15. Tests need no better tails.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "oracle/number_formats.h"

namespace tileloss::tools {

// Streams keep draws for different purposes apart.
enum class Stream : std::uint64_t {
  kLogits = 1,
  kLabels = 2,
  kWeights = 3,
  kUpstream = 4,
  kShapes = 5,
  kOptions = 6,
  kSequences = 7,
  kMask = 8,
  kAdvantages = 9,
  kPolicyLogp = 10
};

class Random {
 public:
  Random(std::uint64_t seed, Stream stream, std::int64_t row);

  // The k-th number, by counter ...
  std::uint64_t bits(std::uint64_t counter) const;
  double uniform(std::uint64_t counter) const;  // [0, 1), 53 bits
  double normal(std::uint64_t counter) const;   // uses counters 2k and 2k + 1 of bits()

  // ... or one after the other.
  std::uint64_t next_bits() { return bits(next_++); }
  double next_uniform() { return uniform(next_++); }
  double next_normal() { return normal((1ULL << 40) + next_++); }
  std::int64_t next_below(std::int64_t bound);  // [0, bound)

 private:
  std::uint64_t key_;
  std::uint64_t next_ = 0;
};

// value = offset + std * normal, or uniform in [-std, std]; then `spike` is added at `spike_column`, `label_boost` at the label.
struct LogitsSpec {
  enum class Spike { kNone, kFirst, kLast, kTileEdge };
  bool uniform = false;
  double std = 1.0;
  double offset = 0.0;
  Spike spike = Spike::kNone;
  double spike_height = 80.0;
  std::int64_t tile = 2048;  // kTileEdge: the last column of the last full tile, column 0 if there is none
  double label_boost = 0.0;
};

// Names: normal, uniform, narrow (std 0.01), wide (std 30), offset_plus and offset_minus (std 30 around +-1e4; steps of bfloat16
// there are 64 wide), spike_first, spike_last, spike_tile_edge (80 above a normal rest), confident (label 32 above a normal rest:
// p > 1 - 1e-6 up to 262144 columns). Nothing for an unknown name.
std::optional<LogitsSpec> find_distribution(std::string_view name);
std::span<const std::string_view> distribution_names();

// Row `row` in the format, rounded to nearest even. `label` may be -1 (no boost).
void fill_logits_row(const LogitsSpec& spec, std::uint64_t seed, std::int64_t row, std::int64_t label,
                     oracle::NumberFormat format, void* out, std::int64_t cols);

struct LabelsSpec {
  std::int64_t vocab = 1;
  double ignore_prob = 0.0;
  std::int64_t ignore_index = -100;
};
std::int64_t make_label(const LabelsSpec& spec, std::uint64_t seed, std::int64_t row);
std::vector<std::int64_t> make_labels(const LabelsSpec& spec, std::uint64_t seed, std::int64_t rows);

}  // namespace tileloss::tools
