#include "api/problem.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>

#include "api/arguments.h"
#include "api/linear.h"
#include "api/options.h"

namespace tileloss::api {
namespace {

using std::to_string;

Status check_row_state(const Problem& p, bool is_input, bool needs_entropy) {
  const tileloss_row_state& s = p.args.row_state;
  if (s.rows != p.rows) return expected("row_state.rows", to_string(p.rows), to_string(s.rows));
  if (s.device_type != TILELOSS_CPU)
    return expected("row_state.device_type", "the logits' device (CPU)", to_string(s.device_type));
  if (is_input && (s.max == nullptr || s.sum == nullptr || s.target == nullptr) && p.rows > 0) {
    return expected("row_state", "max, sum and target, saved by a forward", "a null array");
  }
  if (is_input && needs_entropy && s.entropy_sum == nullptr && p.rows > 0) {
    return expected("row_state.entropy_sum", "the array that a forward filled (entropy and its gradient need it)", "null");
  }
  return {};
}

bool has_row_state(const tileloss_args& a) { return a.row_state.struct_size != 0; }

// Sums that the row outputs and the row state need.
std::uint32_t output_sums(const tileloss_args& a) {
  std::uint32_t sums = kNoSums;
  if (present(a.entropy)) sums |= kEntropySum;
  if (present(a.log_sum_sq_probs)) sums |= kCollisionSum;
  if (present(a.mean_logit)) sums |= kSmoothingSum;
  if (present(a.argmax) || present(a.correct)) sums |= kArgmax;
  return sums;
}

std::uint32_t state_sums(const tileloss_row_state& s) {
  return (s.entropy_sum != nullptr ? kEntropySum : kNoSums) | (s.collision_sum != nullptr ? kCollisionSum : kNoSums) |
         (s.smoothing_sum != nullptr ? kSmoothingSum : kNoSums) | (s.argmax != nullptr ? kArgmax : kNoSums);
}

Status resolve_vocabulary(Problem& p) {
  const tileloss_logit_options& o = p.logit;
  for (const std::int64_t r :
       {static_cast<std::int64_t>(o.reserved0), o.reserved[0], o.reserved[1], o.reserved[2], o.reserved[3]}) {
    if (r != 0) return expected("options.logit.reserved", "0", to_string(r));
  }
  if (p.total_columns > 0) {
    if (o.valid_vocab > p.total_columns)
      return expected("valid_vocab", "<= the logits' columns = " + to_string(p.total_columns), to_string(o.valid_vocab));
    p.columns = o.valid_vocab < 0 ? p.total_columns : o.valid_vocab;
  }
  if (o.vocab_total < 0 && p.columns == 0) return expected("vocab_total", "the number of classes, as there are no logits", "-1");
  p.classes = o.vocab_total < 0 ? p.columns : o.vocab_total;
  p.is_shard = p.columns != p.classes;
  if (o.vocab_start + p.columns > p.classes) {
    return expected("vocab_start", "<= vocab_total - columns = " + to_string(p.classes - p.columns), to_string(o.vocab_start));
  }
  return {};
}

// What sees the vocabulary is over: there are no columns, and the labels say how many rows there are.
Status resolve_from_row_state(Problem& p) {
  const tileloss_args& a = p.args;
  const std::pair<const char*, bool> of_the_vocabulary[] = {
      {"logits", present(a.logits)}, {"dlogits", present(a.dlogits)}, {"hidden", present(a.hidden)}, {"head", present(a.head)},
      {"bias", present(a.bias)},     {"dhidden", present(a.dhidden)}, {"dhead", present(a.dhead)},   {"dbias", present(a.dbias)}};
  for (const auto& [name, is_present] : of_the_vocabulary) {
    if (is_present) return expected(name, "none with the pass from_row_state", "a tensor");
  }
  if (a.labels.size < 0) return expected("labels.size", ">= 0", to_string(a.labels.size));
  p.rows = a.labels.size;
  return {};
}

Status resolve_matrices(Problem& p) {
  const tileloss_args& a = p.args;
  if (p.pass == TILELOSS_FROM_ROW_STATE) return resolve_from_row_state(p);
  if (p.loss->is_linear) return resolve_linear(p);
  const std::pair<const char*, const tileloss_matrix*> of_the_head[] = {
      {"hidden", &a.hidden}, {"head", &a.head}, {"dhidden", &a.dhidden}, {"dhead", &a.dhead}};
  for (const auto& [name, m] : of_the_head) {
    if (present(*m)) return expected(name, "none: " + p.loss->name + " does not take it", "a matrix");
  }
  if (a.accumulate != 0)
    return expected("accumulate", "0, as " + p.loss->name + " has no sum to add to", to_string(a.accumulate));
  if (a.compute_dtype != TILELOSS_NONE)
    return expected("compute_dtype", "none, as " + p.loss->name + " makes no product", dtype_name(a.compute_dtype));
  if (!present(a.logits)) return expected("logits", "a float32, bfloat16 or float16 matrix", "none");
  if (Status s = check_matrix("logits", a.logits); !s.ok()) return s;
  p.rows = a.logits.rows;
  p.total_columns = a.logits.cols;
  p.storage = storage_type(a.logits.dtype);
  if (p.pass == TILELOSS_FORWARD) {
    if (present(a.dlogits)) return expected("dlogits", "none in a forward", "a matrix");
    return {};
  }
  if (!present(a.dlogits)) return expected("dlogits", "a matrix like the logits", "none");
  if (Status s = check_matrix("dlogits", a.dlogits); !s.ok()) return s;
  if (a.dlogits.dtype != a.logits.dtype)
    return expected("dlogits.dtype", std::string("the logits', ") + dtype_name(a.logits.dtype), dtype_name(a.dlogits.dtype));
  if (a.dlogits.rows != a.logits.rows || a.dlogits.cols != a.logits.cols) {
    return expected("dlogits", "the logits' shape " + shape(a.logits.rows, a.logits.cols), shape(a.dlogits.rows, a.dlogits.cols));
  }
  return {};
}

// Which sweeps run, and what the forward must gather.
Status resolve_passes(Problem& p, std::uint32_t forward_sums, std::uint32_t backward_sums) {
  const tileloss_args& a = p.args;
  const bool given_state = has_row_state(a);
  const tileloss_row_state& state = a.row_state;
  const void* const arrays[] = {state.max,           state.sum,           state.target, state.entropy_sum,
                                state.collision_sum, state.smoothing_sum, state.argmax};
  if (!given_state && std::any_of(std::begin(arrays), std::end(arrays), [](const void* array) { return array != nullptr; }))
    return expected("row_state.struct_size", "that of tileloss_row_state_init, as it has arrays", "0");
  const bool state_is_input = p.pass == TILELOSS_FROM_ROW_STATE || (p.pass == TILELOSS_BACKWARD && given_state);
  if (p.pass == TILELOSS_FROM_ROW_STATE && !given_state) return expected("row_state", "the merged state", "none");
  const bool wants_value = p.pass != TILELOSS_BACKWARD;
  const std::uint32_t needed =
      (wants_value ? output_sums(a) | (p.loss->info.is_loss && (present(a.loss) || present(a.metrics)) ? forward_sums : 0u)
                   : 0u) |
      (p.pass == TILELOSS_BACKWARD || p.pass == TILELOSS_VALUE_AND_GRAD ? backward_sums : 0u);
  p.needs_backward = p.pass == TILELOSS_BACKWARD || p.pass == TILELOSS_VALUE_AND_GRAD;
  p.needs_forward = !state_is_input;
  p.sums = needed;
  if (given_state) {
    if (Status s = check_row_state(p, state_is_input, (needed & kEntropySum) != 0); !s.ok()) return s;
    if (!state_is_input) p.sums |= state_sums(a.row_state);
    const std::uint32_t missing = state_is_input ? needed & ~state_sums(a.row_state) : 0u;
    if (missing != 0 && p.rows > 0) {
      return expected("row_state",
                      "the arrays that these outputs need (collision_sum for log_sum_sq_probs, smoothing_sum for label_smoothing "
                      "and mean_logit, argmax)",
                      "a null array");
    }
  }
  if ((p.sums & kSmoothingSum) != 0 && present(a.mean_logit) && present(a.class_weights)) {
    return expected("mean_logit", "none together with class_weights", "a vector");
  }
  if (p.is_shard && p.needs_forward &&
      (p.needs_backward || present(a.loss) || present(a.metrics) || output_sums(a) != 0 || present(a.logp) || present(a.lse))) {
    return expected(
        "vocab_total",
        "the columns of the logits: a shard alone gives only its row_state (merge, then use from_row_state or backward)",
        to_string(p.classes));
  }
  return {};
}

}  // namespace

std::string shape(std::int64_t rows, std::int64_t cols) {
  std::string text = "[";
  text += to_string(rows) + "," + to_string(cols) + "]";
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

const float* class_weights(const Problem& p) {
  const auto* weights = static_cast<const float*>(p.args.class_weights.data);
  return weights == nullptr ? nullptr : weights + p.logit.vocab_start;
}

Status make_problem(const char* function, tileloss_pass pass, const tileloss_args* args, const void* options, Problem* problem) {
  Problem& p = *problem;
  if (function == nullptr || (p.loss = find_loss(function)) == nullptr) {
    std::string names;
    for (const RegisteredLoss& l : losses()) names += (names.empty() ? "" : ", ") + l.name;
    return expected("function", "one of " + names, function == nullptr ? "null" : function);
  }
  if (pass < TILELOSS_FORWARD || pass > TILELOSS_FROM_ROW_STATE) return expected("pass", "0 to 3", to_string(pass));
  if (pass == TILELOSS_VALUE_AND_GRAD && !p.loss->info.is_loss) {
    return expected("pass", std::string("forward or backward: ") + function + " has no loss", "value_and_grad");
  }
  if (args == nullptr) return expected("args", "a struct from tileloss_args_init", "null");
  if (args->struct_size < sizeof(std::size_t) || args->struct_size > sizeof p.args) {
    return expected("args.struct_size", "at most " + to_string(sizeof p.args), to_string(args->struct_size));
  }
  p.pass = pass;
  std::memcpy(&p.args, args, args->struct_size);
  p.options.resize(p.loss->info.options_size);
  fill_defaults(*p.loss, p.options.data());
  if (options != nullptr) {
    std::size_t given = 0;
    std::memcpy(&given, options, sizeof given);
    if (given < sizeof(CommonOptions) || given > p.options.size()) {
      return expected("options.struct_size", "that of " + std::string(function) + "'s options, " + to_string(p.options.size()),
                      to_string(given));
    }
    std::memcpy(p.options.data() + sizeof given, static_cast<const std::byte*>(options) + sizeof given, given - sizeof given);
  }
  std::memcpy(&p.logit, p.options.data() + offsetof(CommonOptions, logit), sizeof p.logit);
  if (Status s = check_options(*p.loss, p.options.data(), false); !s.ok()) return s;
  p.num_metrics = p.loss->info.metrics == nullptr ? 0 : 1 + std::ranges::count(std::string_view(p.loss->info.metrics), '|');
  p.is_per_row = p.loss->info.is_per_row != nullptr && p.loss->info.is_per_row(p.options.data());
  if (Status s = resolve_matrices(p); !s.ok()) return s;
  if (Status s = resolve_vocabulary(p); !s.ok()) return s;
  if (Status s = check_row_groups(p); !s.ok()) return s;
  if (Status s = check_vectors(p); !s.ok()) return s;
  const LossContext context = make_context(p);
  if (p.loss->info.check != nullptr) {
    if (std::string message = p.loss->info.check(context); !message.empty()) return invalid(std::move(message));
  }
  const std::unique_ptr<RowStage> stage = p.loss->info.make(context);
  p.stage_bytes = stage->scratch_bytes();
  p.is_multiple_of_p = stage->is_multiple_of_p();
  if (Status s = resolve_passes(p, stage->forward_sums(), stage->backward_sums()); !s.ok()) return s;
  // A forward for row outputs or the row state alone needs no loss of any row.
  p.couples_rows = stage->couples_rows() && (p.needs_backward || present(p.args.loss) || present(p.args.metrics));
  return {};
}

Status check_data(const Problem& p) {
  if (Status s = check_options(*p.loss, p.options.data(), true); !s.ok()) return s;
  if (p.loss->info.check_numbers != nullptr) {
    if (std::string message = p.loss->info.check_numbers(p.options.data()); !message.empty()) return invalid(std::move(message));
  }
  return check_pointers(p);
}

std::uint64_t fingerprint(const Problem& p) {
  Fingerprint h;
  h.add(p.loss->name.c_str());
  h.add(p.pass);
  hash_tensors(p.args, h);
  h.add(p.rows);
  h.add(p.sums);
  h.add(p.needs_forward);
  // What numbers that may change decide if they leave 0: the plan is cut by it.
  h.add(p.couples_rows);
  h.add(p.stage_bytes);
  if (p.loss->is_linear) h.add(p.is_multiple_of_p);
  hash_options(*p.loss, p.options.data(), h);
  return h.value();
}

}  // namespace tileloss::api
