#include "api/problem.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "api/options.h"

namespace tileloss::api {
namespace {

using std::to_string;

const char* dtype_name(tileloss_dtype t) {
  switch (t) {
    case TILELOSS_NONE: return "none";
    case TILELOSS_FLOAT32: return "float32";
    case TILELOSS_BFLOAT16: return "bfloat16";
    case TILELOSS_FLOAT16: return "float16";
    case TILELOSS_INT32: return "int32";
    case TILELOSS_INT64: return "int64";
    case TILELOSS_UINT8: return "uint8";
    default: return "an unknown dtype";
  }
}

bool present(const tileloss_matrix& m) { return m.dtype != TILELOSS_NONE; }
bool present(const tileloss_vector& v) { return v.dtype != TILELOSS_NONE; }

std::int64_t element_bytes(tileloss_dtype t) {
  switch (t) {
    case TILELOSS_INT64: return 8;
    case TILELOSS_FLOAT32:
    case TILELOSS_INT32: return 4;
    case TILELOSS_UINT8: return 1;
    default: return 2;
  }
}

std::string shape(std::int64_t rows, std::int64_t cols) {
  std::string text = "[";
  text += to_string(rows) + "," + to_string(cols) + "]";
  return text;
}

// rows * stride * bytes must not overflow.
bool fits(std::int64_t count, std::int64_t stride, tileloss_dtype dtype) {
  std::int64_t elements = 0, bytes = 0;
  return !__builtin_mul_overflow(count, stride, &elements) && !__builtin_mul_overflow(elements, element_bytes(dtype), &bytes);
}

Status check_matrix(const char* name, const tileloss_matrix& m) {
  if (m.dtype != TILELOSS_FLOAT32 && m.dtype != TILELOSS_BFLOAT16 && m.dtype != TILELOSS_FLOAT16) {
    return expected(std::string(name) + ".dtype", "float32, bfloat16 or float16", dtype_name(m.dtype));
  }
  if (m.device_type != TILELOSS_CPU) {
    return {TILELOSS_UNSUPPORTED,
            std::string(name) + ".device_type: expected the CPU, the only device of this build, got " + to_string(m.device_type)};
  }
  if (m.reserved != 0) return expected(std::string(name) + ".reserved", "0", to_string(m.reserved));
  if (m.rows < 0) return expected(std::string(name) + ".rows", ">= 0", to_string(m.rows));
  if (m.cols < 1) return expected(std::string(name) + ".cols", ">= 1", to_string(m.cols));
  if (m.cols > std::numeric_limits<std::int32_t>::max())
    return expected(std::string(name) + ".cols", "< 2^31", to_string(m.cols));
  if (m.col_stride != 1 && m.cols > 1) return expected(std::string(name) + ".col_stride", "1", to_string(m.col_stride));
  if (m.row_stride < m.cols && m.rows > 1) {
    return expected(std::string(name) + ".row_stride", ">= cols = " + to_string(m.cols), to_string(m.row_stride));
  }
  if (m.rows > 1 && !fits(m.rows, m.row_stride, m.dtype))
    return expected(std::string(name), "less than 2^63 bytes", shape(m.rows, m.row_stride));
  return {};
}

struct VectorRule {
  const char* name;
  const tileloss_vector* v;
  std::int64_t size;
  tileloss_dtype dtype, other_dtype;
  bool is_output;
};

Status check_vector(const VectorRule& r) {
  const std::string name = r.name;
  if (r.v->dtype != r.dtype && r.v->dtype != r.other_dtype) {
    const std::string wanted =
        r.dtype == r.other_dtype ? dtype_name(r.dtype) : std::string(dtype_name(r.dtype)) + " or " + dtype_name(r.other_dtype);
    return expected(name + ".dtype", wanted, dtype_name(r.v->dtype));
  }
  if (r.v->device_type != TILELOSS_CPU)
    return expected(name + ".device_type", "the logits' device (CPU)", to_string(r.v->device_type));
  if (r.v->reserved != 0) return expected(name + ".reserved", "0", to_string(r.v->reserved));
  if (r.v->size != r.size) return expected(name + ".size", to_string(r.size), to_string(r.v->size));
  if (r.is_output && r.size > 1 && r.v->stride == 0) return expected(name + ".stride", "not 0 for an output", "0");
  if (r.v->stride < 0) return expected(name + ".stride", ">= 0", to_string(r.v->stride));
  if (!fits(r.size, r.v->stride, r.v->dtype))
    return expected(name, "less than 2^63 bytes", to_string(r.size) + " * " + to_string(r.v->stride));
  return {};
}

Status check_vectors(const Problem& p) {
  const tileloss_args& a = p.args;
  const std::int64_t n = p.rows, losses = p.is_per_row ? p.rows : 1;
  constexpr auto kF = TILELOSS_FLOAT32;
  const VectorRule rules[] = {
      {"labels", &a.labels, n, TILELOSS_INT32, TILELOSS_INT64, false},
      {"token_weights", &a.token_weights, n, kF, kF, false},
      {"class_weights", &a.class_weights, p.classes, kF, kF, false},
      {"loss_grad", &a.loss_grad, losses, kF, kF, false},
      {"logp_grad", &a.logp_grad, n, kF, kF, false},
      {"lse_grad", &a.lse_grad, n, kF, kF, false},
      {"entropy_grad", &a.entropy_grad, n, kF, kF, false},
      {"loss", &a.loss, losses, kF, kF, true},
      {"logp", &a.logp, n, kF, kF, true},
      {"lse", &a.lse, n, kF, kF, true},
      {"entropy", &a.entropy, n, kF, kF, true},
      {"argmax", &a.argmax, n, TILELOSS_INT64, TILELOSS_INT64, true},
      {"correct", &a.correct, n, TILELOSS_UINT8, TILELOSS_UINT8, true},
      {"log_sum_sq_probs", &a.log_sum_sq_probs, n, kF, kF, true},
      {"mean_logit", &a.mean_logit, n, kF, kF, true},
  };
  for (const VectorRule& r : rules) {
    if (!present(*r.v)) continue;
    if (Status s = check_vector(r); !s.ok()) return s;
  }
  if (!present(a.labels)) return expected("labels", "an int32 or int64 vector of size " + to_string(n), "none");
  if (present(a.class_weights) && a.class_weights.stride != 1 && p.classes > 1) {
    return expected("class_weights.stride", "1", to_string(a.class_weights.stride));
  }
  const std::uint32_t inputs = p.loss->info.inputs;
  const struct {
    const char* name;
    const tileloss_vector* v;
    bool accepted;
  } uses[] = {
      {"token_weights", &a.token_weights, (inputs & kTokenWeights) != 0},
      {"class_weights", &a.class_weights, (inputs & kClassWeights) != 0},
      {"loss_grad", &a.loss_grad, (inputs & kLossGrad) != 0},
      {"logp_grad", &a.logp_grad, (inputs & kRowGrads) != 0},
      {"lse_grad", &a.lse_grad, (inputs & kRowGrads) != 0},
      {"entropy_grad", &a.entropy_grad, (inputs & kRowGrads) != 0},
      {"loss", &a.loss, p.loss->info.is_loss},
  };
  for (const auto& u : uses) {
    if (present(*u.v) && !u.accepted)
      return expected(u.name, std::string("none: ") + p.loss->info.name + " does not take it", "a vector");
  }
  return {};
}

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

Status resolve_matrices(Problem& p) {
  const tileloss_args& a = p.args;
  const bool stage_only = p.pass == TILELOSS_FROM_ROW_STATE;
  if (stage_only) {
    if (present(a.logits)) return expected("logits", "none with the pass from_row_state", "a matrix");
    if (present(a.dlogits)) return expected("dlogits", "none with the pass from_row_state", "a matrix");
    if (a.labels.size < 0) return expected("labels.size", ">= 0", to_string(a.labels.size));
    p.rows = a.labels.size;
    return {};
  }
  if (!present(a.logits)) return expected("logits", "a float32, bfloat16 or float16 matrix", "none");
  if (Status s = check_matrix("logits", a.logits); !s.ok()) return s;
  p.rows = a.logits.rows;
  p.total_columns = a.logits.cols;
  p.storage = a.logits.dtype == TILELOSS_FLOAT32    ? cpu::kStorageFloat32
              : a.logits.dtype == TILELOSS_BFLOAT16 ? cpu::kStorageBfloat16
                                                    : cpu::kStorageFloat16;
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
  const bool state_is_input = p.pass == TILELOSS_FROM_ROW_STATE || (p.pass == TILELOSS_BACKWARD && given_state);
  if (p.pass == TILELOSS_FROM_ROW_STATE && !given_state) return expected("row_state", "the merged state", "none");
  const bool wants_value = p.pass != TILELOSS_BACKWARD;
  const std::uint32_t needed =
      (wants_value ? output_sums(a) | (p.loss->info.is_loss && present(a.loss) ? forward_sums : 0u) : 0u) |
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
      (p.needs_backward || present(a.loss) || output_sums(a) != 0 || present(a.logp) || present(a.lse))) {
    return expected(
        "vocab_total",
        "the columns of the logits: a shard alone gives only its row_state (merge, then use from_row_state or backward)",
        to_string(p.classes));
  }
  return {};
}

}  // namespace

