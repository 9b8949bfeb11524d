#include "backends/problem.h"

#include <cmath>

namespace tileloss::impl {

std::string shape(std::int64_t rows, std::int64_t cols) {
  std::string text = "[";
  text += std::to_string(rows) + "," + std::to_string(cols) + "]";
  return text;
}

PairStates pair_states(const Problem& p) { return {p.row_state, p.teacher_state, p.label_state, p.pair_state}; }

LossContext make_context(const Problem& p) {
  const tileloss_args& a = p.args;
  LossContext c;
  c.options = p.options.data();
  c.rows = p.rows;
  c.classes = p.classes;
  c.temperature = p.logit.temperature;
  c.temperature_on_logprob = p.logit.temperature_on == TILELOSS_TEMPERATURE_ON_LOGPROB;
  c.labels = Labels(a.labels, p.logit.ignore_index, a.mask, a.labels_per_row);
  c.token_weights = RowInput(a.token_weights, 1);
  c.class_weights = RowInput(a.class_weights, 1);
  c.loss_grad = RowInput(a.loss_grad, 1);
  c.logp_grad = RowInput(a.logp_grad, 0);
  c.lse_grad = RowInput(a.lse_grad, 0);
  c.entropy_grad = RowInput(a.entropy_grad, 0);
  c.mean_logit_grad = RowInput(a.mean_logit_grad, 0);
  c.target_coef = RowInput(a.target_coef, 0);
  c.prob_plus_target_coef = RowInput(a.prob_plus_target_coef, 0);
  c.prob_logp_coef = RowInput(a.prob_logp_coef, 0);
  c.uniform_coef = RowInput(a.uniform_coef, 0);
  c.old_logp = RowInput(a.old_logp, 0);
  c.ref_logp = RowInput(a.ref_logp, 0);
  c.sampler_logp = RowInput(a.sampler_logp, 0);
  c.advantages = RowInput(a.advantages, 0);
  c.sequences = Sequences(a.sequence_offsets, a.sequence_length, p.rows);
  if (p.pass != TILELOSS_BACKWARD) c.metrics = a.metrics;
  return c;
}

LogitTransform make_transform(const Problem& p) {
  const bool on_logprob = p.logit.temperature_on == TILELOSS_TEMPERATURE_ON_LOGPROB;
  return LogitTransform::make(p.logit.logit_scale, p.logit.softcap, on_logprob ? 1.0 : scalar_value(p.logit.temperature));
}

LogitTransform make_teacher_transform(const Problem& p) {
  const TeacherOptions teacher = p.loss->info.teacher_options(p.options.data());
  const double temperature = scalar_value(teacher.temperature);  // NaN behind a pointer: not given either
  return LogitTransform::make(teacher.logit_scale, teacher.softcap,
                              std::isnan(temperature) ? scalar_value(p.logit.temperature) : temperature);
}

std::optional<LogitTransform> make_label_transform(const Problem& p) {
  if (p.loss->info.label_temperature == nullptr) return std::nullopt;
  const double temperature = scalar_value(p.loss->info.label_temperature(p.options.data()));
  if (std::isnan(temperature) || temperature == scalar_value(p.logit.temperature)) return std::nullopt;
  return LogitTransform::make(p.logit.logit_scale, p.logit.softcap, temperature);
}

namespace {

constexpr double kLargest = 0x1p126;  // leaves room for what the sweeps multiply it by, 2 log2(e)

Status check_quotient(const char* a_name, double a, const char* b_name, double b, double largest = kLargest) {
  const double quotient = a / b;
  if (quotient >= 0x1p-126 && quotient <= largest) return {};
  return expected(b == 1 ? a_name : b_name,
                  std::string(a_name) + " / " + b_name + " from 1.18e-38 to " + (largest == kLargest ? "8.5e+37" : "1.7e+07") +
                      ", for float32",
                  text_of(a) + " / " + text_of(b));
}

struct TransformNames {
  const char *scale, *softcap, *temperature;
};

Status check_transform(const TransformNames& names, double scale, double softcap, double temperature) {
  if (Status s = check_quotient(names.scale, scale, names.temperature, temperature); !s.ok()) return s;
  if (softcap == 0) return {};
  if (Status s = check_quotient(names.softcap, softcap, names.temperature, temperature); !s.ok()) return s;
  if (Status s = check_quotient(names.scale, scale, names.softcap, softcap); !s.ok()) return s;
  // A capped z is known to |z| 2^-24, and 2^(z - max) overflows once that is some hundreds.
  const bool is_scale_less = scale < softcap;
  return check_quotient(is_scale_less ? names.scale : names.softcap, is_scale_less ? scale : softcap, names.temperature,
                        temperature, 0x1p24);
}

}  // namespace

Status check_transforms(const Problem& p, bool with_pointers) {
  // In place of a temperature that is not known yet: what is known is checked.
  const auto number = [&](const tileloss_scalar& s) { return s.pointer != nullptr && !with_pointers ? 1 : scalar_value(s); };
  const bool on_logprob = p.logit.temperature_on == TILELOSS_TEMPERATURE_ON_LOGPROB;
  const double temperature = on_logprob ? 1 : number(p.logit.temperature);
  if (Status s = check_transform({"logit_scale", "softcap", "temperature"}, p.logit.logit_scale, p.logit.softcap, temperature);
      !s.ok()) {
    return s;
  }
  if (p.loss->info.label_temperature != nullptr) {
    const double label = number(p.loss->info.label_temperature(p.options.data()));
    if (Status s = std::isnan(label) ? Status{}
                                     : check_transform({"logit_scale", "softcap", "label_temperature"}, p.logit.logit_scale,
                                                       p.logit.softcap, label);
        !s.ok()) {
      return s;
    }
  }
  if (p.loss->target() != TargetKind::kLogits) return {};
  const TeacherOptions teacher = p.loss->info.teacher_options(p.options.data());
  const double own = number(teacher.temperature);
  return check_transform({"teacher_logit_scale", "teacher_softcap", "teacher_temperature"}, teacher.logit_scale, teacher.softcap,
                         std::isnan(own) ? temperature : own);
}

const float* class_weights(const Problem& p) {
  const auto* weights = static_cast<const float*>(p.args.class_weights.data);
  return weights == nullptr ? nullptr : weights + p.logit.vocab_start;
}

Status bad_label(const std::string& at, std::int64_t label, std::int64_t classes, std::int64_t ignore_index) {
  return {TILELOSS_LABEL_OUT_OF_RANGE, "labels[" + at + "]: expected 0 <= label < " + std::to_string(classes) +
                                           " or ignore_index " + std::to_string(ignore_index) + ", got " + std::to_string(label)};
}

Status check_offset(std::int64_t i, std::int64_t count, std::int64_t offset, std::int64_t before, std::int64_t rows) {
  const std::string entry = "sequence_offsets[" + std::to_string(i) + "]", given = std::to_string(offset);
  if (i == 0) return offset == 0 ? Status{} : expected(entry, "0", given);
  if (offset < before) return expected(entry, ">= the one before it, " + std::to_string(before), given);
  if (i + 1 < count || offset == rows) return {};
  return expected(entry, "the number of rows, " + std::to_string(rows), given);
}

Status check_workspace(const tileloss_run& run, const tileloss_plan& plan) {
  if (run.workspace == nullptr) return {};
  if (reinterpret_cast<std::uintptr_t>(run.workspace) % 64 != 0)
    return expected("workspace", "64-byte alignment", "a pointer without it");
  if (run.workspace_bytes < static_cast<std::size_t>(plan.workspace_bytes)) {
    return {TILELOSS_WORKSPACE_TOO_SMALL, "workspace_bytes: expected at least the plan's " +
                                              std::to_string(plan.workspace_bytes) + ", got " +
                                              std::to_string(run.workspace_bytes)};
  }
  return {};
}

}  // namespace tileloss::impl
