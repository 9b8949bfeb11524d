#include "backends/problem.h"

#include <cmath>

namespace tileloss::impl {

std::string shape(std::int64_t rows, std::int64_t cols) {
  std::string text = "[";
  text += std::to_string(rows) + "," + std::to_string(cols) + "]";
  return text;
}

LossContext make_context(const Problem& p) {
  const tileloss_args& a = p.args;
  LossContext c;
  c.options = p.options.data();
  c.rows = p.rows;
  c.classes = p.classes;
  c.temperature_on_logprob = p.logit.temperature_on == TILELOSS_TEMPERATURE_ON_LOGPROB;
  c.labels = Labels(a.labels, p.logit.ignore_index, a.mask);
  c.token_weights = RowInput(a.token_weights, 1);
  c.class_weights = RowInput(a.class_weights, 1);
  c.loss_grad = RowInput(a.loss_grad, 1);
  c.logp_grad = RowInput(a.logp_grad, 0);
  c.lse_grad = RowInput(a.lse_grad, 0);
  c.entropy_grad = RowInput(a.entropy_grad, 0);
  c.mean_logit_grad = RowInput(a.mean_logit_grad, 0);
  c.old_logp = RowInput(a.old_logp, 0);
  c.ref_logp = RowInput(a.ref_logp, 0);
  c.sampler_logp = RowInput(a.sampler_logp, 0);
  c.advantages = RowInput(a.advantages, 0);
  c.sequences = Sequences(a.sequence_offsets, a.sequence_length, p.rows);
  if (p.pass != TILELOSS_BACKWARD) c.metrics = a.metrics;
  return c;
}

LogitTransform make_transform(const Problem& p, double temperature) {
  const bool on_logprob = p.logit.temperature_on == TILELOSS_TEMPERATURE_ON_LOGPROB;
  return LogitTransform::make(p.logit.logit_scale, p.logit.softcap, on_logprob ? 1.0 : temperature);
}

LogitTransform make_teacher_transform(const Problem& p) {
  const TeacherOptions teacher = p.loss->info.teacher_options(p.options.data());
  const double temperature = scalar_value(teacher.temperature);  // NaN behind a pointer: not given either
  return LogitTransform::make(teacher.logit_scale, teacher.softcap,
                              std::isnan(temperature) ? scalar_value(p.logit.temperature) : temperature);
}

const float* class_weights(const Problem& p) {
  const auto* weights = static_cast<const float*>(p.args.class_weights.data);
  return weights == nullptr ? nullptr : weights + p.logit.vocab_start;
}

}  // namespace tileloss::impl
