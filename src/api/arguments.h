// The checks of shapes, dtypes, strides and pointers that go over the table of tensors (schema/tensors.h).
#pragma once

#include <tileloss/tileloss.h>

#include <string>

#include "backends/backend.h"
#include "schema/options.h"
#include "schema/status.h"

namespace tileloss::impl::api {

// The name of the backend for a device type, "none" where there is none.
const char* device_name(tileloss_device_type device_type);
std::string all_devices();  // of this build
struct Device {
  tileloss_device_type type;
  std::int32_t index;
};
template <class On>
Device device_of(const On& on) {  // a view, or a row state
  return {on.device_type, on.device_index};
}
// Takes the first tensor's device for the call's.
Status choose_device(Problem& p, const char* name, Device device);
// Whether another lies on the call's.
Status check_device(const Problem& p, const std::string& name, Device device);
// Whether this build has it: TILELOSS_UNSUPPORTED where no backend serves its type. `prefix`: "logits.", of its members' names.
Status find_device(const std::string& prefix, Device device);

enum class Layout { kRows, kAnyStrides };  // columns side by side, or any strides that keep the elements apart
Status check_matrix(const Problem& p, const char* name, const tileloss_matrix& m, Layout layout = Layout::kRows);
// The same but for the dtype.
Status check_shape(const Problem& p, const char* name, const tileloss_matrix& m, Layout layout);
// Shapes, dtypes and strides of hidden, head and their gradients, in a pass that has them.
Status resolve_head(Problem& problem);
// The same of a teacher's, after the student's: a head of its own, of any width.
Status resolve_teacher_head(Problem& problem);
// teacher_ids and teacher_logprobs.
Status resolve_teacher_columns(const Problem& problem);
// The words of the allowed tokens. Needs the problem's rows and columns.
Status check_allowed(const Problem& problem);
// Whether the function takes that many labels a row. Needs the problem's columns and classes.
inline constexpr std::int64_t kMostLabels = 1024;  // of a row
Status check_labels_per_row(const Problem& problem);
// Whether the groups' strides keep the rows apart. Needs the problem's rows.
Status check_row_groups(const Problem& p);
// Every vector's dtype, size and stride, and whether the function takes it. Needs the problem's rows and classes.
Status check_vectors(const Problem& p);
// Refuses pointers that are null where there is data, then as check_memory does.
Status check_pointers(const Problem& p, const Backend& backend);
// Refuses memory that the device cannot reach, and an output that shares memory with an input or with another output, but for
// dlogits in the logits' own place.
Status check_memory(const Problem& p, const Backend& backend);
// Refuses a pointer that the call's device cannot reach.
Status check_reach(const std::string& name, const Problem& p, const Backend& backend, const void* pointer);
void hash_tensors(const Problem& p, Fingerprint& hash);

}  // namespace tileloss::impl::api