Status make_problem(const char* function, tileloss_pass pass, const tileloss_args* args, const void* options, Problem* problem) {
  Problem& p = *problem;
  if (function == nullptr || (p.loss = find_loss(function)) == nullptr) {
    std::string names;
    for (const RegisteredLoss& l : losses()) names += (names.empty() ? "" : ", ") + std::string(l.info.name);
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
  p.is_per_row = p.loss->info.is_per_row != nullptr && p.loss->info.is_per_row(p.options.data());
  if (Status s = resolve_matrices(p); !s.ok()) return s;
  if (Status s = resolve_vocabulary(p); !s.ok()) return s;
  if (Status s = check_vectors(p); !s.ok()) return s;
  LossContext context;
  context.options = p.options.data();
  static const float kOne = 1;  // presence is all that the demand for sums depends on
  if (present(p.args.entropy_grad))
    context.entropy_grad = RowInput(tileloss_vector{const_cast<float*>(&kOne), 1, 0, TILELOSS_FLOAT32, TILELOSS_CPU, 0, 0}, 0);
  const std::unique_ptr<RowStage> stage = p.loss->info.make(context);
  return resolve_passes(p, stage->forward_sums(), stage->backward_sums());
}

Status check_data(const Problem& p) {
  const tileloss_args& a = p.args;
  if (Status s = check_options(*p.loss, p.options.data(), true); !s.ok()) return s;
  if (p.rows == 0) {
    if (present(a.loss) && a.loss.size > 0 && a.loss.data == nullptr) return expected("loss.data", "a pointer", "null");
    return {};
  }
  const std::pair<const char*, const tileloss_vector*> vectors[] = {{"labels", &a.labels},
                                                                    {"token_weights", &a.token_weights},
                                                                    {"class_weights", &a.class_weights},
                                                                    {"loss_grad", &a.loss_grad},
                                                                    {"logp_grad", &a.logp_grad},
                                                                    {"lse_grad", &a.lse_grad},
                                                                    {"entropy_grad", &a.entropy_grad},
                                                                    {"loss", &a.loss},
                                                                    {"logp", &a.logp},
                                                                    {"lse", &a.lse},
                                                                    {"entropy", &a.entropy},
                                                                    {"argmax", &a.argmax},
                                                                    {"correct", &a.correct},
                                                                    {"log_sum_sq_probs", &a.log_sum_sq_probs},
                                                                    {"mean_logit", &a.mean_logit}};
  for (const auto& [name, v] : vectors) {
    if (present(*v) && v->data == nullptr) return expected(std::string(name) + ".data", "a pointer", "null");
  }
  if (present(a.logits) && a.logits.data == nullptr) return expected("logits.data", "a pointer", "null");
  if (!present(a.dlogits)) return {};
  if (a.dlogits.data == nullptr) return expected("dlogits.data", "a pointer", "null");
  if (a.dlogits.data == a.logits.data) {
    if (a.dlogits.row_stride != a.logits.row_stride && p.rows > 1) {
      return expected("dlogits.row_stride", "the logits', " + to_string(a.logits.row_stride) + ", when it is written over them",
                      to_string(a.dlogits.row_stride));
    }
    return {};
  }
  const auto extent = [&](const tileloss_matrix& m) {
    return static_cast<std::uintptr_t>(((p.rows - 1) * m.row_stride + m.cols) * element_bytes(m.dtype));
  };
  const auto x = reinterpret_cast<std::uintptr_t>(a.logits.data), dx = reinterpret_cast<std::uintptr_t>(a.dlogits.data);
  if (x < dx + extent(a.dlogits) && dx < x + extent(a.logits))
    return expected("dlogits.data", "the logits' own, or a buffer apart from them", "one that overlaps them");
  return {};
}

std::uint64_t fingerprint(const Problem& p) {
  Fingerprint h;
  h.add(p.loss->info.name);
  h.add(p.pass);
  for (const tileloss_matrix* m : {&p.args.logits, &p.args.dlogits}) {
    h.add(m->dtype);
    if (!present(*m)) continue;
    h.add(m->rows);
    h.add(m->cols);
    h.add(m->row_stride);
  }
  const tileloss_args& a = p.args;
  for (const tileloss_vector* v :
       {&a.labels, &a.token_weights, &a.class_weights, &a.loss_grad, &a.logp_grad, &a.lse_grad, &a.entropy_grad, &a.loss, &a.logp,
        &a.lse, &a.entropy, &a.argmax, &a.correct, &a.log_sum_sq_probs, &a.mean_logit}) {
    h.add(v->dtype);
    if (!present(*v)) continue;
    h.add(v->size);
    h.add(v->stride);
  }
  h.add(p.rows);
  h.add(p.sums);
  h.add(p.needs_forward);
  hash_options(*p.loss, p.options.data(), h);
  return h.value();
}

}  // namespace tileloss::api
