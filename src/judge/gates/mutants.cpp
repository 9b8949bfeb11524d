#include "judge/gates/mutants.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <utility>

namespace tileloss::tools {
namespace {

using oracle::decode_at;
using oracle::encode_at;
using oracle::NumberFormat;

// A change that no check could tell from arithmetic within its budget is not counted as planted: less than 4 ULP in bfloat16 and
// float16, whose budget is 1; less than 512 ULP in float32, whose budget is 4 + |z - m|.
bool is_visible(NumberFormat format, double before, double after) {
  if (std::isnan(before) || std::isnan(after)) return std::isnan(before) != std::isnan(after);
  const oracle::FormatInfo& info = oracle::format_info(format);
  const double size = std::max(std::fabs(before), std::fabs(after));
  const double ulp = std::max(std::ldexp(size, -info.mantissa_bits), info.smallest_step);
  const double visible = format == NumberFormat::kFloat32 ? 512.0 : 4.0;
  return std::fabs(after - before) > visible * ulp;
}

// The same for row outputs and losses: their gate is 2^-18 relative; a transform blurs it to 2^-22 |z|.
bool is_visible_output(double before, double after, bool transformed) {
  if (!std::isfinite(before) || !std::isfinite(after)) return false;
  const double size = std::max(std::fabs(before), std::fabs(after));
  return std::fabs(after - before) > (transformed ? 0.02 : 0x1p-14) * size;
}

template <typename Function>
bool alter(MutantRow& row, std::int64_t begin, std::int64_t end, Function&& function) {
  if (row.dlogits == nullptr) return false;
  bool visible = false;
  for (std::int64_t j = begin; j < end; ++j) {
    const double before = decode_at(row.format, row.dlogits, j);
    encode_at(row.format, row.dlogits, j, function(j, before));
    visible |= is_visible(row.format, before, decode_at(row.format, row.dlogits, j));
  }
  return visible;
}

bool alter_loss(float* loss, double value, bool transformed) {
  const double before = *loss;
  *loss = static_cast<float>(value);
  return is_visible_output(before, *loss, transformed);
}

bool shift_output(std::optional<double>& output, double shift, bool transformed) {
  if (!output) return false;
  const double before = *output;
  output = static_cast<double>(static_cast<float>(before + shift));
  return is_visible_output(before, *output, transformed);
}

std::int64_t last_tile_begin(const MutantContext& context) {
  const std::int64_t tile = std::max<std::int64_t>(context.tile, 1);
  return (context.cols - 1) / tile * tile;
}

bool has_dlogits(const MutantContext& context) { return context.has_dlogits; }
bool has_off_target(const MutantContext& context) { return context.has_dlogits && context.cols > 1; }
bool has_loss(const MutantContext& context) { return context.has_loss; }

bool gradient_zero(const MutantContext& context, const MutantRowOracle&, MutantRow& row) {
  return alter(row, 0, context.cols, [](std::int64_t, double) { return 0.0; });
}

bool gradient_halved(const MutantContext& context, const MutantRowOracle&, MutantRow& row) {
  return alter(row, 0, context.cols, [](std::int64_t, double g) { return 0.5 * g; });
}

bool gradient_negated(const MutantContext& context, const MutantRowOracle&, MutantRow& row) {
  return alter(row, 0, context.cols, [](std::int64_t, double g) { return -g; });
}

bool off_target_zeroed(const MutantContext& context, const MutantRowOracle& oracle, MutantRow& row) {
  const std::int64_t target = oracle.softmax->label();
  return alter(row, 0, context.cols, [&](std::int64_t j, double g) { return j == target ? g : 0.0; });
}

// The target's column gets p_y's share only, as if [j = y] were never 1.
bool target_not_subtracted(const MutantContext&, const MutantRowOracle& oracle, MutantRow& row) {
  const std::int64_t target = oracle.softmax->label();
  const double term = oracle.gradient->dlogp * oracle.softmax->dz_dx(target);
  return alter(row, target, target + 1, [&](std::int64_t, double g) { return g - term; });
}

bool last_tile_dropped(const MutantContext& context, const MutantRowOracle&, MutantRow& row) {
  return alter(row, last_tile_begin(context), context.cols, [](std::int64_t, double) { return 0.0; });
}

constexpr std::int64_t kSmallestTile = 64;
bool has_largest_partial_tile(const MutantContext& context) {
  return context.has_dlogits && context.cols % kSmallestTile == kSmallestTile - 1;
}

bool partial_tile_skipped(const MutantContext& context, const MutantRowOracle&, MutantRow& row) {
  return alter(row, context.cols - (kSmallestTile - 1), context.cols, [](std::int64_t, double) { return 0.0; });
}

// R counts the last tile twice: every probability shrinks by S / (S + tail), logp falls and lse rises by its logarithm.
bool last_tile_twice(const MutantContext& context, const MutantRowOracle& oracle, MutantRow& row) {
  const oracle::SoftmaxRow& softmax = *oracle.softmax;
  const std::int64_t target = softmax.label();
  double tail = 0.0;
  for (std::int64_t j = last_tile_begin(context); j < context.cols; ++j) {
    if (j != target) tail += softmax.exps()[static_cast<std::size_t>(j)];
  }
  const double shrink = softmax.sum() / (softmax.sum() + tail);
  if (!(shrink < 1.0)) return false;
  const double one_hot = oracle.gradient->dlogp * softmax.dz_dx(target);
  const bool transformed = !softmax.transform().is_identity();
  bool visible = alter(row, 0, context.cols, [&](std::int64_t j, double g) {
    const double fixed = j == target ? one_hot : 0.0;
    return fixed + shrink * (g - fixed);
  });
  const double shift = std::log(shrink);
  visible |= shift_output(row.outputs[kLogp], shift, transformed);
  visible |= shift_output(row.outputs[kLse], -shift, transformed);
  if (row.loss != nullptr) {
    const double dlogp = oracle.loss_upstream != 0.0 ? oracle.gradient->dlogp / oracle.loss_upstream : 0.0;
    visible |= alter_loss(row.loss, *row.loss + dlogp * shift, transformed);
  }
  return visible;
}

bool has_nonuniform_upstream(const MutantContext& context) { return context.has_dlogits && context.nonuniform_upstream; }

// The kernel's gradient plus that of an upstream difference.
bool add_gradient(const MutantContext& context, const MutantRowOracle& oracle, const oracle::RowUpstream& difference,
                  MutantRow& row) {
  if (difference.logp == 0.0 && difference.lse == 0.0 && difference.entropy == 0.0) return false;
  oracle::GradientRow part;
  oracle::logprobs_gradient(*oracle.softmax, difference, part);
  return alter(row, 0, context.cols, [&](std::int64_t j, double g) { return g + part.gradient[static_cast<std::size_t>(j)]; });
}

bool first_row_upstream(const MutantContext& context, const MutantRowOracle& oracle, MutantRow& row) {
  if (oracle.loss_upstream != oracle.first_loss_upstream && oracle.loss_upstream != 0.0) {
    const double factor = oracle.first_loss_upstream / oracle.loss_upstream;
    return alter(row, 0, context.cols, [&](std::int64_t, double g) { return factor * g; });
  }
  const oracle::RowUpstream difference{
      oracle.first_upstream.logp - oracle.upstream.logp, oracle.first_upstream.lse - oracle.upstream.lse,
      oracle.first_upstream.entropy - oracle.upstream.entropy, oracle.first_upstream.mean - oracle.upstream.mean};
  return add_gradient(context, oracle, difference, row);
}

bool has_entropy_upstream(const MutantContext& context) { return context.has_dlogits && context.entropy_upstream; }

bool entropy_gradient_dropped(const MutantContext& context, const MutantRowOracle& oracle, MutantRow& row) {
  return add_gradient(context, oracle, {0.0, 0.0, -oracle.upstream.entropy}, row);
}

// The label's column, or the largest logit's, has a path of its own in a kernel: where they are one, the other's sign is taken.
bool entropy_sign_at_argmax(const MutantContext& context, const MutantRowOracle& oracle, MutantRow& row) {
  if (!oracle.softmax->outputs().correct) return false;
  return add_gradient(context, oracle, {0.0, 0.0, -2 * oracle.upstream.entropy}, row);
}

bool has_row_groups(const MutantContext& context) {
  return context.has_dlogits && context.group_rows > 0 && context.group_rows < context.rows;
}

// Each group but the first starts a row too late: its rows get the gradients of the rows before them.
bool row_group_off_by_one(const MutantContext& context, const MutantRowOracle&, MutantRow& row) {
  if (row.row < context.group_rows) return false;
  const void* before = context.kernel_dlogits(row.row - 1);
  return alter(row, 0, context.cols, [&](std::int64_t j, double) { return decode_at(row.format, before, j); });
}

bool has_agreement(const MutantContext& context) { return context.has_agreement; }

bool agreement_flipped(const MutantContext&, const MutantRowOracle&, MutantRow& row) {
  if (!row.outputs[kAgreement]) return false;
  row.outputs[kAgreement] = *row.outputs[kAgreement] == 0 ? 1 : 0;
  return true;
}

bool has_neighbour_logp(const MutantContext& context) {
  return context.has_logp && context.rows > 1 && context.kernel_logp.size() == static_cast<std::size_t>(context.rows);
}

bool logp_of_neighbour(const MutantContext& context, const MutantRowOracle& oracle, MutantRow& row) {
  const double other = context.kernel_logp[static_cast<std::size_t>((row.row + 1) % context.rows)];
  return shift_output(row.outputs[kLogp], other - row.outputs[kLogp].value_or(0), !oracle.softmax->transform().is_identity());
}

bool has_argmax(const MutantContext& context) { return context.has_argmax && context.cols > 1; }

bool argmax_off_by_one(const MutantContext& context, const MutantRowOracle&, MutantRow& row) {
  if (!row.outputs[kArgmax]) return false;
  row.outputs[kArgmax] = static_cast<double>((static_cast<std::int64_t>(*row.outputs[kArgmax]) + 1) % context.cols);
  return true;
}

constexpr std::array kMutants{
    Mutant{"gradient_zero", "dlogits are all 0", has_dlogits, gradient_zero},
    Mutant{"gradient_halved", "dlogits are half of what they are", has_dlogits, gradient_halved},
    Mutant{"gradient_negated", "dlogits have the wrong sign", has_dlogits, gradient_negated},
    Mutant{"off_target_zeroed", "only the target's column has a gradient", has_off_target, off_target_zeroed},
    Mutant{"target_not_subtracted", "the target's column misses its -1", has_dlogits, target_not_subtracted},
    Mutant{"last_tile_dropped", "the last vocabulary tile's dlogits are 0", has_dlogits, last_tile_dropped},
    Mutant{"partial_tile_skipped", "with V % 64 = 63 the last 63 columns' dlogits are 0", has_largest_partial_tile,
           partial_tile_skipped},
    Mutant{"last_tile_twice", "the sum of exponentials holds the last tile twice", has_off_target, last_tile_twice},
    Mutant{"first_row_upstream", "every row uses the first row's upstream gradient", has_nonuniform_upstream, first_row_upstream},
    Mutant{"entropy_gradient_dropped", "the upstream gradient of the entropy is not used", has_entropy_upstream,
           entropy_gradient_dropped},
    Mutant{"entropy_sign_at_argmax", "the entropy's gradient is negated where the label is the argmax", has_entropy_upstream,
           entropy_sign_at_argmax},
    Mutant{"row_group_off_by_one", "each group of rows but the first starts a row too late", has_row_groups,
           row_group_off_by_one},
    Mutant{"loss_halved", "the loss is half of what it is", has_loss, nullptr, [](double loss) { return 0.5 * loss; }},
    Mutant{"loss_shifted", "the loss is 5 % (of 1 at least) too large", has_loss, nullptr,
           [](double loss) { return loss + 0.05 * std::max(1.0, std::fabs(loss)); }},
    Mutant{"logp_of_neighbour", "a row gets the next row's logp", has_neighbour_logp, logp_of_neighbour},
    Mutant{"argmax_off_by_one", "argmax is one column too far", has_argmax, argmax_off_by_one},
    Mutant{"agreement_flipped", "agreement is the other of the two", has_agreement, agreement_flipped},
};

}  // namespace

std::span<const Mutant> all_mutants() { return kMutants; }

bool Mutant::apply_row(const MutantContext& context, const MutantRowOracle& oracle, MutantRow& row) const {
  if (change_row != nullptr) return change_row(context, oracle, row);
  return row.loss != nullptr && apply_loss(row.loss, !oracle.softmax->transform().is_identity());
}

bool Mutant::apply_loss(float* loss, bool transformed) const {
  return change_loss != nullptr && alter_loss(loss, change_loss(*loss), transformed);
}

bool plant_gradient(const WrongRow& difference, std::int64_t cols, MutantRow& row) {
  return alter(row, 0, cols, [&](std::int64_t j, double g) { return g + difference.gradient[static_cast<std::size_t>(j)]; });
}

// The gate of divergences and the like is 2^-18 relative, and 2^-22 of what cancels in them, some hundreds in wide rows.
bool plant_values(const WrongRow& difference, MutantRow& row) {
  constexpr double kVisible = 1e-3;
  bool visible = false;
  if (row.loss != nullptr && std::fabs(difference.loss) >= kVisible) {
    visible = alter_loss(row.loss, *row.loss + difference.loss, true);
  }
  for (std::size_t o = 0; o < kOutputCount; ++o) {
    const double shift = difference.outputs[o];
    if (std::fabs(shift) >= kVisible) visible |= shift_output(row.outputs[o], shift, true);
  }
  for (std::size_t k = 0; k < std::min(row.logps.size(), difference.logps.size()); ++k) {
    std::optional<double> logp = row.logps[k];
    if (std::fabs(difference.logps[k]) >= kVisible) visible |= shift_output(logp, difference.logps[k], true);
    row.logps[k] = *logp;
  }
  return visible;
}

}  // namespace tileloss::tools
