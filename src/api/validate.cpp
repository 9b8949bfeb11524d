#include "api/validate.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <string_view>

#include "api/arguments.h"
#include "backends/backend.h"
#include "schema/options.h"

namespace tileloss::impl::api {
namespace {

using std::to_string;

constexpr int kFirstSum = 3;

// A sum of the sweeps for each array of the row state beyond max, sum and label_logit, in the same order.
std::uint32_t sums_of(std::uint32_t arrays) {
  static_assert(kEntropySum << kFirstSum == TILELOSS_STATE_ENTROPY_SUM &&
                kCollisionSum << kFirstSum == TILELOSS_STATE_COLLISION_SUM &&
                kSmoothingSum << kFirstSum == TILELOSS_STATE_SMOOTHING_SUM && kArgmax << kFirstSum == TILELOSS_STATE_ARGMAX);
  return arrays >> kFirstSum & (kEntropySum | kCollisionSum | kSmoothingSum | kArgmax);
}
std::uint32_t arrays_of(std::uint32_t sums) { return sums << kFirstSum; }

// What the row outputs need: arrays of the row state.
std::uint32_t output_arrays(const tileloss_args& a) {
  std::uint32_t arrays = 0;
  for (const TensorSlot& slot : tensor_slots()) {
    if (slot.role == TILELOSS_ROLE_ROW_OUTPUT && present(a, slot)) arrays |= slot.state_arrays;
  }
  return arrays;
}

// The first of the row outputs asked for that needs the array, among those of `groups`, 0: all; null: none does.
const char* output_that_needs(const tileloss_args& a, std::uint32_t array, std::uint32_t groups = 0) {
  for (const TensorSlot& slot : tensor_slots()) {
    if (groups != 0 && (slot.groups & groups) == 0) continue;
    if (slot.role == TILELOSS_ROLE_ROW_OUTPUT && present(a, slot) && (slot.state_arrays & array) != 0) return slot.name;
  }
  return nullptr;
}

// What a row state has of several labels a row.
Status check_label_logits(const Problem& p, const std::string& name, const tileloss_row_state& s) {
  const bool is_part = p.is_shard || p.pass == TILELOSS_FROM_ROW_STATE;
  if (s.label_logits == nullptr && p.has_several_labels() && is_part && p.rows > 0)
    return expected(name + ".label_logits", "an array, for several labels a row of a shard", "null");
  if (s.label_logits == nullptr) return {};
  if (!p.has_several_labels()) return expected(name + ".label_logits", "null with one label a row", "an array");
  if (s.labels_per_row == p.args.labels_per_row) return {};
  return expected(name + ".labels_per_row", to_string(p.args.labels_per_row), to_string(s.labels_per_row));
}

// A row state's rows and device, and that it holds `arrays`, TILELOSS_STATE_*, for outputs of `groups`, 0: all.
Status check_state(const Problem& p, const std::string& name, const tileloss_row_state& s, std::uint32_t arrays,
                   std::uint32_t groups = 0) {
  constexpr std::size_t kPrefix = std::string_view("row_state.").size();
  if (s.rows != p.rows) return expected(name + ".rows", to_string(p.rows), to_string(s.rows));
  if (Status device = check_device(p, name, device_of(s)); !device.ok()) return device;
  if (Status labels = check_label_logits(p, name, s); !labels.ok()) return labels;
  const std::uint32_t missing = p.rows == 0 ? 0 : arrays & ~present_arrays(s);
  if ((missing & kMaxSumLabelLogit) != 0) {
    return expected(name,
                    std::string("max, sum and label_logit, ") + (p.merges_shards() ? "of all shards" : "saved by a forward"),
                    "a null array");
  }
  if ((missing & TILELOSS_STATE_ENTROPY_SUM) != 0 && !p.merges_shards()) {
    return expected(name + ".entropy_sum", "the array that a forward filled (entropy and its gradient need it)", "null");
  }
  for (const StateArray& array : state_arrays()) {
    if ((array.bit & missing) == 0) continue;
    const char* const output = output_that_needs(p.args, array.bit, groups);
    return expected(name, std::string(array.name + kPrefix) + " for " + (output != nullptr ? output : "these options"),
                    "a null array");
  }
  return {};
}

// How many classes the rows have, where that is each row's own.
Status check_counts(const Problem& p, bool is_read) {
  const tileloss_row_state& s = p.row_state;
  if (is_read && p.is_shard && present(p.args.allowed) && s.allowed_count == nullptr && p.rows > 0)
    return expected("row_state.allowed_count", "an array, for a shard with allowed", "null");
  if (s.allowed_count != nullptr && s.allowed_weight == nullptr && present(p.args.class_weights))
    return expected("row_state.allowed_weight", "an array, with allowed_count and class_weights", "null");
  return {};
}

Status resolve_vocabulary(Problem& p) {
  const tileloss_logit_options& o = p.logit;
  for (const std::int64_t r :
       {static_cast<std::int64_t>(o.reserved0), o.reserved[0], o.reserved[1], o.reserved[2], o.reserved[3]}) {
    if (r != 0) return expected("options.logit.reserved", "0", to_string(r));
  }
  for (const std::int64_t r : p.linear.reserved) {
    if (r != 0) return expected("options.linear.reserved", "0", to_string(r));
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
  for (const TensorSlot& slot : tensor_slots()) {
    if ((slot.passes & pass_bit(TILELOSS_FROM_ROW_STATE)) == 0 && present(a, slot))
      return expected(slot.name, "none with the pass from_row_state", "a tensor");
  }
  const bool has_labels = present(a.labels) || !p.has_pair_state;
  if (Status s =
          has_labels ? choose_device(p, "labels", device_of(a.labels)) : choose_device(p, "row_state", device_of(p.row_state));
      !s.ok()) {
    return s;
  }
  p.rows = has_labels ? a.labels.size / std::max<std::int64_t>(a.labels_per_row, 1) : p.row_state.rows;
  return p.rows < 0 ? expected(has_labels ? "labels.size" : "row_state.rows", ">= 0", to_string(p.rows)) : Status{};
}

// Matrices that the function has no use for.
Status check_matrices_taken(const Problem& p) {
  for (const TensorSlot& slot : tensor_slots()) {
    if (slot.matrix != nullptr && slot.groups != 0 && (slot.groups & p.loss->groups) == 0 && present(p.args, slot))
      return expected(slot.name, "none: " + p.loss->name + " does not take it", "a matrix");
  }
  return {};
}

Status resolve_target_probs(const Problem& p) {
  const tileloss_matrix& probs = p.args.target_probs;
  if (!present(probs)) return expected("target_probs", "a matrix of the logits' shape", "none");
  if (Status s = check_matrix(p, "target_probs", probs); !s.ok()) return s;
  if (probs.rows == p.rows && probs.cols == p.total_columns) return {};
  return expected("target_probs", "the logits' shape " + shape(p.rows, p.total_columns), shape(probs.rows, probs.cols));
}

// A target that is not labels: a teacher's logits, like the row's own, with strides of their own, or made by a head of their own;
// class probabilities; or some columns of a teacher.
Status resolve_target(Problem& p) {
  const tileloss_matrix &logits = p.args.logits, &teacher = p.args.teacher_logits;
  if (p.has_row_state && !p.has_pair_state)
    return expected("row_state", "none: " + p.loss->name + " does not take it", "a row state");
  if (!p.has_pair_state && (p.logit.vocab_total >= 0 || p.logit.vocab_start != 0)) {
    return expected("vocab_total",
                    "-1, and vocab_start 0: " + p.loss->name + " takes no shards of the vocabulary" +
                        (p.loss->target() == TargetKind::kColumns ? "" : " without pair_state"),
                    to_string(p.logit.vocab_total) + " and " + to_string(p.logit.vocab_start));
  }
  if (p.loss->target() == TargetKind::kProbabilities) return resolve_target_probs(p);
  if (p.loss->target() == TargetKind::kColumns) return resolve_teacher_columns(p);
  if (p.loss->is_linear) return resolve_teacher_head(p);
  if (!present(teacher)) return expected("teacher_logits", "a matrix like the logits", "none");
  if (Status s = check_matrix(p, "teacher_logits", teacher); !s.ok()) return s;
  if (teacher.dtype != logits.dtype)
    return expected("teacher_logits.dtype", std::string("the logits', ") + dtype_name(logits.dtype), dtype_name(teacher.dtype));
  if (teacher.rows != logits.rows || teacher.cols != logits.cols) {
    return expected("teacher_logits", "the logits' shape " + shape(logits.rows, logits.cols), shape(teacher.rows, teacher.cols));
  }
  return {};
}

Status resolve_matrices(Problem& p) {
  const tileloss_args& a = p.args;
  if (p.pass == TILELOSS_FROM_ROW_STATE && p.loss->needs_target_sweep() && (!p.has_pair_state || p.loss->is_linear))
    return expected("pass", "forward, backward or value_and_grad: " + p.loss->name + " has no row state", "from_row_state");
  if (p.pass == TILELOSS_FROM_ROW_STATE) return resolve_from_row_state(p);
  if (p.loss->is_linear) {
    if (Status s = resolve_head(p); !s.ok()) return s;
    if (Status s = check_matrices_taken(p); !s.ok()) return s;
    return p.loss->needs_target_sweep() ? resolve_target(p) : Status{};
  }
  if (Status s = check_matrices_taken(p); !s.ok()) return s;
  if (p.linear.accumulate != 0)
    return expected("accumulate", "0, as " + p.loss->name + " has no sum to add to", to_string(p.linear.accumulate));
  if (p.linear.compute_dtype != TILELOSS_NONE)
    return expected("compute_dtype", "none, as " + p.loss->name + " makes no product", dtype_name(p.linear.compute_dtype));
  if (!present(a.logits)) return expected("logits", "a float32, bfloat16 or float16 matrix", "none");
  if (Status s = choose_device(p, "logits", device_of(a.logits)); !s.ok()) return s;
  if (Status s = check_matrix(p, "logits", a.logits); !s.ok()) return s;
  p.rows = a.logits.rows;
  p.total_columns = a.logits.cols;
  p.storage = a.logits.dtype;
  if (p.loss->needs_target_sweep()) {
    if (Status s = resolve_target(p); !s.ok()) return s;
  }
  if (p.pass == TILELOSS_FORWARD) {
    if (present(a.dlogits)) return expected("dlogits", "none in a forward", "a matrix");
    return {};
  }
  if (!present(a.dlogits)) return expected("dlogits", "a matrix like the logits", "none");
  if (Status s = check_matrix(p, "dlogits", a.dlogits); !s.ok()) return s;
  if (a.dlogits.dtype != a.logits.dtype)
    return expected("dlogits.dtype", std::string("the logits', ") + dtype_name(a.logits.dtype), dtype_name(a.dlogits.dtype));
  if (a.dlogits.rows != a.logits.rows || a.dlogits.cols != a.logits.cols) {
    return expected("dlogits", "the logits' shape " + shape(a.logits.rows, a.logits.cols), shape(a.dlogits.rows, a.dlogits.cols));
  }
  return {};
}

// A shard whose target is not labels.
Status resolve_shard_of_pair(Problem& p) {
  const tileloss_args& a = p.args;
  p.gives_sums = p.pass == TILELOSS_FORWARD;
  p.needs_backward = p.pass == TILELOSS_BACKWARD;
  if (p.pass == TILELOSS_VALUE_AND_GRAD)
    return expected("pass", "forward, from_row_state or backward, with a pair_state", "value_and_grad");
  if (!p.has_row_state) return expected("row_state", "the student's, with a pair_state", "none");
  if (p.pair_state.rows != p.rows) return expected("pair_state.rows", to_string(p.rows), to_string(p.pair_state.rows));
  if (p.rows > 0 && (p.pair_state.divergence == nullptr || p.pair_state.mean == nullptr))
    return expected("pair_state", "the arrays divergence and mean", "a null one");
  std::uint32_t arrays = 0, teachers = 0;
  for (const TensorSlot& slot : tensor_slots()) {
    if (slot.role != TILELOSS_ROLE_ROW_OUTPUT && slot.role != TILELOSS_ROLE_OUTPUT) continue;
    if (!present(a, slot)) continue;
    if (p.pass == TILELOSS_FORWARD)
      return expected(slot.name, "none in a forward with pair_state: from_row_state gives it", "a vector");
    arrays |= slot.state_arrays;
    if ((slot.groups & kDivergence) != 0) teachers |= slot.state_arrays;
  }
  if (p.pass != TILELOSS_FROM_ROW_STATE) arrays = teachers = 0;
  if (Status s = check_counts(p, true); !s.ok()) return s;
  if (Status s = check_state(p, "row_state", p.row_state, arrays | kMaxSumLabelLogit); !s.ok()) return s;
  const bool has_teacher = p.pair_state.teacher != nullptr, has_label = p.pair_state.label != nullptr;
  if (has_teacher != (p.loss->target() == TargetKind::kLogits))
    return expected("pair_state.teacher", has_teacher ? "null: there are no teacher's logits" : "the teacher's row state",
                    has_teacher ? "a row state" : "null");
  if (has_teacher) {
    if (Status s = check_state(p, "pair_state.teacher", p.teacher_state, teachers | kMaxSumLabelLogit, kDivergence); !s.ok())
      return s;
  }
  if (make_label_transform(p) && !has_label) return expected("pair_state.label", "the row state at label_temperature", "null");
  return has_label ? check_state(p, "pair_state.label", p.label_state, kMaxSumLabelLogit) : Status{};
}

// Which sweeps run, and what the forward must gather.
Status resolve_passes(Problem& p, std::uint32_t forward_sums, std::uint32_t backward_sums) {
  const tileloss_args& a = p.args;
  const bool given_state = p.has_row_state;
  const std::uint32_t outputs = output_arrays(a);
  const bool state_is_input = p.pass == TILELOSS_FROM_ROW_STATE || (p.pass == TILELOSS_BACKWARD && given_state);
  if (p.pass == TILELOSS_FROM_ROW_STATE && !given_state) return expected("row_state", "the merged state", "none");
  const bool wants_value = p.pass != TILELOSS_BACKWARD;
  const std::uint32_t needed =
      (wants_value ? sums_of(outputs) | (p.loss->info.is_loss && (present(a.loss) || present(a.metrics)) ? forward_sums : 0u)
                   : 0u) |
      (p.pass == TILELOSS_BACKWARD || p.pass == TILELOSS_VALUE_AND_GRAD ? backward_sums : 0u);
  p.needs_backward = p.pass == TILELOSS_BACKWARD || p.pass == TILELOSS_VALUE_AND_GRAD;
  p.needs_forward = !state_is_input;
  p.sums = needed;
  if (given_state) {
    const bool is_read = state_is_input || p.merges_shards();
    if (Status s = check_counts(p, is_read); !s.ok()) return s;
    if (Status s = check_state(p, "row_state", p.row_state, is_read ? arrays_of(needed) | kMaxSumLabelLogit : 0); !s.ok())
      return s;
    if (!state_is_input) p.sums |= sums_of(present_arrays(p.row_state));
  }
  // The smoothing sum is weighted then.
  if (const char* output = output_that_needs(a, TILELOSS_STATE_SMOOTHING_SUM); output != nullptr && present(a.class_weights)) {
    return expected(output, "none together with class_weights", "a vector");
  }
  const bool merges = p.pass == TILELOSS_VALUE_AND_GRAD && given_state;  // run.merge
  if (p.is_shard && p.needs_forward && !merges && (p.needs_backward || present(a.loss) || present(a.metrics) || outputs != 0)) {
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
    for (const RegisteredLoss& l : losses()) names += (names.empty() ? "" : ", ") + l.name;
    return expected("function", "one of " + names, function == nullptr ? "null" : function);
  }
  if (pass < TILELOSS_FORWARD || pass > TILELOSS_FROM_ROW_STATE) return expected("pass", "0 to 3", to_string(pass));
  if (pass == TILELOSS_VALUE_AND_GRAD && !p.loss->info.is_loss) {
    return expected("pass", std::string("forward or backward: ") + function + " has no loss", "value_and_grad");
  }
  if (args == nullptr) return expected("args", "a struct from tileloss_args_init", "null");
  if (Status s = take_struct("args", args, &p.args); !s.ok()) return s;
  p.pass = pass;
  p.has_row_state = p.args.row_state != nullptr;
  if (p.has_row_state) {
    if (Status s = take_struct("row_state", p.args.row_state, &p.row_state); !s.ok()) return s;
  }
  p.has_pair_state = p.args.pair_state != nullptr;
  if (p.has_pair_state) {
    if (!p.loss->needs_target_sweep() || p.loss->target() == TargetKind::kColumns)
      return expected("pair_state", std::string("none: ") + function + " does not take it", "a pair state");
    if (Status s = take_struct("pair_state", p.args.pair_state, &p.pair_state); !s.ok()) return s;
    if (Status s = take_struct("pair_state.teacher", p.pair_state.teacher, &p.teacher_state); !s.ok()) return s;
    if (Status s = take_struct("pair_state.label", p.pair_state.label, &p.label_state); !s.ok()) return s;
  }
  p.options.resize(p.loss->info.options_size);
  fill_defaults(p.loss->fields, p.options.data(), p.options.size());
  if (options != nullptr) {
    std::size_t given = 0;
    std::memcpy(&given, options, sizeof given);
    if (given < sizeof(CommonOptions) || given > p.options.size()) {
      return expected("options.struct_size", "that of " + std::string(function) + "'s options, " + to_string(p.options.size()),
                      to_string(given));
    }
    std::memcpy(p.options.data() + sizeof given, static_cast<const std::byte*>(options) + sizeof given, given - sizeof given);
  }
  std::memcpy(static_cast<void*>(&p.logit), p.options.data() + offsetof(CommonOptions, logit), sizeof p.logit);
  std::memcpy(static_cast<void*>(&p.linear), p.options.data() + offsetof(CommonOptions, linear), sizeof p.linear);
  if (Status s = check_options(p.loss->fields, p.options.data(), false); !s.ok()) return s;
  if (Status s = check_effects(p.loss->fields, p.options.data()); !s.ok()) return s;
  if (Status s = check_transforms(p, false); !s.ok()) return s;
  p.num_metrics = p.loss->info.metrics == nullptr ? 0 : 1 + std::ranges::count(std::string_view(p.loss->info.metrics), '|');
  p.is_per_row = p.loss->info.is_per_row != nullptr && p.loss->info.is_per_row(p.options.data());
  if (Status s = resolve_matrices(p); !s.ok()) return s;
  if (Status s = resolve_vocabulary(p); !s.ok()) return s;
  if (Status s = check_allowed(p); !s.ok()) return s;
  if (Status s = check_labels_per_row(p); !s.ok()) return s;
  if (Status s = check_row_groups(p); !s.ok()) return s;
  if (Status s = check_vectors(p); !s.ok()) return s;
  const LossContext context = make_context(p);
  if (p.loss->info.check != nullptr) {
    if (std::string message = p.loss->info.check(context); !message.empty()) return invalid(std::move(message));
  }
  const std::unique_ptr<RowStage> stage = p.loss->info.make(context);
  p.stage_bytes = stage->scratch_bytes();
  p.is_multiple_of_p = stage->is_multiple_of_p();
  Status passes = p.has_pair_state ? resolve_shard_of_pair(p) : resolve_passes(p, stage->forward_sums(), stage->backward_sums());
  if (!passes.ok()) return passes;
  // A forward for row outputs or the row state alone needs no loss of any row.
  p.couples_rows = stage->couples_rows() && (p.needs_backward || present(p.args.loss) || present(p.args.metrics));
  return {};
}

Status check_row_state_struct(const char* name, const tileloss_row_state* given, tileloss_row_state* whole) {
  if (given == nullptr) return expected(name, "a struct from tileloss_row_state_init", "null");
  if (Status s = take_struct(name, given, whole); !s.ok()) return s;
  if (whole->rows < 0) return expected(std::string(name) + ".rows", ">= 0", to_string(whole->rows));
  if (whole->rows > 0 && (kMaxSumLabelLogit & ~present_arrays(*whole)) != 0)
    return expected(name, "the arrays max, sum and label_logit", "a null one");
  if (whole->label_logits != nullptr && (whole->labels_per_row < 2 || whole->labels_per_row > kMostLabels)) {
    return expected(std::string(name) + ".labels_per_row", "2 to " + to_string(kMostLabels) + " with label_logits",
                    to_string(whole->labels_per_row));
  }
  if (find_backend(whole->device_type) == nullptr)
    return expected(std::string(name) + ".device_type", "one of " + all_devices(), to_string(whole->device_type));
  return find_device(std::string(name) + ".", device_of(*whole));
}

std::uint64_t fingerprint(const Problem& p) {
  Fingerprint h;
  h.add(p.loss->name.c_str());
  h.add(p.pass);
  hash_tensors(p, h);
  h.add(p.device_type);
  h.add(p.device_index);
  h.add(p.rows);
  h.add(p.sums);
  h.add(p.has_classes());
  h.add(p.row_state.label_logits != nullptr);
  h.add(p.needs_forward);
  h.add(p.has_pair_state);
  // What numbers that may change decide if they leave 0: the plan is cut by it.
  h.add(p.couples_rows);
  h.add(p.stage_bytes);
  if (p.loss->is_linear) h.add(p.is_multiple_of_p);
  hash_options(p.loss->fields, p.options.data(), h);
  return h.value();
}

}  // namespace tileloss::impl::api
