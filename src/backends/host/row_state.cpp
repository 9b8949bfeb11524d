#include "backends/host/row_state.h"

#include "core/row_state.h"
#include "losses/row_arrays.h"

namespace tileloss::impl::host {

void set_identity(const tileloss_row_state& state) {
  for (std::int64_t i = 0; i < state.rows; ++i) save_row(state, i, RowState{});
}

void merge(tileloss_row_state* into, const tileloss_row_state& from) {
  tileloss_row_state both = *into;
  if (from.entropy_sum == nullptr) both.entropy_sum = nullptr;
  if (from.collision_sum == nullptr) both.collision_sum = nullptr;
  if (from.smoothing_sum == nullptr) both.smoothing_sum = nullptr;
  if (from.argmax == nullptr) both.argmax = nullptr;
  for (std::int64_t i = 0; i < into->rows; ++i) {
    save_row(both, i, impl::merge(load_row(*into, i), into->smoothing_weight, load_row(from, i), from.smoothing_weight));
  }
}

}  // namespace tileloss::impl::host
