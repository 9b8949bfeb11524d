#include "api/arguments.h"

#include <limits>
#include <tuple>

#include "api/problem.h"

namespace tileloss::api {
namespace {

using std::to_string;

constexpr std::uint32_t bit(tileloss_dtype t) { return 1u << t; }
constexpr std::uint32_t kFloat = bit(TILELOSS_FLOAT32);
constexpr std::uint32_t kAnyFloat = kFloat | bit(TILELOSS_BFLOAT16) | bit(TILELOSS_FLOAT16);
constexpr std::uint32_t kInteger = bit(TILELOSS_INT32) | bit(TILELOSS_INT64);
constexpr std::uint32_t kLinear = 1u << 31;  // of the functions with the LM head, beside LossInputs
constexpr std::uint32_t kAnyMask = bit(TILELOSS_UINT8) | kInteger | kFloat;

using Args = tileloss_args;
using Slot = VectorSlot;
constexpr VectorSlot kSlots[] = {
    {"labels", &Args::labels, kInteger, Slot::kRows, false, 0},
    {"token_weights", &Args::token_weights, kFloat, Slot::kRows, false, kTokenWeights},
    {"class_weights", &Args::class_weights, kFloat, Slot::kClasses, false, kClassWeights},
    {"loss_grad", &Args::loss_grad, kFloat, Slot::kLosses, false, kLossGrad},
    {"logp_grad", &Args::logp_grad, kFloat, Slot::kRows, false, kRowGrads},
    {"lse_grad", &Args::lse_grad, kFloat, Slot::kRows, false, kRowGrads},
    {"entropy_grad", &Args::entropy_grad, kFloat, Slot::kRows, false, kRowGrads},
    {"mask", &Args::mask, kAnyMask, Slot::kRows, false, kMask},
    {"old_logp", &Args::old_logp, kFloat, Slot::kRows, false, kPolicyLogps},
    {"ref_logp", &Args::ref_logp, kFloat, Slot::kRows, false, kPolicyLogps},
    {"sampler_logp", &Args::sampler_logp, kFloat, Slot::kRows, false, kPolicyLogps},
    {"advantages", &Args::advantages, kFloat, Slot::kAny, false, kAdvantages},
    {"sequence_offsets", &Args::sequence_offsets, kInteger, Slot::kAny, false, kSequences},
    {"bias", &Args::bias, kAnyFloat, Slot::kColumns, false, kLinear},
    {"dbias", &Args::dbias, kAnyFloat, Slot::kColumns, true, kLinear},
    {"loss", &Args::loss, kFloat, Slot::kLosses, true, 0},
    {"logp", &Args::logp, kFloat, Slot::kRows, true, 0},
    {"lse", &Args::lse, kFloat, Slot::kRows, true, 0},
    {"entropy", &Args::entropy, kFloat, Slot::kRows, true, 0},
    {"argmax", &Args::argmax, bit(TILELOSS_INT64), Slot::kRows, true, 0},
    {"correct", &Args::correct, bit(TILELOSS_UINT8), Slot::kRows, true, 0},
    {"log_sum_sq_probs", &Args::log_sum_sq_probs, kFloat, Slot::kRows, true, 0},
    {"mean_logit", &Args::mean_logit, kFloat, Slot::kRows, true, 0},
    {"metrics", &Args::metrics, kFloat, Slot::kAny, true, kStepMetrics},
};

std::string dtype_names(std::uint32_t dtypes) {
  std::string names;
  for (tileloss_dtype t = TILELOSS_FLOAT32; t <= TILELOSS_UINT8; ++t) {
    if ((dtypes & bit(t)) == 0) continue;
    dtypes &= ~bit(t);
    names += (names.empty() ? "" : dtypes == 0 ? " or " : ", ") + std::string(dtype_name(t));
  }
  return names;
}

// rows * stride * bytes must not overflow.
bool fits(std::int64_t count, std::int64_t stride, tileloss_dtype dtype) {
  std::int64_t elements = 0, bytes = 0;
  return !__builtin_mul_overflow(count, stride, &elements) && !__builtin_mul_overflow(elements, element_bytes(dtype), &bytes);
}

std::int64_t wanted_size(const Problem& p, const VectorSlot& slot, const tileloss_vector& v) {
  switch (slot.size) {
    case Slot::kRows: return p.rows;
    case Slot::kClasses: return p.classes;
    case Slot::kColumns: return p.total_columns;
    case Slot::kLosses: return p.is_per_row ? p.rows : 1;
    default: return v.size;
  }
}

Status check_vector(const Problem& p, const VectorSlot& slot) {
  const tileloss_vector& v = p.args.*slot.member;
  const std::string name = slot.name;
  const bool known = v.dtype > TILELOSS_NONE && v.dtype <= TILELOSS_UINT8;
  if (!known || (slot.dtypes & bit(v.dtype)) == 0)
    return expected(name + ".dtype", dtype_names(slot.dtypes), dtype_name(v.dtype));
  if (v.device_type != TILELOSS_CPU) return expected(name + ".device_type", "the logits' device (CPU)", to_string(v.device_type));
  if (v.reserved != 0) return expected(name + ".reserved", "0", to_string(v.reserved));
  const std::int64_t size = wanted_size(p, slot, v);
  if (v.size != size) return expected(name + ".size", to_string(size), to_string(v.size));
  if (v.size < 0) return expected(name + ".size", ">= 0", to_string(v.size));
  if (slot.is_output && size > 1 && v.stride == 0) return expected(name + ".stride", "not 0 for an output", "0");
  if (v.stride < 0) return expected(name + ".stride", ">= 0", to_string(v.stride));
  if (!fits(size, v.stride, v.dtype))
    return expected(name, "less than 2^63 bytes", to_string(size) + " * " + to_string(v.stride));
  const std::uint32_t inputs = p.loss->info.inputs | (p.loss->is_linear ? kLinear : 0u);
  if (slot.input != 0 && (inputs & slot.input) == 0)
    return expected(name, "none: " + p.loss->name + " does not take it", "a vector");
  return {};
}

Status check_sequences(const Problem& p) {
  const tileloss_args& a = p.args;
  const bool takes = (p.loss->info.inputs & kSequences) != 0;
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

Status check_offsets(const Problem& p) {
  const Sequences sequences(p.args.sequence_offsets, 0, p.rows);
  if (!sequences.has_offsets()) return {};
  const auto entry = [](std::int64_t i) { return "sequence_offsets[" + to_string(i) + "]"; };
  const IntegerInput offsets(p.args.sequence_offsets);
  if (offsets[0] != 0) return expected(entry(0), "0", to_string(offsets[0]));
  for (std::int64_t i = 1; i < offsets.size(); ++i) {
    if (offsets[i] < offsets[i - 1])
      return expected(entry(i), ">= the one before it, " + to_string(offsets[i - 1]), to_string(offsets[i]));
  }
  const std::int64_t last = offsets.size() - 1;
  if (offsets[last] != p.rows) return expected(entry(last), "the number of rows, " + to_string(p.rows), to_string(offsets[last]));
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

std::span<const VectorSlot> vector_slots() { return kSlots; }

std::int64_t element_bytes(tileloss_dtype t) {
  switch (t) {
    case TILELOSS_INT64: return 8;
    case TILELOSS_FLOAT32:
    case TILELOSS_INT32: return 4;
    case TILELOSS_UINT8: return 1;
    default: return 2;
  }
}

cpu::StorageType storage_type(tileloss_dtype t) {
  return t == TILELOSS_BFLOAT16 ? cpu::kStorageBfloat16 : t == TILELOSS_FLOAT16 ? cpu::kStorageFloat16 : cpu::kStorageFloat32;
}

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

Status check_matrix(const char* name, const tileloss_matrix& m, Layout layout) {
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
  if (layout == Layout::kAnyStrides) return check_strides(name, m);
  if (m.col_stride != 1 && m.cols > 1) return expected(std::string(name) + ".col_stride", "1", to_string(m.col_stride));
  if (m.row_stride < m.cols && m.rows > 1) {
    return expected(std::string(name) + ".row_stride", ">= cols = " + to_string(m.cols), to_string(m.row_stride));
  }
  if (m.rows > 1 && !fits(m.rows, m.row_stride, m.dtype))
    return expected(std::string(name), "less than 2^63 bytes", shape(m.rows, m.row_stride));
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
                                        {"row_groups.dlogits_stride", &a.dlogits, g.dlogits_stride}}) {
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
  for (const VectorSlot& slot : kSlots) {
    if (!present(a.*slot.member)) continue;
    if (Status s = check_vector(p, slot); !s.ok()) return s;
  }
  if (!present(a.labels)) return expected("labels", "an int32 or int64 vector of size " + to_string(p.rows), "none");
  if (present(a.class_weights) && a.class_weights.stride != 1 && p.classes > 1) {
    return expected("class_weights.stride", "1", to_string(a.class_weights.stride));
  }
  if (present(a.loss) && !p.loss->info.is_loss)
    return expected("loss", "none: " + p.loss->name + " does not take it", "a vector");
  if (present(a.metrics) && (a.metrics.size < 1 || a.metrics.size > p.num_metrics))
    return expected("metrics.size", "1 to " + to_string(p.num_metrics), to_string(a.metrics.size));
  return check_sequences(p);
}

Status check_pointers(const Problem& p) {
  const tileloss_args& a = p.args;
  for (const VectorSlot& slot : kSlots) {
    const tileloss_vector& v = a.*slot.member;
    if (present(v) && v.size > 0 && v.data == nullptr && (p.rows > 0 || slot.size != Slot::kClasses))
      return expected(std::string(slot.name) + ".data", "a pointer", "null");
  }
  if (Status s = check_offsets(p); !s.ok()) return s;
  for (const auto& [name, m] : {std::pair{"logits", &a.logits},
                                {"dlogits", &a.dlogits},
                                {"hidden", &a.hidden},
                                {"head", &a.head},
                                {"dhidden", &a.dhidden},
                                {"dhead", &a.dhead}}) {
    if (present(*m) && m->rows > 0 && m->data == nullptr) return expected(std::string(name) + ".data", "a pointer", "null");
  }
  return check_overlap(p);
}

void hash_tensors(const tileloss_args& a, Fingerprint& h) {
  for (const tileloss_matrix* m : {&a.logits, &a.dlogits, &a.hidden, &a.head, &a.dhidden, &a.dhead}) {
    h.add(m->dtype);
    if (!present(*m)) continue;
    h.add(m->rows);
    h.add(m->cols);
    h.add(m->row_stride);
    h.add(m->col_stride);
  }
  for (const VectorSlot& slot : kSlots) {
    const tileloss_vector& v = a.*slot.member;
    h.add(v.dtype);
    if (!present(v)) continue;
    h.add(v.size);
    h.add(v.stride);
  }
  h.add(a.sequence_length);
  h.add(a.compute_dtype);
  h.add(a.accumulate);
  h.add(a.row_groups.rows);
  h.add(a.row_groups.logits_stride);
  h.add(a.row_groups.dlogits_stride);
}

}  // namespace tileloss::api
