// Which wrong kernels of a teacher's losses the options leave room for.
#pragma once

#include <set>
#include <string>

namespace tileloss::tools {

// Of all the teacher's logits, or of some columns of it.
inline std::set<std::string> teacher_mutants(const std::string& divergence, bool of_columns) {
  std::set<std::string> names = {"square_forgotten", "base_2", "label_term_dropped", "label_temperature_ignored"};
  const bool has_mixture = divergence == "jsd" || divergence.starts_with("skew");
  if (divergence.ends_with("_kl")) names.insert("direction_swapped");
  if (has_mixture) names.insert("beta_swapped");
  if (of_columns) {
    names.insert({"neighbours_logprobs", "other_tail"});
    return names;
  }
  names.insert("teacher_temperature_ignored");
  if (has_mixture) names.insert("mixture_forgotten");
  if (divergence != "forward_kl") names.insert("mean_dropped");
  return names;
}

}  // namespace tileloss::tools
