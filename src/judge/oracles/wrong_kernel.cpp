#include "judge/oracles/wrong_kernel.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>

namespace tileloss::tools {
namespace {

constexpr double kNotGiven = std::numeric_limits<double>::quiet_NaN();

void set(WrongCall& call, std::initializer_list<const char*> options, double value) {
  for (const char* option : options) call.function.set_number(option, value);
}

double option(const WrongCall& call, const char* name) { return call.function.get(name, kNotGiven); }

std::string divergence_of(const WrongCall& call) { return call.function.get_choice("divergence", ""); }

bool has_mixture(const WrongCall& call) {
  const std::string name = divergence_of(call);
  return name == "jsd" || name == "skew_forward_kl" || name == "skew_reverse_kl";
}

bool is_by_row(WrongCall& call, bool can_tell) {
  call.is_by_row = true;
  return can_tell;
}

bool swap_direction(WrongCall& call) {
  constexpr std::array<std::pair<const char*, const char*>, 2> kPairs = {
      {{"forward_kl", "reverse_kl"}, {"skew_forward_kl", "skew_reverse_kl"}}};
  for (const auto& [forward, reverse] : kPairs) {
    const std::string name = divergence_of(call);
    if (name != forward && name != reverse) continue;
    call.function.set_choice("divergence", name == forward ? reverse : forward);
    return true;
  }
  return false;
}

bool swap_beta(WrongCall& call) {
  const double beta = option(call, "beta");
  set(call, {"beta"}, 1 - beta);
  return has_mixture(call) && beta != 0.5;
}

bool ignore_teacher_temperature(WrongCall& call) {
  const double given = option(call, "teacher_temperature");
  set(call, {"teacher_temperature"}, 1);
  return (std::isnan(given) ? option(call, "temperature") : given) != 1;
}

bool forget_square(WrongCall& call) {
  if (call.function.get_integer("scale_by_temperature_squared", 0) == 0 || option(call, "temperature") == 1) return false;
  call.function.set_integer("scale_by_temperature_squared", 0);
  return true;
}

bool count_ignored_rows(WrongCall& call) {
  std::vector<std::int64_t>& labels = call.tensors.labels;
  const std::int64_t ignored = call.function.get_integer("ignore_index", -100);
  const bool is_counted = call.function.get_choice("reduction", "") == "mean" && std::isnan(option(call, "num_items"));
  if (!is_counted || std::find(labels.begin(), labels.end(), ignored) == labels.end()) return false;
  std::fill(labels.begin(), labels.end(), ignored == 0 ? 1 : 0);
  return true;
}

bool ignore_label_temperature(WrongCall& call) {
  const double given = option(call, "label_temperature");
  call.function.reset("label_temperature");
  return option(call, "label_weight") != 0 && !std::isnan(given) && given != option(call, "temperature");
}

bool take_base_2(WrongCall& call) { return is_by_row(call, option(call, "divergence_weight") != 0); }
bool drop_label_term(WrongCall& call) { return is_by_row(call, option(call, "label_weight") != 0); }
// Of the forward KL's gradient, p - q, the mean is no term of its own.
bool drop_mean(WrongCall& call) {
  return is_by_row(call, option(call, "divergence_weight") != 0 && divergence_of(call) != "forward_kl");
}
bool forget_mixture(WrongCall& call) { return is_by_row(call, option(call, "divergence_weight") != 0 && has_mixture(call)); }

bool take_other_tail(WrongCall& call) {
  call.function.set_choice("tail", call.function.get_choice("tail", "") == "ignore" ? "lump" : "ignore");
  return option(call, "divergence_weight") != 0;
}

// Of the columns that are listed.
bool take_neighbours_logprobs(WrongCall& call) {
  call.change_target = [](GivenRow& given, std::vector<double>& target) {
    std::vector<std::size_t> listed;
    for (std::size_t k = 0; k < target.size(); ++k) {
      if (given.ids[k] >= 0) listed.push_back(k);
    }
    for (std::size_t k = 0; k < listed.size(); ++k) {
      target[listed[k]] = given.target.logits[listed[(k + 1) % listed.size()]];
    }
  };
  return option(call, "divergence_weight") != 0;
}

bool take_label(WrongCall& call) {
  call.change_target = [](GivenRow& given, std::vector<double>& target) {
    std::fill(target.begin(), target.end(), 0);
    target[static_cast<std::size_t>(given.label)] = 1;
  };
  return true;
}

bool forget_smoothing(WrongCall& call) {
  const bool can_tell = option(call, "label_smoothing") != 0;
  set(call, {"label_smoothing"}, 0);
  return can_tell;
}

bool forget_class_weights(WrongCall& call) { return !std::exchange(call.tensors.class_weights, {}).empty(); }

bool has_sets(const WrongCall& call) { return !call.tensors.allowed.words.empty(); }

bool ignore_allowed(WrongCall& call) {
  call.change_allowed = [](const WrongCall&, const GivenRow&) { return std::vector<std::uint8_t>(); };
  return has_sets(call);
}

bool shift_allowed(WrongCall& call) {
  call.change_allowed = [](const WrongCall&, const GivenRow& given) {
    std::vector<std::uint8_t> allowed(given.allowed.begin(), given.allowed.end());
    std::rotate(allowed.begin(), allowed.end() - 1, allowed.end());
    return allowed;
  };
  return has_sets(call);
}

bool take_neighbours_allowed(WrongCall& call) {
  call.change_allowed = [](const WrongCall& wrong, const GivenRow& given) {
    const std::int64_t next = (given.logits.row + 1) % std::ssize(wrong.tensors.labels);
    return wrong.tensors.allowed.of_row(next, std::ssize(given.allowed));
  };
  return has_sets(call) && !call.tensors.allowed.is_shared;
}

bool count_all_classes(WrongCall& call) { return is_by_row(call, has_sets(call)); }

constexpr std::int64_t kEmptySlot = -1;

bool changes_labels(WrongCall& call, void (*change)(std::span<std::int64_t> labels)) {
  call.change_labels = change;
  return call.tensors.labels_per_row > 1;
}

bool drop_slot(WrongCall& call) {
  return changes_labels(call, [](std::span<std::int64_t> labels) {
    const auto last = std::find_if(labels.rbegin(), labels.rend(), [](std::int64_t label) { return label != kEmptySlot; });
    if (last != labels.rend()) *last = kEmptySlot;
  });
}

bool swap_slots(WrongCall& call) {
  return changes_labels(call, [](std::span<std::int64_t> labels) { std::swap(labels[0], labels[1]); });
}

bool count_labels_once(WrongCall& call) {
  return changes_labels(call, [](std::span<std::int64_t> labels) {
    for (auto label = labels.begin(); label != labels.end(); ++label) {
      if (std::find(labels.begin(), label, *label) != label) *label = kEmptySlot;
    }
  });
}

bool fill_empty_slots(WrongCall& call) {
  return changes_labels(
      call, [](std::span<std::int64_t> labels) { std::replace(labels.begin(), labels.end(), kEmptySlot, int64_t{0}); });
}

bool take_first_slots_gradient(WrongCall& call) {
  const auto count = static_cast<std::size_t>(call.tensors.labels_per_row);
  std::vector<double>& gradients = call.tensors.logp_grad;
  for (std::size_t n = 0; n < gradients.size(); ++n) gradients[n] = gradients[n / count * count];
  return count > 1 && gradients.size() > 1;
}

constexpr std::array kLogprobs{
    WrongKernel{"slot_dropped", "a row's last label is taken for an empty slot", true, drop_slot},
    WrongKernel{"slots_swapped", "a row's first two labels have each other's place", true, swap_slots},
    WrongKernel{"duplicate_counted_once", "a label that is there twice counts once", false, count_labels_once},
    WrongKernel{"empty_slot_filled", "an empty slot is taken for the first class", true, fill_empty_slots},
    WrongKernel{"first_slots_gradient", "every label of a row has the upstream gradient of the first", false,
                take_first_slots_gradient},
};

bool add_low_rank_part(WrongCall& call, double times) {
  call.times_low_rank = times;
  return true;
}

constexpr std::array kLowRankParts{
    WrongKernel{"low_rank_left_out", "the logits are without the low-rank part", true,
                [](WrongCall& call) { return add_low_rank_part(call, -1); }},
    WrongKernel{"low_rank_doubled", "the logits have the low-rank part twice", true,
                [](WrongCall& call) { return add_low_rank_part(call, 1); }},
};

constexpr std::array kAllowedSets{
    WrongKernel{"allowed_ignored", "the softmax runs over all columns", true, ignore_allowed},
    WrongKernel{"allowed_shifted", "each column has the bit of the one before it", true, shift_allowed},
    WrongKernel{"allowed_of_neighbour", "a row has the next row's set", true, take_neighbours_allowed},
    WrongKernel{"classes_of_vocabulary", "smoothing and the mean logit are over the vocabulary's number of classes", true,
                count_all_classes},
};

constexpr WrongKernel kDirectionSwapped{"direction_swapped", "the KL is the other direction's", true, swap_direction};
constexpr WrongKernel kBetaSwapped{"beta_swapped", "1 - beta stands for beta", true, swap_beta};
constexpr WrongKernel kSquareForgotten{"square_forgotten", "the temperature's square is missing", true, forget_square};
constexpr WrongKernel kBase2{"base_2", "logarithms are to base 2", true, take_base_2};
constexpr WrongKernel kIgnoredRowsCounted{"ignored_rows_counted", "rows not in use count in the mean's denominator", false,
                                          count_ignored_rows};
constexpr WrongKernel kLabelTermDropped{"label_term_dropped", "cross-entropy's part is missing", true, drop_label_term};
constexpr WrongKernel kLabelTemperatureIgnored{"label_temperature_ignored", "cross-entropy is at the divergence's temperature",
                                               true, ignore_label_temperature};

constexpr std::array kDistillations{
    kDirectionSwapped,
    WrongKernel{"mean_dropped", "the gradient misses its term p sum p g", false, drop_mean},
    kBetaSwapped,
    WrongKernel{"teacher_temperature_ignored", "the teacher is at temperature 1", true, ignore_teacher_temperature},
    kSquareForgotten,
    kBase2,
    kIgnoredRowsCounted,
    kLabelTermDropped,
    WrongKernel{"mixture_forgotten", "the gradient misses the mixture's derivative by p", false, forget_mixture},
    kLabelTemperatureIgnored,
};

constexpr std::array kSparseDistillations{
    kDirectionSwapped,
    kBetaSwapped,
    kSquareForgotten,
    kBase2,
    kIgnoredRowsCounted,
    kLabelTermDropped,
    WrongKernel{"other_tail", "the tail is another", true, take_other_tail},
    WrongKernel{"neighbours_logprobs", "each column has the next one's log q", true, take_neighbours_logprobs},
    kLabelTemperatureIgnored,
};

constexpr std::array kSoftCrossEntropies{
    kIgnoredRowsCounted,
    WrongKernel{"smoothing_forgotten", "the probabilities are those given", true, forget_smoothing},
    WrongKernel{"sum_taken_as_one", "the gradient has p alone for p times the sum of c q", false,
                [](WrongCall& call) { return is_by_row(call, true); }},
    WrongKernel{"class_weights_forgotten", "every class weighs 1", true, forget_class_weights},
    WrongKernel{"label_for_probabilities", "the label's class alone counts", true, take_label},
};

constexpr std::array kPolicyLosses{
    WrongKernel{"clip_ignored", "clipped tokens keep their gradient", false,
                [](WrongCall& call) {
                  set(call, {"epsilon_low", "epsilon_high"}, 1e30);
                  set(call, {"delta", "dual_clip", "cap_low"}, kNotGiven);
                  return true;
                }},
    WrongKernel{"kl_gradient_dropped", "the KL has no gradient", false,
                [](WrongCall& call) {
                  set(call, {"beta"}, 0);
                  return true;
                }},
    WrongKernel{"ratio_of_token", "a token's own ratio stands for its sequence's", false,
                [](WrongCall& call) {
                  call.function.set_choice("ratio_level", "token");
                  return true;
                }},
    WrongKernel{"sampler_ignored", "the sampler ratio multiplies nothing", false,
                [](WrongCall& call) {
                  call.function.set_choice("sampler_correction", "off");
                  return true;
                }},
    WrongKernel{"masks_ignored", "tokens dropped by off-policy or entropy mask stay in", false,
                [](WrongCall& call) {
                  set(call, {"off_policy_threshold", "entropy_quantile", "entropy_threshold"}, kNotGiven);
                  return true;
                }},
};

}  // namespace

std::span<const WrongKernel> wrong_allowed_sets() { return kAllowedSets; }
std::span<const WrongKernel> wrong_low_rank_parts() { return kLowRankParts; }
std::span<const WrongKernel> wrong_logprobs() { return kLogprobs; }
std::span<const WrongKernel> wrong_policy_losses() { return kPolicyLosses; }
std::span<const WrongKernel> wrong_distillations() { return kDistillations; }
std::span<const WrongKernel> wrong_sparse_distillations() { return kSparseDistillations; }
std::span<const WrongKernel> wrong_soft_cross_entropies() { return kSoftCrossEntropies; }

WrongOracle::WrongOracle(const WrongKernel& kernel, MakeOracle make, WrongCall call)
    : kernel_(kernel), call_(std::move(call)), oracle_(call_.is_by_row ? nullptr : make(call_.function, call_.tensors)) {}

WrongRow WrongOracle::compare(const OracleRow& right) const {
  const OracleValues& values = right.values();
  WrongRow out;
  out.gradient.assign(values.gradient.gradient.size(), 0);
  if (oracle_ == nullptr) {
    right.set_wrong(kernel_.name, out);
  } else {
    GivenRow given = right.given();
    std::vector<double> target(given.target.logits.begin(), given.target.logits.end());
    if (call_.change_target != nullptr) {
      call_.change_target(given, target);
      given.target.logits = target;
    }
    std::vector<double> logits(given.logits.logits.begin(), given.logits.logits.end());
    if (call_.times_low_rank != 0) {
      for (std::size_t j = 0; j < logits.size(); ++j) logits[j] += call_.times_low_rank * given.logits.low_rank[j];
      given.logits.logits = logits;
    }
    std::vector<std::int64_t> labels(given.labels.begin(), given.labels.end());
    if (call_.change_labels != nullptr) {
      call_.change_labels(labels);
      given.labels = labels;
    }
    std::vector<std::uint8_t> allowed;
    if (call_.change_allowed != nullptr) given.allowed = allowed = call_.change_allowed(call_, given);
    const std::unique_ptr<OracleRow> row = oracle_->new_row();
    const OracleValues& other = row->compute(given);
    for (std::size_t j = 0; j < out.gradient.size(); ++j) {
      out.gradient[j] = other.gradient.gradient[j] - values.gradient.gradient[j];
    }
    out.loss = other.loss.total() - values.loss.total();
    for (std::size_t k = 0; k < values.logps.size(); ++k) out.logps.push_back(other.logps[k].value - values.logps[k].value);
    for (std::size_t o = 0; o < kOutputCount; ++o) {
      const RowOutput& output = checked_outputs()[o];
      if (!output.is_exact()) out.outputs[o] = output.expected(other.outputs) - output.expected(values.outputs);
    }
  }
  const auto clear = [](double& difference, double expected) { difference = std::isfinite(expected) ? difference : 0; };
  for (std::size_t j = 0; j < out.gradient.size(); ++j) clear(out.gradient[j], values.gradient.gradient[j]);
  for (std::size_t k = 0; k < out.logps.size(); ++k) clear(out.logps[k], values.logps[k].value);
  clear(out.loss, values.loss.total());
  for (std::size_t o = 0; o < kOutputCount; ++o) clear(out.outputs[o], checked_outputs()[o].expected(values.outputs));
  return out;
}

std::vector<WrongOracle> wrong_oracles(std::span<const WrongKernel> kernels, MakeOracle make, const Function& function,
                                       const OracleTensors& tensors) {
  std::vector<WrongOracle> oracles;
  for (const WrongKernel& kernel : kernels) {
    WrongCall call{function, tensors};
    if (kernel.change(call)) oracles.emplace_back(kernel, make, std::move(call));
  }
  return oracles;
}

}  // namespace tileloss::tools
