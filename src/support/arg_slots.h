// The tensors of a call, for tools that treat all of them alike.
#pragma once

#include <tileloss/tileloss.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "schema/tensors.h"

namespace tileloss::tools {

enum class SlotUse { kInput, kOutput };

inline SlotUse use_of(const impl::TensorSlot& slot) { return slot.is_output() ? SlotUse::kOutput : SlotUse::kInput; }
inline size_t element_bytes(tileloss_dtype dtype) { return static_cast<size_t>(impl::element_bytes(dtype)); }

// The gradient is written over the logits.
inline bool is_in_place(const tileloss_args& args) {
  return args.dlogits.dtype != TILELOSS_NONE && args.dlogits.data != nullptr && args.dlogits.data == args.logits.data;
}

// One tensor, whatever its kind. Vectors and arrays are a column: `cols` is 1, and what is broadcast has one row. A matrix whose
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
  // Of logits (the teacher's and target_probs too) and dlogits, whose rows may come in groups (row_groups): rows of a group, and
  // elements from one to the next.
  bool may_be_grouped = false;
  int64_t group_rows = 0;  // 0: the stride holds for all rows
  int64_t group_stride = 0;
};

// Calls visit(TensorView&) for every tensor that is present, in the order of the library's table: matrices, then vectors, then
// the row state's arrays. What it changes of data, and of the stride and the groups of a matrix, is written back. A row state is
// an input where `pass` starts from one. `adds`: the call accumulates dhead, dhead_r and dbias.
template <class Visit>
void for_each_tensor(tileloss_args& args, tileloss_pass pass, const Visit& visit, bool adds = false) {
  const int64_t group_rows = args.row_groups.rows;
  for (const impl::TensorSlot& slot : impl::tensor_slots()) {
    if (slot.matrix == nullptr || !impl::present(args, slot)) continue;
    tileloss_matrix& m = args.*slot.matrix;
    int64_t* const group_stride = slot.shape != impl::Shape::kLogits      ? nullptr
                                  : slot.is_output()                      ? &args.row_groups.dlogits_stride
                                  : slot.matrix == &tileloss_args::logits ? &args.row_groups.logits_stride
                                                                          : &args.row_groups.teacher_logits_stride;
    const bool is_transposed = m.row_stride == 1 && m.col_stride != 1;
    int64_t& stride = is_transposed ? m.col_stride : m.row_stride;
    const bool is_broadcast = m.row_stride == 0;
    TensorView view{slot.name,
                    m.data,
                    element_bytes(m.dtype),
                    is_broadcast ? std::min<std::int64_t>(m.rows, 1) : m.rows,
                    m.cols,
                    stride,
                    true,
                    use_of(slot),
                    slot.is_output(),
                    is_transposed};
    view.is_added_to = adds && slot.is_output() && (slot.shape == impl::Shape::kHead || slot.shape == impl::Shape::kHeadR);
    if (is_transposed) std::swap(view.rows, view.cols);
    if (group_stride != nullptr) {
      view.may_be_grouped = true;
      view.group_rows = group_rows;
      view.group_stride = *group_stride;
    }
    visit(view);
    m.data = view.data;
    if (!is_broadcast) stride = view.stride;
    if (group_stride == nullptr) continue;
    args.row_groups.rows = view.group_rows;
    *group_stride = view.group_stride;
  }
  for (const impl::TensorSlot& slot : impl::tensor_slots()) {
    if (slot.vector == nullptr || !impl::present(args, slot)) continue;
    tileloss_vector& v = args.*slot.vector;
    TensorView view{slot.name, v.data,      element_bytes(v.dtype), v.stride == 0 && v.size > 1 ? 1 : v.size, 1, v.stride,
                    false,     use_of(slot)};
    view.is_gradient = slot.role == TILELOSS_ROLE_GRADIENT;
    view.is_added_to = view.is_gradient && adds;
    visit(view);
    v.data = view.data;
  }
  if (args.row_state == nullptr) return;
  tileloss_row_state& state = *args.row_state;
  const bool is_input = pass == TILELOSS_BACKWARD || pass == TILELOSS_FROM_ROW_STATE;
  const auto visit_array = [&]<class T>(const impl::StateArray& array, T*& data) {
    if (data == nullptr) return;
    const int64_t count = state.rows * array.per_row(state);
    TensorView view{array.name, data, sizeof(T), count, 1, 1, false, is_input ? SlotUse::kInput : SlotUse::kOutput};
    visit(view);
    data = static_cast<T*>(view.data);
  };
  for (const impl::StateArray& array : impl::state_arrays()) {
    if (array.member != nullptr) {
      visit_array(array, state.*array.member);
    } else {
      visit_array(array, state.argmax);
    }
  }
}

}  // namespace tileloss::tools
