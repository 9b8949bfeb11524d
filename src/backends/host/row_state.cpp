#include "backends/host/row_state.h"

#include "core/row_state.h"
#include "losses/row_arrays.h"

namespace tileloss::impl::host {

void set_identity(const tileloss_row_state& state) {
  for (std::int64_t i = 0; i < state.rows; ++i) empty_row(state, i);
}

void merge(tileloss_row_state* into, const tileloss_row_state& from) {
  for (std::int64_t i = 0; i < into->rows; ++i) merge_row(*into, from, i);
}

}  // namespace tileloss::impl::host
