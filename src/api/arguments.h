// The tensors of tileloss_args: one table of the vectors, and the checks of shapes, dtypes and pointers that go over it.
#ifndef TILELOSS_API_ARGUMENTS_H_
#define TILELOSS_API_ARGUMENTS_H_

#include <tileloss/tileloss.h>

#include <cstdint>
#include <span>

#include "api/options.h"
#include "api/status.h"
#include "backends/cpu/sweep/row_kernel.h"

namespace tileloss::api {

struct Problem;

struct VectorSlot {
  enum Size { kRows, kClasses, kColumns, kLosses, kAny };

  const char* name;
  tileloss_vector tileloss_args::*member;
  std::uint32_t dtypes;  // bits 1 << tileloss_dtype
  Size size;
  bool is_output;
  std::uint32_t input;  // the LossInputs bit that a loss needs to take it; 0: every function does
};

std::span<const VectorSlot> vector_slots();

inline bool present(const tileloss_matrix& m) { return m.dtype != TILELOSS_NONE; }
inline bool present(const tileloss_vector& v) { return v.dtype != TILELOSS_NONE; }

const char* dtype_name(tileloss_dtype t);
std::int64_t element_bytes(tileloss_dtype t);
cpu::StorageType storage_type(tileloss_dtype t);  // of float32, bfloat16 and float16

enum class Layout { kRows, kAnyStrides };  // columns side by side, or any strides that keep the elements apart
Status check_matrix(const char* name, const tileloss_matrix& m, Layout layout = Layout::kRows);
// Whether the groups' strides keep the rows apart. Needs the problem's rows.
Status check_row_groups(const Problem& p);
// Every vector's dtype, size and stride, and whether the function takes it. Needs the problem's rows and classes.
Status check_vectors(const Problem& p);
// Pointers that are null where there is data, buffers that overlap, sequence offsets that do not rise.
Status check_pointers(const Problem& p);
// Refuses an output that shares memory with an input or with another output, but for dlogits in the logits' own place.
Status check_overlap(const Problem& p);
void hash_tensors(const tileloss_args& args, Fingerprint& hash);

}  // namespace tileloss::api

#endif  // TILELOSS_API_ARGUMENTS_H_
