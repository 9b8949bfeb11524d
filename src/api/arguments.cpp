#include "api/arguments.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <tuple>

namespace tileloss::impl::api {
namespace {

using std::to_string;

std::string dtype_names(std::uint32_t dtypes) {
  std::string names;
  for (tileloss_dtype t = TILELOSS_FLOAT32; t <= TILELOSS_UINT8; ++t) {
    if ((dtypes & dtype_bit(t)) == 0) continue;
    dtypes &= ~dtype_bit(t);
    names += (names.empty() ? "" : dtypes == 0 ? " or " : ", ") + std::string(dtype_name(t));
  }
  return names;
}

// rows * stride * bytes must not overflow.
bool fits(std::int64_t count, std::int64_t stride, tileloss_dtype dtype) {
  std::int64_t elements = 0, bytes = 0;
  return !__builtin_mul_overflow(count, stride, &elements) && !__builtin_mul_overflow(elements, element_bytes(dtype), &bytes);
}

std::int64_t wanted_size(const Problem& p, const TensorSlot& slot, const tileloss_vector& v) {
  constexpr tileloss_vector tileloss_args::*kOfLabels[] = {&tileloss_args::labels, &tileloss_args::logp,
                                                           &tileloss_args::logp_grad};
  if (p.has_several_labels() && std::ranges::find(kOfLabels, slot.vector) != std::end(kOfLabels))
    return p.rows * p.args.labels_per_row;
  switch (slot.shape) {
    case Shape::kRows: return p.rows;
    case Shape::kClasses: return p.classes;
    case Shape::kColumns: return p.total_columns;
    case Shape::kLosses: return p.is_per_row ? p.rows : 1;
    case Shape::kSequenceOffsets:
    case Shape::kAdvantages:
    case Shape::kMetrics:
    case Shape::kLogits:
    case Shape::kHidden:
    case Shape::kHead:
    case Shape::kTeacherHidden:
    case Shape::kTeacherHead:
    case Shape::kTeacherColumns:
    case Shape::kWords:
    case Shape::kHiddenR:
    case Shape::kHeadR: break;
  }
  return v.size;
}

Status check_vector(const Problem& p, const TensorSlot& slot) {
  const tileloss_vector& v = p.args.*slot.vector;
  const std::string name = slot.name;
  if (slot.groups != 0 && (p.loss->groups & slot.groups) == 0)
    return expected(name, "none: " + p.loss->name + " does not take it", "a vector");
  const bool known = v.dtype > TILELOSS_NONE && v.dtype <= TILELOSS_UINT8;
  if (!known || (slot.dtypes & dtype_bit(v.dtype)) == 0)
    return expected(name + ".dtype", dtype_names(slot.dtypes), dtype_name(v.dtype));
  if (Status s = check_device(p, name, device_of(v)); !s.ok()) return s;
  if (v.reserved != 0) return expected(name + ".reserved", "0", to_string(v.reserved));
  const std::int64_t size = wanted_size(p, slot, v);
  if (v.size != size) return expected(name + ".size", to_string(size), to_string(v.size));
  if (v.size < 0) return expected(name + ".size", ">= 0", to_string(v.size));
  if (slot.is_output() && size > 1 && v.stride == 0) return expected(name + ".stride", "not 0 for an output", "0");
  if (v.stride < 0) return expected(name + ".stride", ">= 0", to_string(v.stride));
  if (!fits(size, v.stride, v.dtype))
    return expected(name, "less than 2^63 bytes", to_string(size) + " * " + to_string(v.stride));
  return {};
}

Status check_sequences(const Problem& p) {
  const tileloss_args& a = p.args;
  const bool takes = (p.loss->groups & kSequences) != 0;
  if (a.sequence_length != 0 && !takes) {
    return expected("sequence_length", "0: " + p.loss->name + " does not take it", to_string(a.sequence_length));
  }
  if (a.sequence_length < 0) return expected("sequence_length", ">= 0", to_string(a.sequence_length));
  if (a.sequence_length > 0 && present(a.sequence_offsets))
    return expected("sequence_length", "0 together with sequence_offsets", to_string(a.sequence_length));
  if (a.sequence_length > 0 && p.rows % a.sequence_length != 0) {
    return expected("sequence_length", "a divisor of the number of rows, " + to_string(p.rows), to_string(a.sequence_length));
  }
  if (present(a.sequence_offsets) && a.sequence_offsets.size < 1)
    return expected("sequence_offsets.size", ">= 1", to_string(a.sequence_offsets.size));
  return {};
}

// Elements that do not share memory: one stride steps over all that the other spans. Strides of an empty matrix are never used.
Status check_strides(const std::string& name, const tileloss_matrix& m) {
  if (m.rows == 0) return {};
  if (m.row_stride < 1 && m.rows > 1) return expected(name + ".row_stride", ">= 1", to_string(m.row_stride));
  if (m.col_stride < 1 && m.cols > 1) return expected(name + ".col_stride", ">= 1", to_string(m.col_stride));
  if (!fits(m.rows, m.row_stride, m.dtype) || !fits(m.cols, m.col_stride, m.dtype))
    return expected(name, "less than 2^63 bytes", shape(m.rows, m.cols));
  const std::int64_t row_span = (m.cols - 1) * m.col_stride, col_span = (m.rows - 1) * m.row_stride;
  if (m.rows < 2 || m.cols < 2 || m.row_stride > row_span || m.col_stride > col_span) return {};
  return expected(name + ".row_stride",
                  "> (cols - 1) * col_stride = " + to_string(row_span) + ", or col_stride > " + to_string(col_span),
                  to_string(m.row_stride));
}

}  // namespace

std::string all_devices() {
  std::string names;
  for (const Backend* backend : backends()) names += (names.empty() ? "" : ", ") + std::string(backend->name());
  return names;
}

const char* device_name(tileloss_device_type device_type) {
  const Backend* backend = find_backend(device_type);
  return backend == nullptr ? "none" : backend->name();
}

Status choose_device(Problem& p, const char* name, Device device) {
  p.device_type = device.type;
  p.device_index = device.index;
  return find_device(std::string(name) + ".", device);
}

Status check_device(const Problem& p, const std::string& name, Device device) {
  if (device.type != p.device_type) {
    return expected(name + ".device_type", std::string("the first tensor's device, ") + device_name(p.device_type),
                    to_string(device.type));
  }
  if (device.index == p.device_index) return {};
  return expected(name + ".device_index", "the first tensor's, " + to_string(p.device_index), to_string(device.index));
}

Status find_device(const std::string& prefix, Device device) {
  const Backend* const backend = find_backend(device.type);
  if (backend == nullptr) {
    return {TILELOSS_UNSUPPORTED, prefix + "device_type: expected a device of this build (" + all_devices() + ")" +
                                      why_no_backend(device.type) + ", got " + to_string(device.type)};
  }
  const std::int32_t count = backend->device_count();
  if (device.index >= 0 && device.index < count) return {};
  return expected(prefix + "device_index", count == 1 ? "0" : "0 to " + to_string(count - 1), to_string(device.index));
}

Status check_matrix(const Problem& p, const char* name, const tileloss_matrix& m, Layout layout) {
  if (m.dtype != TILELOSS_FLOAT32 && m.dtype != TILELOSS_BFLOAT16 && m.dtype != TILELOSS_FLOAT16) {
    return expected(std::string(name) + ".dtype", "float32, bfloat16 or float16", dtype_name(m.dtype));
  }
  return check_shape(p, name, m, layout);
}

Status check_shape(const Problem& p, const char* name, const tileloss_matrix& m, Layout layout) {
  if (Status s = check_device(p, name, device_of(m)); !s.ok()) return s;
  if (m.reserved != 0) return expected(std::string(name) + ".reserved", "0", to_string(m.reserved));
  if (m.rows < 0) return expected(std::string(name) + ".rows", ">= 0", to_string(m.rows));
  if (m.cols < 1) return expected(std::string(name) + ".cols", ">= 1", to_string(m.cols));
  if (m.cols > std::numeric_limits<std::int32_t>::max())
    return expected(std::string(name) + ".cols", "< 2^31", to_string(m.cols));
  if (layout == Layout::kAnyStrides) return check_strides(name, m);
  if (m.col_stride != 1 && m.cols > 1) return expected(std::string(name) + ".col_stride", "1", to_string(m.col_stride));
  if (m.row_stride < m.cols && m.rows > 1) {
    return expected(std::string(name) + ".row_stride", ">= cols = " + to_string(m.cols), to_string(m.row_stride));
  }
  if (m.rows > 1 && !fits(m.rows, m.row_stride, m.dtype))
    return expected(std::string(name), "less than 2^63 bytes", shape(m.rows, m.row_stride));
  return {};
}

Status resolve_teacher_columns(const Problem& p) {
  const tileloss_matrix &ids = p.args.teacher_ids, &logprobs = p.args.teacher_logprobs;
  if (!present(ids)) return expected("teacher_ids", "an int32 or int64 matrix [N,K]", "none");
  if (!present(logprobs)) return expected("teacher_logprobs", "a matrix of teacher_ids' shape", "none");
  if (ids.dtype != TILELOSS_INT32 && ids.dtype != TILELOSS_INT64)
    return expected("teacher_ids.dtype", "int32 or int64", dtype_name(ids.dtype));
  if (Status s = check_shape(p, "teacher_ids", ids, Layout::kAnyStrides); !s.ok()) return s;
  if (Status s = check_matrix(p, "teacher_logprobs", logprobs, Layout::kAnyStrides); !s.ok()) return s;
  if (ids.rows != p.rows) return expected("teacher_ids.rows", "the rows, " + to_string(p.rows), to_string(ids.rows));
  if (logprobs.rows != ids.rows || logprobs.cols != ids.cols) {
    return expected("teacher_logprobs", "teacher_ids' shape " + shape(ids.rows, ids.cols), shape(logprobs.rows, logprobs.cols));
  }
  return {};
}

Status check_allowed(const Problem& p) {
  tileloss_matrix words = p.args.allowed;
  if (!present(words)) return {};
  if (words.dtype != TILELOSS_INT32) return expected("allowed.dtype", "int32", dtype_name(words.dtype));
  const std::int64_t cols = (p.total_columns + 31) / 32;
  if (words.rows != p.rows || words.cols != cols)
    return expected("allowed", "a word for 32 columns of the logits, " + shape(p.rows, cols), shape(words.rows, words.cols));
  if (words.row_stride == 0) words.row_stride = cols;  // one set for all rows
  if (Status s = check_shape(p, "allowed", words, Layout::kRows); !s.ok()) return s;
  if (p.logit.vocab_start % 32 == 0) return {};
  return expected("vocab_start", "a multiple of 32 with allowed", to_string(p.logit.vocab_start));
}

Status check_labels_per_row(const Problem& p) {
  const tileloss_args& a = p.args;
  const std::string name = "labels_per_row", given = to_string(a.labels_per_row);
  if (a.labels_per_row < 0 || a.labels_per_row > kMostLabels) return expected(name, "0 to " + to_string(kMostLabels), given);
  if (!p.has_several_labels()) return {};
  if (!p.loss->info.takes_several_labels) return expected(name, "0 or 1, as " + p.loss->name + " takes one label a row", given);
  if (present(a.correct)) return expected("correct", "none with several labels a row", "a vector");
  if (p.rows > std::numeric_limits<std::int64_t>::max() / (8 * kMostLabels))
    return expected(name, "less than 2^63 bytes of labels", given);
  return {};
}

Status check_row_groups(const Problem& p) {
  const tileloss_args& a = p.args;
  const tileloss_row_groups& g = a.row_groups;
  if (g.rows == 0) return {};
  if (!present(a.logits)) return expected("row_groups.rows", "0 without logits", to_string(g.rows));
  if (g.rows < 0 || p.rows % g.rows != 0) {
    return expected("row_groups.rows", "0 or a divisor of the number of rows, " + to_string(p.rows), to_string(g.rows));
  }
  for (const auto& [name, m, stride] : {std::tuple{"row_groups.logits_stride", &a.logits, g.logits_stride},
                                        {"row_groups.dlogits_stride", &a.dlogits, g.dlogits_stride},
                                        {"row_groups.teacher_logits_stride", &a.teacher_logits, g.teacher_logits_stride},
                                        {"row_groups.teacher_logits_stride", &a.target_probs, g.teacher_logits_stride}}) {
    const std::int64_t groups = p.rows / g.rows;
    if (!present(*m) || groups < 2) continue;
    const std::int64_t least = (g.rows - 1) * m->row_stride + m->cols;
    if (stride < least) return expected(name, ">= " + to_string(least) + ", what a group spans", to_string(stride));
    if (!fits(groups, stride, m->dtype)) return expected(name, "less than 2^63 bytes in all", to_string(stride));
  }
  return {};
}

Status check_vectors(const Problem& p) {
  const tileloss_args& a = p.args;
  for (const TensorSlot& slot : tensor_slots()) {
    if (slot.vector == nullptr || !present(a, slot)) continue;
    if (Status s = check_vector(p, slot); !s.ok()) return s;
  }
  if (!present(a.labels) && !p.loss->needs_target_sweep())
    return expected("labels", "an int32 or int64 vector of size " + to_string(p.rows), "none");
  if (!present(a.labels) && (present(a.logp) || present(a.correct)))
    return expected("labels", std::string("a vector, for ") + (present(a.logp) ? "logp" : "correct"), "none");
  if (present(a.class_weights) && a.class_weights.stride != 1 && p.classes > 1) {
    return expected("class_weights.stride", "1", to_string(a.class_weights.stride));
  }
  if (present(a.metrics) && (a.metrics.size < 1 || a.metrics.size > p.num_metrics))
    return expected("metrics.size", "1 to " + to_string(p.num_metrics), to_string(a.metrics.size));
  return check_sequences(p);
}

Status check_pointers(const Problem& p, const Backend& backend) {
  const tileloss_args& a = p.args;
  for (const TensorSlot& slot : tensor_slots()) {
    if (!present(a, slot)) continue;
    const bool is_vector = slot.vector != nullptr;
    const bool has_data =
        is_vector ? (a.*slot.vector).size > 0 && (p.rows > 0 || slot.shape != Shape::kClasses) : (a.*slot.matrix).rows > 0;
    const void* const data = is_vector ? (a.*slot.vector).data : (a.*slot.matrix).data;
    if (has_data && data == nullptr) return expected(std::string(slot.name) + ".data", "a pointer", "null");
  }
  return check_memory(p, backend);
}

void hash_tensors(const Problem& p, Fingerprint& h) {
  const tileloss_args& a = p.args;
  for (const TensorSlot& slot : tensor_slots()) {
    h.add(present(a, slot));
    if (!present(a, slot)) continue;
    if (slot.vector != nullptr) {
      const tileloss_vector& v = a.*slot.vector;
      h.add(v.dtype);
      h.add(v.size);
      h.add(v.stride);
    } else {
      const tileloss_matrix& m = a.*slot.matrix;
      h.add(m.dtype);
      h.add(m.rows);
      h.add(m.cols);
      h.add(m.row_stride);
      h.add(m.col_stride);
    }
  }
  h.add(a.sequence_length);
  h.add(a.labels_per_row);
  h.add(a.row_groups.rows);
  h.add(a.row_groups.logits_stride);
  h.add(a.row_groups.dlogits_stride);
  h.add(a.row_groups.teacher_logits_stride);
}

}  // namespace tileloss::impl::api
