// The row state's monoid over arrays that the host can read.
#ifndef TILELOSS_BACKENDS_HOST_ROW_STATE_H_
#define TILELOSS_BACKENDS_HOST_ROW_STATE_H_

#include <tileloss/tileloss.h>

namespace tileloss::impl::host {

void set_identity(const tileloss_row_state& state);
void merge(tileloss_row_state* into, const tileloss_row_state& from);

}  // namespace tileloss::impl::host

#endif  // TILELOSS_BACKENDS_HOST_ROW_STATE_H_
