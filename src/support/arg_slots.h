// The tensors of tileloss_args as a table, for tools that treat all of them alike.
#ifndef TILELOSS_SUPPORT_ARG_SLOTS_H_
#define TILELOSS_SUPPORT_ARG_SLOTS_H_

#include <tileloss/tileloss.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <utility>

namespace tileloss::tools {

enum class SlotUse { kInput, kOutput };

template <class View>
struct ArgSlot {
  const char* name;
  View tileloss_args::*view;
  SlotUse use;
};

inline constexpr ArgSlot<tileloss_matrix> kMatrixSlots[] = {
    {"logits", &tileloss_args::logits, SlotUse::kInput},    {"dlogits", &tileloss_args::dlogits, SlotUse::kOutput},
    {"hidden", &tileloss_args::hidden, SlotUse::kInput},    {"head", &tileloss_args::head, SlotUse::kInput},
    {"dhidden", &tileloss_args::dhidden, SlotUse::kOutput}, {"dhead", &tileloss_args::dhead, SlotUse::kOutput},
};

inline constexpr ArgSlot<tileloss_vector> kVectorSlots[] = {
    {"labels", &tileloss_args::labels, SlotUse::kInput},
    {"token_weights", &tileloss_args::token_weights, SlotUse::kInput},
    {"class_weights", &tileloss_args::class_weights, SlotUse::kInput},
    {"loss_grad", &tileloss_args::loss_grad, SlotUse::kInput},
    {"logp_grad", &tileloss_args::logp_grad, SlotUse::kInput},
    {"lse_grad", &tileloss_args::lse_grad, SlotUse::kInput},
    {"entropy_grad", &tileloss_args::entropy_grad, SlotUse::kInput},
    {"loss", &tileloss_args::loss, SlotUse::kOutput},
    {"logp", &tileloss_args::logp, SlotUse::kOutput},
    {"lse", &tileloss_args::lse, SlotUse::kOutput},
    {"entropy", &tileloss_args::entropy, SlotUse::kOutput},
    {"argmax", &tileloss_args::argmax, SlotUse::kOutput},
    {"correct", &tileloss_args::correct, SlotUse::kOutput},
    {"log_sum_sq_probs", &tileloss_args::log_sum_sq_probs, SlotUse::kOutput},
    {"mean_logit", &tileloss_args::mean_logit, SlotUse::kOutput},
    {"mask", &tileloss_args::mask, SlotUse::kInput},
    {"old_logp", &tileloss_args::old_logp, SlotUse::kInput},
    {"ref_logp", &tileloss_args::ref_logp, SlotUse::kInput},
    {"sampler_logp", &tileloss_args::sampler_logp, SlotUse::kInput},
    {"advantages", &tileloss_args::advantages, SlotUse::kInput},
    {"sequence_offsets", &tileloss_args::sequence_offsets, SlotUse::kInput},
    {"metrics", &tileloss_args::metrics, SlotUse::kOutput},
    {"bias", &tileloss_args::bias, SlotUse::kInput},
    {"dbias", &tileloss_args::dbias, SlotUse::kOutput},
};

static_assert(sizeof(tileloss_args) == sizeof(tileloss_args::struct_size) + sizeof(tileloss_args::sequence_length) +
                                           sizeof(tileloss_args::compute_dtype) + sizeof(tileloss_args::accumulate) +
                                           sizeof(tileloss_row_state) + sizeof(tileloss_row_groups) +
                                           std::size(kMatrixSlots) * sizeof(tileloss_matrix) +
                                           std::size(kVectorSlots) * sizeof(tileloss_vector),
              "tileloss_args has a tensor that is not in the tables above");

// The float arrays of the row state; argmax, the only other one, is int64.
struct RowStateSlot {
  const char* name;
  float* tileloss_row_state::*array;
};

inline constexpr RowStateSlot kRowStateSlots[] = {
    {"row_state.max", &tileloss_row_state::max},
    {"row_state.sum", &tileloss_row_state::sum},
    {"row_state.target", &tileloss_row_state::target},
    {"row_state.entropy_sum", &tileloss_row_state::entropy_sum},
    {"row_state.collision_sum", &tileloss_row_state::collision_sum},
    {"row_state.smoothing_sum", &tileloss_row_state::smoothing_sum},
};

constexpr size_t element_bytes(tileloss_dtype dtype) {
  switch (dtype) {
    case TILELOSS_INT64: return 8;
    case TILELOSS_FLOAT32:
    case TILELOSS_INT32: return 4;
    case TILELOSS_BFLOAT16:
    case TILELOSS_FLOAT16: return 2;
    case TILELOSS_UINT8: return 1;
    default: return 0;
  }
}

// The gradient is written over the logits.
inline bool is_in_place(const tileloss_args& args) {
  return args.dlogits.dtype != TILELOSS_NONE && args.dlogits.data != nullptr && args.dlogits.data == args.logits.data;
}

// One tensor, whatever its kind. Vectors and arrays are a column: `cols` is 1, and a broadcast vector has one row. A matrix whose
// rows lie side by side, as a head [H,V] does, shows its columns as rows.
struct TensorView {
  const char* name;
  void* data;
  size_t element;  // bytes
  int64_t rows;
  int64_t cols;
  int64_t stride;  // between rows, in elements
  bool is_matrix;
  SlotUse use;
  bool is_gradient = false;    // an output of a backward
  bool is_transposed = false;  // its rows are the matrix's columns
  bool is_added_to = false;    // by a call that accumulates
  // Of logits and dlogits, whose rows may come in groups (row_groups): rows of a group, and elements from one to the next.
  bool may_be_grouped = false;
  int64_t group_rows = 0;  // 0: the stride holds for all rows
  int64_t group_stride = 0;
};

// Calls visit(TensorView&) for every tensor that is present, in the order of the tables. What it changes of data, and of the
// stride and the groups of a matrix, is written back. A row state is an input where `pass` starts from one.
template <class Visit>
void for_each_tensor(tileloss_args& args, tileloss_pass pass, const Visit& visit) {
  const int64_t group_rows = args.row_groups.rows;
  for (const auto& slot : kMatrixSlots) {
    tileloss_matrix& m = args.*slot.view;
    if (m.dtype == TILELOSS_NONE) continue;
    int64_t* const group_stride = slot.view == &tileloss_args::logits    ? &args.row_groups.logits_stride
                                  : slot.view == &tileloss_args::dlogits ? &args.row_groups.dlogits_stride
                                                                         : nullptr;
    const bool is_transposed = m.row_stride == 1 && m.col_stride != 1;
    int64_t& stride = is_transposed ? m.col_stride : m.row_stride;
    TensorView view{slot.name, m.data,   element_bytes(m.dtype),       m.rows,       m.cols, stride,
                    true,      slot.use, slot.use == SlotUse::kOutput, is_transposed};
    view.is_added_to = args.accumulate != 0 && slot.view == &tileloss_args::dhead;
    if (is_transposed) std::swap(view.rows, view.cols);
    if (group_stride != nullptr) {
      view.may_be_grouped = true;
      view.group_rows = group_rows;
      view.group_stride = *group_stride;
    }
    visit(view);
    m.data = view.data;
    stride = view.stride;
    if (group_stride == nullptr) continue;
    args.row_groups.rows = view.group_rows;
    *group_stride = view.group_stride;
  }
  for (const auto& slot : kVectorSlots) {
    tileloss_vector& v = args.*slot.view;
    if (v.dtype == TILELOSS_NONE) continue;
    TensorView view{slot.name, v.data,  element_bytes(v.dtype), v.stride == 0 && v.size > 1 ? 1 : v.size, 1, v.stride,
                    false,     slot.use};
    view.is_gradient = slot.view == &tileloss_args::dbias;
    view.is_added_to = view.is_gradient && args.accumulate != 0;
    visit(view);
    v.data = view.data;
  }
  tileloss_row_state& state = args.row_state;
  if (state.struct_size == 0) return;
  const bool is_input = pass == TILELOSS_BACKWARD || pass == TILELOSS_FROM_ROW_STATE;
  const auto visit_array = [&]<class T>(const char* name, T*& array) {
    if (array == nullptr) return;
    TensorView view{name, array, sizeof(T), state.rows, 1, 1, false, is_input ? SlotUse::kInput : SlotUse::kOutput};
    visit(view);
    array = static_cast<T*>(view.data);
  };
  for (const RowStateSlot& slot : kRowStateSlots) visit_array(slot.name, state.*slot.array);
  visit_array("row_state.argmax", state.argmax);
}

}  // namespace tileloss::tools

#endif  // TILELOSS_SUPPORT_ARG_SLOTS_H_
