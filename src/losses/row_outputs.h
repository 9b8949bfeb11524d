// What a forward reports of each row besides its loss, made of the row's statistics. Plain data, for host and device.
#pragma once

#include <tileloss/tileloss.h>

#include <cstdint>

#include "core/row_stats.h"
#include "core/target.h"
#include "losses/loss.h"

namespace tileloss::impl {

// An output with its stride; writes nothing if it is absent.
template <class T>
struct RowOutput {
  T* data = nullptr;
  std::int64_t stride = 0;

  RowOutput() = default;
  explicit RowOutput(const tileloss_vector& v) : data(static_cast<T*>(v.data)), stride(v.stride) {}
  TILELOSS_HOST_DEVICE void set(std::int64_t i, T value) const {
    if (data != nullptr) data[i * stride] = value;
  }
};

struct RowOutputs {
  RowOutput<float> logp, lse, entropy, log_sum_sq_probs, mean_logit;
  RowOutput<std::int64_t> argmax;
  RowOutput<std::uint8_t> correct;
  RowOutput<float> divergence, teacher_entropy;
  RowOutput<std::uint8_t> agreement;
  Labels labels;
  bool is_on_logprob = false;
  tileloss_scalar temperature = 1;
  double classes = 0;

  RowOutputs(const tileloss_args& args, const LossContext& context)
      : logp(args.logp),
        lse(args.lse),
        entropy(args.entropy),
        log_sum_sq_probs(args.log_sum_sq_probs),
        mean_logit(args.mean_logit),
        argmax(args.argmax),
        correct(args.correct),
        divergence(args.divergence),
        teacher_entropy(args.teacher_entropy),
        agreement(args.agreement),
        labels(context.labels),
        is_on_logprob(context.temperature_on_logprob),
        temperature(context.temperature),
        classes(static_cast<double>(context.classes)) {}

  TILELOSS_HOST_DEVICE void write(std::int64_t i, const TargetStats& s) const {
    const std::int64_t n = labels.per_row();
    if (n == 1) set_logp(i, s.label.logp);
    for (std::int64_t k = 0; n > 1 && logp.data != nullptr && k < n; ++k) {
      if (labels.has_label_at(i, k))
        set_logp(i * n + k, s.labels.z == nullptr ? s.label.logp : s.labels.logp(k, s));
      else
        logp.set(i * n + k, 0);
    }
    lse.set(i, static_cast<float>(s.lse));
    entropy.set(i, static_cast<float>(s.entropy));
    log_sum_sq_probs.set(i, static_cast<float>(s.log_sum_sq_probs));
    const double mean = s.smoothing_sum / s.classes.count_of(classes);
    mean_logit.set(i, static_cast<float>(std::isinf(s.max) ? mean : s.max + mean));
    argmax.set(i, s.argmax);
    correct.set(i, s.argmax == labels[i] ? 1 : 0);
    divergence.set(i, static_cast<float>(s.sums.divergence));
    teacher_entropy.set(i, static_cast<float>(s.teacher.entropy));
    agreement.set(i, s.argmax >= 0 && s.argmax == s.teacher.argmax ? 1 : 0);  // -1 agrees with nothing
  }

  TILELOSS_HOST_DEVICE void write_ignored(std::int64_t i) const {
    for (std::int64_t k = 0, n = labels.per_row(); k < n; ++k) logp.set(i * n + k, 0);
    lse.set(i, 0);
    entropy.set(i, 0);
    log_sum_sq_probs.set(i, 0);
    mean_logit.set(i, 0);
    argmax.set(i, -1);
    correct.set(i, 0);
    divergence.set(i, 0);
    teacher_entropy.set(i, 0);
    agreement.set(i, 0);
  }

 private:
  TILELOSS_HOST_DEVICE void set_logp(std::int64_t at, double value) const {
    logp.set(at, static_cast<float>(is_on_logprob ? value / scalar_value(temperature) : value));
  }
};

}  // namespace tileloss::impl
